"""The dashboard "Where does the time go?": from a request's arrival to its last token."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import board
from panels import PER_SECOND, TOKENS_PER_SECOND, big_number, curves, heat
from promql import WINDOW, buckets, mean, quantile, rate, rate_by, ratio, ratio_by, series

STEPS = "specops_target_step_seconds"
ROWS_PER_STEP = ratio(
    "specops_sequence_steps_total", "specops_target_steps_total", "", 'kind=~"decode|verify"'
)


def _sum_rate(counter: str) -> str:
    return f"sum(rate({series(counter)}[{WINDOW}]))"


def _difference(longer: str, shorter: str) -> str:
    """Mean of one histogram less the mean of another, per request; 0 without requests."""
    whole = f"{_sum_rate(f'{longer}_sum')} / ({_sum_rate(f'{longer}_count')} > 0)"
    start = f"{_sum_rate(f'{shorter}_sum')} / ({_sum_rate(f'{shorter}_count')} > 0)"
    return f"clamp_min({whole} - ({start}), 0) or vector(0)"


def _glance(made: Dashboard) -> None:
    made.with_panel(
        big_number(
            "Queue wait, p95",
            "95 of 100 requests got a row faster. It grows when more comes than the machine can "
            "answer: lower SPECOPS_QUEUE_SIZE to refuse sooner, or add machines.",
            "s",
            quantile(0.95, "specops_queue_wait_seconds"),
            warn=5,
            alarm=20,
        )
    )
    made.with_panel(
        big_number(
            "First token, p95",
            "95 of 100 requests had their first token sooner, waiting included. High without a "
            "queue: long prompts; see `Prompts read`.",
            "s",
            quantile(0.95, "specops_time_to_first_token_seconds"),
            warn=5,
            alarm=20,
        )
    )
    made.with_panel(
        big_number(
            "Between tokens, p95",
            "95 of 100 tokens came sooner after the one before. People read about five words per "
            "second: above 0.2 s they wait for the text. Fewer SPECOPS_ROWS make each faster.",
            "s",
            quantile(0.95, "specops_inter_token_latency_seconds"),
            warn=0.2,
            alarm=1,
        )
    )
    made.with_panel(
        big_number(
            "Latency, p95",
            "95 of 100 requests were answered sooner, waiting included; the objective is 30 s. "
            "The panels below say which part of it is too long.",
            "s",
            quantile(0.95, "specops_latency_seconds"),
            warn=15,
            alarm=30,
        )
    )
    made.with_panel(
        big_number(
            "Rows per step",
            "Requests that share one pass of the target. 1 with several running: each is verified "
            "by itself, because guessing pays more than sharing. It cannot exceed SPECOPS_ROWS.",
            "short",
            ROWS_PER_STEP,
            decimals=2,
        )
    )
    made.with_panel(
        big_number(
            "Prompts read",
            "Prompt tokens per second of prefill. Low: short prompts, which fill a pass badly, or "
            "a slow machine; a larger SPECOPS_PREFILL_CHUNK helps long ones.",
            TOKENS_PER_SECOND,
            ratio("specops_prompt_tokens_total", f"{STEPS}_sum", "", 'kind="prefill"'),
            decimals=0,
        )
    )


def _parts(made: Dashboard) -> None:
    made.with_row(Row("What does a request wait for?"))
    ttft, latency = "specops_time_to_first_token_seconds", "specops_latency_seconds"
    wait = "specops_queue_wait_seconds"
    made.with_panel(
        curves(
            "A mean request",
            "Its time in the queue, reading its prompt, and generating. The largest part is the "
            "one to work on: queue, fewer requests or more rows; prompt, shorter prompts; "
            "generating, see the steps below.",
            "s",
            {
                "queue": mean(wait),
                "prompt": _difference(ttft, wait),
                "generating": _difference(latency, ttft),
            },
            stacked=True,
            width=12,
        )
    )
    made.with_panel(
        curves(
            "A second of the engine",
            "How much of each second goes into reading prompts, plain steps, verifying guesses "
            "and guessing. Near 1 the engine is fully used and more load makes it slower; a lot "
            "of `prefill` means long prompts or many new requests.",
            "s",
            {
                "{{kind}}": rate_by("kind", f"{STEPS}_sum"),
                "draft": rate("specops_draft_seconds_total"),
            },
            stacked=True,
            width=12,
        )
    )


def _heatmaps(made: Dashboard) -> None:
    made.with_row(Row("How long does it take, request by request?"))
    heatmaps = {
        "Queue wait": (
            "specops_queue_wait_seconds",
            "Requests by the time they waited for a row. A band that rises with time: more comes "
            "than goes, and soon 429 is answered.",
        ),
        "Time to first token": (
            "specops_time_to_first_token_seconds",
            "Requests by the time to their first token. Two bands: some waited or had long "
            "prompts, others did not; compare with the queue wait beside it.",
        ),
        "Time between tokens": (
            "specops_inter_token_latency_seconds",
            "Tokens by the time since the one before. A second band far up: pauses while a prompt "
            "is read; a lower SPECOPS_PREFILL_CHUNK makes them shorter.",
        ),
        "Latency": (
            "specops_latency_seconds",
            "Requests by the time to their end. It spreads with the length of the answers; a "
            "whole cloud that moves up is load or a slow machine.",
        ),
    }
    for title, (histogram, text) in heatmaps.items():
        made.with_panel(heat(title, text, "s", buckets(histogram)))


def _steps(made: Dashboard) -> None:
    made.with_row(Row("How long does a step take?"))
    made.with_panel(
        curves(
            "Time per step, by kind",
            "Mean time of one forward pass of the target: prefill reads a piece of a prompt, "
            "decode adds a token to each running request, verify checks guesses. All of them "
            "slower at once: another process takes the CPU, or memory is short.",
            "s",
            {"{{kind}}": ratio_by("kind", f"{STEPS}_sum", f"{STEPS}_count")},
        )
    )
    made.with_panel(
        curves(
            "Time per step, p95",
            "95 of 100 passes were faster. Far above the mean: something takes the processor now "
            "and then, or weights are read from disk again; see major page faults on `Will it "
            "fit?`.",
            "s",
            {kind: quantile(0.95, STEPS, f'kind="{kind}"') for kind in _KINDS},
        )
    )
    made.with_panel(
        curves(
            "Steps and rows per step",
            "Passes per second by kind, and (on the right) requests per pass. Few rows per step "
            "while many run: guessing keeps them apart; that is right as long as tokens per second "
            "are up.",
            PER_SECOND,
            {
                "{{kind}}": rate_by("kind", "specops_target_steps_total"),
                "rows per step": ROWS_PER_STEP,
            },
            right={"rows per step": "suffix:rows"},
        )
    )


def _saved(made: Dashboard) -> None:
    made.with_row(Row("What need not be read again?"))
    made.with_panel(
        curves(
            "Prompt tokens, read and known",
            "Tokens of prompts per second that a pass had to read, and those that the KV cache "
            "still held from requests that began alike (chats, shared instructions). None known "
            "although prompts begin alike: what was kept has been overwritten; more SPECOPS_ROWS "
            "keep more.",
            TOKENS_PER_SECOND,
            {
                "read": rate("specops_prompt_tokens_total"),
                "known": rate("specops_cached_prompt_tokens_total"),
            },
            stacked=True,
            width=12,
        )
    )
    made.with_panel(
        curves(
            "Requests with a known beginning",
            "Share of the requests whose prompt began with tokens that the KV cache held. Low with "
            "chats: their turns come too late, or too many of them share the rows; put what all "
            "prompts share at their beginning.",
            "percentunit",
            {"of all requests": ratio("specops_prefix_hits_total", "specops_requests_total")},
            width=12,
        )
    )


_KINDS = ("prefill", "decode", "verify")


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "latency",
        "Where does the time go?",
        "From a request's arrival to its last token: waiting, reading, generating, step by step.",
        (_glance, _parts, _heatmaps, _steps, _saved),
    )
