"""The dashboard "Is it healthy?": the first one to look at, and the page that Grafana opens on.

From top to bottom: one line of figures, then how fast it is, how long people wait, whether it is
overloaded, whether it fits. Each panel's description says what to do when it looks bad.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

from panels import (
    big_number,
    curves,
    label_now,
    quantile,
    quantiles,
    rate,
    rate_by,
    ratio,
    ratio_by,
)


def _glance(board: Dashboard) -> None:
    board.with_panel(
        label_now(
            "Model",
            "What the service is doing with its weights; it answers when this says `ready`. "
            "`failed`: GET /health says why. `unreachable`: Prometheus gets no figures from the "
            "API; its page /targets says why.",
            {"{{state}}": "max by (state) (specops_model_state) == 1"},
            otherwise="unreachable",
        )
    )
    board.with_panel(
        big_number(
            "Tokens per second",
            "Tokens generated for all requests together, over the last minute. Low while requests "
            "wait: look at tokens per jump and at the time per step below. 0: nobody asks.",
            "short",
            {"tokens per second": "specops:generated_tokens:rate1m or vector(0)"},
            decimals=1,
        )
    )
    board.with_panel(
        big_number(
            "Tokens per jump",
            "Tokens that one pass of the target brings a request, over the last minute. 1 is plain "
            "decoding; below about 1.2 guessing hardly pays: look at the acceptance, and try the "
            "other drafter or a smaller k_draft. 0: nobody asks.",
            "short",
            {"tokens per jump": "avg(specops_avg_jump) or vector(0)"},
            decimals=2,
        )
    )
    board.with_panel(
        big_number(
            "Latency, p95",
            "95 of 100 requests were answered faster, waiting included. Bad together with a long "
            "queue: overload. Bad without one: long outputs, or a slow machine.",
            "s",
            {"p95": quantile(0.95, "specops_latency_seconds")},
            warn=30,
            alarm=120,
        )
    )
    board.with_panel(
        big_number(
            "Waiting",
            "Requests that wait for a row. It returns to 0 when load does; if it stays up, ask for "
            "less, or add rows (SPECOPS_ROWS) if memory allows. Full, the queue sheds load "
            "with 429.",
            "short",
            {"waiting": "sum(specops_requests_waiting) or vector(0)"},
            warn=1,
            alarm=24,
        )
    )
    board.with_panel(
        big_number(
            "Memory used of the cap",
            "Anonymous memory, the part that cannot be dropped, as a share of the limit. Above "
            "90 % the kernel swaps or kills: fewer rows (SPECOPS_ROWS), a shorter context "
            "(SPECOPS_CONTEXT), or smaller weights (SPECOPS_QUANT).",
            "percentunit",
            {"used": "specops:memory_used:ratio or vector(0)"},
            warn=0.75,
            alarm=0.9,
        )
    )


def _speed(board: Dashboard) -> None:
    board.with_row(Row("Is it fast?"))
    board.with_panel(
        curves(
            "Tokens per second",
            "Generated: what people get. Prompt: what is read before the first token. Wasted: "
            "generated for requests that nobody waited for to the end; much of it means that "
            "clients give up, so shorten the queue (SPECOPS_QUEUE_SIZE) or the deadline "
            "(SPECOPS_REQUEST_TIMEOUT).",
            "short",
            {
                "generated": rate("specops_generated_tokens_total"),
                "prompt": rate("specops_prompt_tokens_total"),
                "wasted": rate("specops_wasted_tokens_total"),
            },
        )
    )
    board.with_panel(
        curves(
            "Tokens per jump",
            "Tokens per jump counts every step; the service's own figure covers the last minute. "
            "Mean acceptance length is the convention elsewhere and leaves out steps without a "
            "guess, so it is never lower. A wide gap: the drafter often has nothing to say.",
            "short",
            {
                "tokens per jump": ratio(
                    "specops_decode_tokens_total", "specops_sequence_steps_total"
                ),
                "last minute (service)": "avg(specops_avg_jump) or vector(0)",
                "mean acceptance length": "1 + "
                + ratio("specops_accepted_tokens_total", "specops_drafts_total"),
            },
        )
    )
    board.with_panel(
        curves(
            "Guesses accepted, by drafter",
            "Share of guessed tokens that the target agreed with. Low for `draft`: the draft model "
            "does not suit this text. Low for `ngram`: the text does not repeat itself. Sampling "
            "at a high temperature lowers both.",
            "percentunit",
            {
                "{{drafter}}": ratio_by(
                    "drafter", "specops_accepted_tokens_total", "specops_draft_tokens_total"
                )
            },
            maximum=1,
        )
    )
    board.with_panel(
        curves(
            "Time per step, by kind",
            "Mean time of one forward pass of the target: prefill reads a piece of a prompt, "
            "decode adds a token to each running request, verify checks guesses. All of them "
            "slower at once: another process takes the CPU, or memory is short (see below).",
            "s",
            {
                "{{kind}}": ratio_by(
                    "kind",
                    "specops_target_step_seconds_sum",
                    "specops_target_step_seconds_count",
                )
            },
            width=12,
        )
    )
    board.with_panel(
        curves(
            "Guesses, by drafter",
            "Tokens guessed per second, and steps per second for which a drafter was asked and had "
            "no guess. Many misses: the n-gram drafter finds no repetition, which costs little; "
            "all guesses at 0 under load: speculation is switched off because it does not pay.",
            "short",
            {
                "{{drafter}} guessed": rate_by("drafter", "specops_draft_tokens_total"),
                "{{drafter}} missed": rate_by("drafter", "specops_draft_misses_total"),
            },
            width=12,
        )
    )


def _waiting(board: Dashboard) -> None:
    board.with_row(Row("How long do people wait?"))
    board.with_panel(
        curves(
            "Latency",
            "From a request's arrival to its end. p99 far above p50: some ask for much more than "
            "others, or wait in the queue; compare with the time to first token.",
            "s",
            quantiles("specops_latency_seconds"),
        )
    )
    board.with_panel(
        curves(
            "Time to first token",
            "From a request's arrival to its first token, waiting included. High with a queue: "
            "overload. High without one: long prompts, so look at the prefill step's time.",
            "s",
            quantiles("specops_time_to_first_token_seconds"),
        )
    )
    board.with_panel(
        curves(
            "Time between tokens",
            "What a reader of a stream feels. It grows with the number of running requests, which "
            "share the CPU; a prompt that is read meanwhile shows in p99. Lower SPECOPS_ROWS or "
            "SPECOPS_PREFILL_CHUNK if it stutters.",
            "s",
            quantiles("specops_inter_token_latency_seconds"),
        )
    )


def _load(board: Dashboard) -> None:
    board.with_row(Row("Is it overloaded?"))
    board.with_panel(
        curves(
            "Queue",
            "Requests that hold a row, and requests that wait for one. Waiting near "
            "SPECOPS_QUEUE_SIZE: the next ones get 429. Waiting while rows are free: the memory "
            "for their tokens is used up.",
            "short",
            {
                "running": "sum(specops_requests_running) or vector(0)",
                "waiting": "sum(specops_requests_waiting) or vector(0)",
            },
        )
    )
    board.with_panel(
        curves(
            "Requests per second, by outcome",
            "`stop` and `length` are good ends. `cancelled`: the client left. `timeout`: the "
            "deadline passed, so the queue is too long for this machine. `error`: the engine "
            "failed, and the API's log says why.",
            "reqps",
            {"{{outcome}}": rate_by("outcome", "specops_requests_total")},
            stacked=True,
        )
    )
    board.with_panel(
        curves(
            "Requests turned away per second, by reason",
            "`queue_full` is shed load (429): right under overload, wrong if it lasts; then ask "
            "for less or add machines. `not_ready`: loading or draining. The others are the "
            "client's mistakes.",
            "reqps",
            {"{{reason}}": rate_by("reason", "specops_requests_rejected_total")},
            stacked=True,
        )
    )


def _memory(board: Dashboard) -> None:
    board.with_row(Row("Does it fit?"))
    board.with_panel(
        curves(
            "Memory against the cap",
            "`anon` cannot be dropped and must stay below the limit; `file` is page cache, weights "
            "among it, and is dropped when needed, at the price of reading them again. `swap` "
            "growing: too much for this machine. A swap limit of 0 means that there is none; "
            "swap-setup.sh makes some.",
            "bytes",
            {
                "{{kind}}": 'max by (kind) (specops_memory_bytes{kind=~"anon|file|swap"})',
                "limit": 'max(specops_memory_bytes{kind="limit"}) or vector(0)',
                "swap limit": 'max(specops_memory_bytes{kind="swap_limit"}) or vector(0)',
            },
            limits=("limit", "swap limit"),
        )
    )
    board.with_panel(
        curves(
            "Time lost for lack of memory",
            "Share of the time in which some, or all, of the service's tasks stood still because "
            "memory had to be freed first. Above a few percent it crawls: lower SPECOPS_ROWS or "
            "SPECOPS_CONTEXT. 0 as well where the kernel keeps no such figures.",
            "percentunit",
            {"{{kind}}": rate_by("kind", "specops_memory_pressure_seconds_total")},
        )
    )
    board.with_panel(
        curves(
            "Tokens in the KV cache",
            "Tokens of running requests, against the room for them. At capacity with requests "
            "waiting: shorter requests, or a larger memory limit.",
            "short",
            {
                "held": "sum(specops_kv_tokens) or vector(0)",
                "capacity": "sum(specops_kv_capacity_tokens) or vector(0)",
            },
            limits=("capacity",),
        )
    )


def build() -> Dashboard:
    """The whole dashboard."""
    board = (
        Dashboard("Is it healthy?")
        .uid("specops-healthy")
        .description("Speed, waiting, load and memory of the inference service.")
        .tags(["specops"])
        .readonly()
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for section in (_glance, _speed, _waiting, _load, _memory):
        section(board)
    return board
