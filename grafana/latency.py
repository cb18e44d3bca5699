"""The dashboard "Where does the time go?": from a request's arrival to its last token."""

from board import Panels, board, row, state
from empty import Empty
from panels import COUNT, MEAN, PASSES, PER_SECOND, TOKENS_PER_SECOND, Json, curves, heat, tile
from promql import (
    NOW,
    QUANTILE_WINDOW,
    buckets,
    each_per,
    mean,
    quantile,
    quantiles,
    rate_by,
    ratio,
    ratio_by,
    share,
    speed,
    told_quantile,
)

STEPS = "specops_target_step_seconds"
SUGGESTED, SUGGESTIONS = "specops_suggestion_tokens_total", "specops_suggestions_total"
OFFERED, PROMPT = "specops_prompt_budget_tokens_total", 'use="prompt"'


def _difference(longer: str, shorter: str) -> str:
    """The mean of one histogram minus the mean of another, per request."""
    return f"clamp_min({mean(longer)} - {mean(shorter)}, 0)"


def _glance() -> Panels:
    yield state(6)
    yield tile(
        "Queue wait, p95",
        "95 % of the requests got a slot faster. It grows when more requests arrive than the "
        "machine can answer: lower SPECOPS_QUEUE_SIZE to refuse earlier, or add machines.",
        "s",
        told_quantile(0.95, "specops_queue_wait_seconds"),
        warn=5,
        alarm=20,
    )
    yield tile(
        "First token, p95",
        "95 % of the requests had their first token sooner, waiting included. High without a "
        "queue: long prompts; see `Prompt tokens, offered and used`.",
        "s",
        told_quantile(0.95, "specops_time_to_first_token_seconds"),
        warn=5,
        alarm=20,
    )
    yield tile(
        "Inter-token, p95",
        "95 % of the tokens came sooner after the previous one. People read about five words per "
        "second: above 0.2 s they wait for the text. Fewer SPECOPS_SLOTS make each stream faster.",
        "s",
        told_quantile(0.95, "specops_inter_token_latency_seconds"),
        warn=0.2,
        alarm=1,
    )
    yield tile(
        "Latency, p95",
        "95 % of the requests were answered sooner, waiting included; the objective is 30 s. "
        "The panels below show which part takes too long.",
        "s",
        told_quantile(0.95, "specops_latency_seconds"),
        warn=15,
        alarm=30,
    )
    yield tile(
        "Computed per pass",
        "Tokens that one pass of the target computes: decoded, verified and prompt tokens. Near 1 "
        "with several running requests: they wait for KV blocks, see `Will it fit?`. At "
        "SPECOPS_MAX_BATCHED_TOKENS for long: prompts fill every pass.",
        MEAN,
        ratio("specops_pass_tokens_total", "specops_target_steps_total", window=NOW),
        decimals=1,
    )
    yield tile(
        "Prompt budget used",
        "Share of the room for prompt tokens that passes used while a prompt waited. Near 1 "
        "with late first tokens: prompts wait for room, so raise SPECOPS_MAX_INTER_TOKEN_LATENCY "
        "or SPECOPS_MAX_BATCHED_TOKENS. Low: prompts are short.",
        "percentunit",
        share("specops_pass_tokens_total", OFFERED, PROMPT, window=NOW),
        empty_when=Empty.NO_PROMPTS,
    )


def _parts() -> Panels:
    yield row("What does a request wait for?")
    ttft, latency = "specops_time_to_first_token_seconds", "specops_latency_seconds"
    wait = "specops_queue_wait_seconds"
    yield curves(
        "A mean request",
        "A mean request's time in the queue, computing its prompt, and generating. Work on the "
        "largest part. Queue: fewer requests or more slots. Prompt: shorter prompts. Generating: "
        "see the passes below.",
        "s",
        {
            "queue": mean(wait),
            "prompt": _difference(ttft, wait),
            "generating": _difference(latency, ttft),
        },
        stacked=True,
        width=12,
    )
    yield curves(
        "Where the engine's time goes",
        "Seconds per second spent on passes with prompts alone (`prefill`), with prompts and "
        "decoding requests (`mixed`), on plain decoding (`decode`), verifying and drafting. Near "
        "1 the engine is fully used, and more load makes it slower. Much `prefill` and `mixed`: "
        "long prompts, or many new requests.",
        "s",
        {
            "{{kind}}": rate_by("kind", f"{STEPS}_sum"),
            "drafting": speed("specops_draft_seconds_total"),
        },
        named=PASSES,
        stacked=True,
        width=12,
        empty_when=Empty.NO_REQUESTS,
    )


def _heatmaps() -> Panels:
    yield row("How long does it take, request by request?")
    heatmaps = {
        "Queue wait": (
            "specops_queue_wait_seconds",
            "Requests by the time they waited for a slot. A rising band: more requests arrive "
            "than are answered, and soon some get 429.",
        ),
        "Time to first token": (
            "specops_time_to_first_token_seconds",
            "Requests by the time to their first token. Two bands: some waited or had long "
            "prompts, others did not; compare with the queue wait.",
        ),
        "Time between tokens": (
            "specops_inter_token_latency_seconds",
            "Tokens by the time since the previous one. A second band far above: pauses while a "
            "prompt is computed; a lower SPECOPS_MAX_INTER_TOKEN_LATENCY makes them shorter.",
        ),
        "Latency": (
            "specops_latency_seconds",
            "Requests by the time to their end. It varies with the length of the answers; if the "
            "whole cloud moves up, the load has grown or the machine is slow.",
        ),
    }
    for title, (histogram, text) in heatmaps.items():
        yield heat(title, text, "s", buckets(histogram))


def _steps() -> Panels:
    yield row("How long does a pass take?")
    yield curves(
        "Time per pass, by kind",
        "Mean time of one forward pass of the target: `prefill` has prompts alone, `mixed` "
        "prompts and decoding requests, `verify` draft tokens, `decode` one token of each running "
        "request. If all become slower at once, another process uses the CPU, or memory is short.",
        "s",
        {"{{kind}}": ratio_by("kind", f"{STEPS}_sum", f"{STEPS}_count")},
        named=PASSES,
    )
    yield curves(
        "Time per pass, p95",
        "95 % of the passes were faster. Far above the mean: another process sometimes uses the "
        "CPU, or weights are read from disk again; see major page faults on `Will it fit?`.",
        "s",
        {kind: quantile(0.95, STEPS, f'kind="{kind}"') for kind in PASSES},
    )
    yield curves(
        "Passes and requests per pass",
        "Passes per second by kind, and (on the right) decoding requests per pass. Every decoding "
        "request is in every pass: if fewer are in it than are running, the others' prompts are "
        "being computed, or they wait for KV blocks.",
        PER_SECOND,
        {
            "{{kind}}": rate_by("kind", "specops_target_steps_total"),
            "requests per pass": ratio(
                "specops_sequence_steps_total",
                "specops_target_steps_total",
                bottom='kind=~"decode|verify|mixed"',
            ),
        },
        named=PASSES,
        right={"requests per pass": "suffix:requests"},
        empty_when=Empty.NO_REQUESTS,
    )


def _contents() -> Panels:
    yield row("What is in a pass?")
    tokens, passes = "specops_pass_tokens_total", "specops_target_steps_total"
    yield curves(
        "Computed per pass, by use",
        "Tokens that a mean pass computes: `decoded`, one per request; `verified`, draft tokens; "
        "`prompt`, prompt tokens. Mostly `prompt` while streams stutter: lower "
        "SPECOPS_MAX_INTER_TOKEN_LATENCY. Much `verified` with few tokens per pass: see `Does "
        "speculation pay?`.",
        MEAN,
        {"{{use}}": each_per("use", tokens, passes)},
        named=("decoded", "verified", "prompt"),
        stacked=True,
        width=12,
    )
    yield curves(
        "Prompt tokens, offered and used",
        "Prompt tokens per second that passes had room for while a prompt waited, and those that "
        "they computed. If the lines coincide, the room decides when first tokens come: raise "
        "SPECOPS_MAX_INTER_TOKEN_LATENCY or SPECOPS_MAX_BATCHED_TOKENS. Far apart: prompts are "
        "short, or KV blocks are missing.",
        TOKENS_PER_SECOND,
        {
            "offered": speed(OFFERED),
            "used": speed(tokens, PROMPT),
        },
        width=12,
    )


def _lengths() -> Panels:
    yield row("How long are prompts and answers?")
    yield heat(
        "Length of prompts",
        "Requests by the number of their prompt tokens, cached ones included. Long prompts delay "
        "the first token. If a band moves up, clients send more with each turn: give the prefix "
        "cache more room (SPECOPS_KV_TOKENS).",
        COUNT,
        buckets("specops_request_prompt_tokens"),
    )
    yield heat(
        "Length of answers",
        "Complete answers by the number of their tokens. A band at one height: they end at "
        "max_new_tokens. Long answers hold their slots for long: SPECOPS_MAX_NEW_TOKENS limits "
        "them.",
        COUNT,
        buckets("specops_request_generated_tokens"),
    )


def _saved() -> Panels:
    yield row("What need not be computed again?")
    yield curves(
        "Prompt tokens, computed and known",
        "Prompt tokens per second that passes had to compute (`computed`), and those that the KV "
        "cache held from requests with the same beginning, as in chats (`known`). If none are "
        "known although prompts begin alike, the cache is too small: raise SPECOPS_KV_TOKENS.",
        TOKENS_PER_SECOND,
        {
            "computed": speed("specops_prompt_tokens_total"),
            "known": speed("specops_cached_prompt_tokens_total"),
        },
        stacked=True,
        width=12,
    )
    yield curves(
        "Requests with a known beginning",
        "Share of the requests whose prompt began with tokens that the KV cache held. Low with "
        "chats: their turns come too late, or too many share the KV cache. Begin prompts with "
        "what they share.",
        "percentunit",
        {
            "of all requests": share(
                "specops_prefix_hits_total", "specops_requests_total", window=QUANTILE_WINDOW
            )
        },
        width=12,
    )


def _suggestions() -> Panels:
    yield row("Do suggestions come in time?", folded=True)
    yield curves(
        "Time to a suggestion",
        "Time from an editor's request to the whole suggestion, cancelled ones excluded. After "
        "half a second people have typed on. High only after a jump in the file: prompts take the "
        "time; raise SPECOPS_KV_TOKENS, or let the editor send fewer lines. Always high: choose a "
        "smaller model, or shorter suggestions.",
        "s",
        quantiles("specops_suggestion_seconds"),
        warn=0.5,
        alarm=2,
        width=6,
        empty_when=Empty.NO_SUGGESTIONS,
    )
    yield curves(
        "Suggestions that were cancelled",
        "Share of the suggestions whose editor closed the connection, usually because of another "
        "keystroke. Above half: suggestions come too late, and `Time to a suggestion` shows only "
        "the fast ones; or the editor sends a request at every key: debounce by 100 to 200 ms.",
        "percentunit",
        {
            "cancelled": share(
                SUGGESTIONS, SUGGESTIONS, 'outcome="cancelled"', window=QUANTILE_WINDOW
            )
        },
        width=6,
        empty_when=Empty.NO_SUGGESTIONS,
    )
    yield curves(
        "Tokens per pass of suggestions",
        "New tokens of a suggestion per pass of the target, and how many of them were draft "
        "tokens. 1 and 0: plain decoding, as the text does not repeat its prompt; let the editor "
        "send parts of other files, or choose the drafter `cascade`.",
        MEAN,
        {
            "tokens": ratio(SUGGESTED, "specops_suggestion_steps_total", 'use="decoded"'),
            "accepted draft tokens": ratio(
                SUGGESTED, "specops_suggestion_steps_total", 'use="accepted"'
            ),
        },
        width=6,
        empty_when=Empty.NO_SUGGESTIONS,
    )
    yield curves(
        "Prompts of suggestions, reused",
        "Share of prompt tokens that came from the prefix cache. Below half while somebody types: "
        "other requests need the room in between, so raise SPECOPS_KV_TOKENS; or the editor "
        "changes the beginning of its prompts at every key.",
        "percentunit",
        {"of all tokens": share(SUGGESTED, SUGGESTED, 'use="cached"', 'use=~"cached|computed"')},
        width=6,
        empty_when=Empty.NO_SUGGESTIONS,
    )


def build() -> Json:
    """The whole dashboard."""
    return board(
        "latency",
        "Where does the time go?",
        "From a request's arrival to its last token: waiting, prompt, answer, pass by pass.",
        (_glance, _parts, _heatmaps, _lengths, _steps, _contents, _saved, _suggestions),
    )
