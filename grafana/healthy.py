"""The dashboard "Is it healthy?": the first one to look at, and the page that Grafana opens on.

From top to bottom: two lines of figures, then how fast it is, how long people wait, whether it is
overloaded, whether it fits. Each panel's description says what to do when it looks bad; the other
dashboards go deeper.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import Panels, board
from panels import PER_SECOND, TOKENS_PER_SECOND, big_number, curves, label_now
from promql import now, now_by, part, quantile, quantiles, rate, rate_by, ratio, series

READY, FAILED, BETWEEN = 'state="ready"', 'state="failed"', 'state!~"ready|failed"'
FIRING = 'ALERTS{alertstate="firing"}'
OBJECTIVE = 30  # seconds; prometheus/rules/specops.yml counts what takes longer


_ON_ITS_WAY, _WRONG = 2, 3


def _states() -> str:
    """A series for each state that an instance is in; its value says how bad that is."""
    every = series("specops_model_state")

    def having(labels: str) -> str:
        return f"(max by (state) ({series('specops_model_state', labels)}) == 1)"

    unreachable = 'label_replace(vector(1), "state", "unreachable", "", "")'
    return (
        f"{having(READY)} or {_ON_ITS_WAY} * {having(BETWEEN)} or {_WRONG} * {having(FAILED)} "
        f"or {_WRONG} * ({unreachable} unless on () max({every}))"
    )


def _glance() -> Panels:
    yield label_now(
        "Model",
        "What the service is doing with its weights; it answers when this says `ready`. Any "
        "other state is on its way there, except `failed`: GET /health says why. "
        "`unreachable`: Prometheus gets no figures from the API, so every other figure here "
        "says nothing; its page /targets says why.",
        {"{{state}}": _states()},
        warn=_ON_ITS_WAY,
        alarm=_WRONG,
    )
    yield big_number(
        "Tokens per second",
        "Tokens generated for all requests together. Low while requests wait: look at tokens "
        "per jump, and at `Where does the time go?`. 0: no request runs.",
        TOKENS_PER_SECOND,
        rate("specops_generated_tokens_total"),
        decimals=1,
    )
    yield big_number(
        "Tokens per jump",
        "Tokens that one pass of the target brings a request, over the last minute. 1 is plain "
        "decoding; below about 1.2 drafting hardly pays: `Does speculation pay?` says which "
        "drafter to try. 0: no request runs.",
        "short",
        now("specops_avg_jump", of="avg"),
        decimals=2,
        warn=1,
        alarm=0.99,
        low_is_bad=True,
    )
    yield big_number(
        "Latency, p95",
        "95 of 100 requests were answered faster, waiting included; the objective is 30 s. Bad "
        "together with a long queue: overload. Bad without one: long outputs, or a slow "
        "machine.",
        "s",
        quantile(0.95, "specops_latency_seconds"),
        warn=OBJECTIVE / 2,
        alarm=OBJECTIVE,
    )
    yield big_number(
        "Waiting",
        "Requests that wait for a slot, as a share of the queue. It returns to 0 when load "
        "does; if it stays up, ask for less, or add slots (SPECOPS_SLOTS) if memory allows. "
        "Full, the queue sheds load with 429.",
        "percentunit",
        f"sum({series('specops_requests_waiting')}) "
        f"/ (sum({series('specops_queue_size')}) > 0) or vector(0)",
        warn=0.25,
        alarm=0.8,
    )
    yield big_number(
        "Memory used of the cap",
        "Anonymous memory, the part that cannot be dropped, as a share of the limit. Above "
        "90 % the kernel swaps or kills: a smaller KV cache (SPECOPS_KV_TOKENS) or smaller "
        "weights (SPECOPS_QUANT).",
        "percentunit",
        part("specops_memory_bytes", 'kind="anon"', 'kind="limit"'),
        warn=0.75,
        alarm=0.9,
    )


def _objectives() -> Panels:
    yield big_number(
        "Alerts firing",
        "Alerts of prometheus/rules/alerts.yml that fire now; the panel `Alerts, by name` says "
        "which, Prometheus' page /alerts what to do about each. 0 is how it should be.",
        "short",
        f"count({FIRING}) or vector(0)",
        warn=1,
        alarm=2,
    )
    yield big_number(
        "Error budget burn, 1 h",
        "How fast slow answers use up the 5 % that may take longer than the objective of 30 s: "
        "1 uses it up exactly, 10 pages. Above 1 for long: shorten the queue "
        "(SPECOPS_QUEUE_SIZE) so that load is shed sooner, or give it more processors.",
        "short",
        now("instance:specops_slow_requests:burn_rate1h", of="max"),
        decimals=2,
        warn=1,
        alarm=10,
    )
    yield big_number(
        "Failed of all requests",
        "Share of requests that ended with an error or at their deadline. Errors: the API's "
        "log says why. Deadlines: the queue is too long for this machine, lower "
        "SPECOPS_QUEUE_SIZE.",
        "percentunit",
        ratio("specops_requests_total", "specops_requests_total", 'outcome=~"error|timeout"'),
        warn=0.001,
        alarm=0.05,
    )
    yield big_number(
        "Turned away per second",
        "Requests refused at the door, all reasons together; the panel below tells them "
        "apart. 429 under overload is right; if it lasts, ask for less or add machines.",
        "reqps",
        rate("specops_requests_rejected_total"),
        warn=0.1,
        alarm=5,
    )
    yield big_number(
        "Swap in use",
        "Memory that the kernel moved to disk. A little that does not move is no problem; "
        "growing swap makes every token slow: see `Will it fit?`.",
        "bytes",
        now("specops_memory_bytes", 'kind="swap"'),
        warn=64 << 20,
        alarm=1 << 30,
    )
    yield big_number(
        "Ready for",
        "Time since the model became ready. Short although it was not restarted on purpose: it "
        "ended by itself; `docker inspect` says whether for lack of memory, the API's log "
        "otherwise. 0: it is not ready yet.",
        "s",
        f"time() - min({series('specops_model_ready_timestamp_seconds')} > 0) or vector(0)",
    )


def _speed() -> Panels:
    yield Row("Is it fast?")
    yield curves(
        "Tokens per second, by use",
        "Generated: for clients. Prompt: computed before the first token. Wasted: generated for "
        "requests whose client left or that ended late; much of it means that clients give "
        "up, so shorten the queue (SPECOPS_QUEUE_SIZE) or the deadline "
        "(SPECOPS_REQUEST_TIMEOUT).",
        TOKENS_PER_SECOND,
        {
            "generated": rate("specops_generated_tokens_total"),
            "prompt": rate("specops_prompt_tokens_total"),
            "wasted": rate("specops_wasted_tokens_total"),
        },
        width=12,
        colours={"wasted": "red"},
    )
    yield curves(
        "Tokens per pass over time",
        "Tokens that a request gets from one pass of the target, from the counters and as the "
        "service itself reports it. 1 is plain decoding. Falling while the load is the same: "
        "the text has become harder to foresee, see `Does speculation pay?`.",
        "short",
        {
            "tokens per jump": ratio("specops_decode_tokens_total", "specops_sequence_steps_total"),
            "last minute (service)": now("specops_avg_jump", of="avg"),
        },
        width=12,
    )


def _waiting() -> Panels:
    yield Row("How long do people wait?")
    yield curves(
        "Latency",
        "From a request's arrival to its end. p99 far above p50: some ask for much more than "
        "others, or wait in the queue; compare with the time to first token.",
        "s",
        quantiles("specops_latency_seconds"),
        alarm=OBJECTIVE,
    )
    yield curves(
        "Time to first token",
        "From a request's arrival to its first token, waiting included. High with a queue: "
        "overload. High without one: long prompts, so look at the time of passes with prompts.",
        "s",
        quantiles("specops_time_to_first_token_seconds"),
    )
    yield curves(
        "Time between tokens",
        "What a reader of a stream feels. It grows with the number of running requests, which "
        "share the CPU; a prompt that is computed meanwhile shows in p99. Lower SPECOPS_SLOTS "
        "or SPECOPS_MAX_INTER_TOKEN_LATENCY if it stutters.",
        "s",
        quantiles("specops_inter_token_latency_seconds"),
    )


def _load() -> Panels:
    yield Row("Is it overloaded?")
    yield curves(
        "Queue",
        "Requests that hold a slot, and requests that wait for one, below the room for both. "
        "Waiting at its limit: the next ones get 429. Waiting while slots are free: the KV "
        "cache has no room for them, see `Will it fit?`.",
        "short",
        {
            "running": now("specops_requests_running"),
            "waiting": now("specops_requests_waiting"),
            "slots": now("specops_slots"),
            "room to wait": now("specops_queue_size"),
        },
        limits=("slots", "room to wait"),
    )
    yield curves(
        "Requests per second, by outcome",
        "`stop` and `length` are good ends. `cancelled`: the client left. `timeout`: the "
        "deadline passed, so the queue is too long for this machine. `error`: the engine "
        "failed, and the API's log says why.",
        "reqps",
        {"{{outcome}}": rate_by("outcome", "specops_requests_total")},
        stacked=True,
        colours={
            **{"stop": "green", "length": "blue"},
            **{"cancelled": "yellow", "timeout": "orange", "error": "red"},
        },
    )
    yield curves(
        "Requests turned away per second, by reason",
        "`queue_full`, `kv_tokens`, `memory` and `pressure` are shed load (429): right under "
        "overload, wrong if it lasts; then ask for less or add machines. `not_ready`: loading "
        "or draining. The others are the client's mistakes.",
        "reqps",
        {"{{reason}}": rate_by("reason", "specops_requests_rejected_total")},
        stacked=True,
    )
    yield curves(
        "Connections closed per second, by reason",
        "`idle` is daily life. `slow_headers`, `slow_body` and `unread`: clients that sent or "
        "read too slowly; many of them are an attack, or a network that loses packets. `full`: "
        "too many connections at once; put a proxy in front, or find who opens them. "
        "`malformed`: what came was no HTTP, such as TLS on this port.",
        PER_SECOND,
        {"{{reason}}": rate_by("reason", "specops_connections_closed_total")},
        stacked=True,
        width=24,
    )


def _memory() -> Panels:
    yield Row("Does it fit, and does it keep its promise?")
    yield curves(
        "Memory against the cap",
        "`anon` cannot be dropped and must stay below the limit; `file` is page cache, weights "
        "among it, and is dropped when needed, at the price of reading them again. More on "
        "`Will it fit?`.",
        "bytes",
        {
            "{{kind}}": now_by("kind", "specops_memory_bytes", 'kind=~"anon|file"'),
            "limit": now("specops_memory_bytes", 'kind="limit"'),
        },
        limits=("limit",),
        stacked=True,
        width=12,
    )
    yield curves(
        "Error budget burn",
        "The share of answers slower than 30 s, over the 5 % that may be, in four windows. "
        "An alert needs a long and a short window at once: it neither pages for one slow "
        "answer nor sleeps through a slow hour.",
        "short",
        {
            window: now(f"instance:specops_slow_requests:burn_rate{window}", of="max")
            for window in ("5m", "30m", "1h", "6h")
        },
        warn=3,
        alarm=10,
        width=12,
    )
    nothing = 'label_replace(vector(0), "alertname", "none", "", "")'
    yield curves(
        "Alerts, by name",
        "Which alerts fire, from when to when; `none` at 0 while nothing does. The one that "
        "began first is mostly the cause of the others. Prometheus' page /alerts has a runbook "
        "for each.",
        "short",
        {"{{alertname}}": f"sum by (alertname) ({FIRING}) or ({nothing} unless on () {FIRING})"},
        width=12,
    )
    yield curves(
        "Model on its way",
        "Share of each model's files that has been downloaded, for presets that are not "
        "bundled; 0 where nothing was to be fetched. Stuck below 100 %: GET /health says what "
        "the service waits for.",
        "percentunit",
        {
            "{{model}}": "sum by (model) "
            f"({series('specops_download_bytes')}) "
            f"/ (sum by (model) ({series('specops_download_total_bytes')}) > 0) "
            f"or 0 * sum by (model) ({series('specops_download_bytes')})"
        },
        maximum=1,
        width=12,
    )


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "healthy",
        "Is it healthy?",
        "Speed, waiting, load and memory of the inference service at a glance.",
        (_glance, _objectives, _speed, _waiting, _load, _memory),
    )
