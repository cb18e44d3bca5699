"""The dashboard "Is it healthy?": the first one to look at, and the page that Grafana opens on.

From top to bottom: two lines of figures, then how fast it is, how long people wait, whether it is
overloaded, whether it fits. Each panel's description says what to do when it looks bad; the other
dashboards go deeper. Every panel here has data while there is any traffic.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import Panels, board, state
from panels import (
    COUNT,
    MEAN,
    TIMES,
    TOKENS_PER_SECOND,
    UNREACHABLE,
    curves,
    tile,
    words,
)
from promql import (
    FIRING,
    NOW,
    QUANTILE_WINDOW,
    TOKENS_PER_PASS,
    UP,
    gauge,
    now,
    now_by,
    or_few,
    part,
    quantile,
    quantiles,
    rate_by,
    ratio,
    series,
    share,
    share_and,
    speed,
    total,
)

OBJECTIVE = 30  # seconds; prometheus/rules/specops.yml counts what takes longer
ENDED, REFUSED = "specops_requests_total", "specops_requests_rejected_total"
BY_LOAD = 'reason=~"queue_full|kv_tokens|memory|pressure"'
JUMP = "Tokens per pass (average jump length)"
# Recorded by instance; the service may be gone, and the hour that they look back over is not.
BURNING = f"and on (instance) {UP}"


def _glance() -> Panels:
    yield state(4)
    yield tile(
        "Requests per second",
        "Requests that ended in the last minute, per second, refused ones included. "
        "`Requests per second, by their end` says how they ended.",
        "reqps",
        f"{total(ENDED, window=NOW)} + {total(REFUSED, window=NOW)}",
        width=4,
        decimals=2,
    )
    yield tile(
        "Tokens per second",
        "Tokens generated for all requests together, over the last minute. Low while requests "
        "wait: look at tokens per pass, and at `Where does the time go?`.",
        TOKENS_PER_SECOND,
        speed("specops_generated_tokens_total", window=NOW),
        width=4,
        decimals=1,
    )
    yield tile(
        JUMP,
        "New tokens of a request per pass of the target, over the last minute. 1 is plain "
        "decoding; below about 1.2 drafting hardly pays: `Does speculation pay?` says which "
        "drafter to try.",
        MEAN,
        TOKENS_PER_PASS,
        width=6,
        decimals=2,
        warn=1,
        alarm=0.99,
        low_is_bad=True,
    )
    yield words(
        "Alerts",
        "Alerts of prometheus/rules/alerts.yml that fire now; the orange marks on the curves say "
        "from when to when. The one that began first is usually the cause of the others. "
        "Prometheus' page of alerts says what to do about each.",
        {
            "{{alertname}}": f"count by (alertname) ({FIRING})",
            "none": f"vector(1) and on () {UP} unless on () {FIRING}",
            UNREACHABLE: f"vector(1) unless on () {UP}",
        },
        {"none": "green", UNREACHABLE: "red"},
        width=6,
        other="orange",
    )


def _objectives() -> Panels:
    yield tile(
        "First token, p95",
        "95 of 100 requests had their first token sooner, waiting included, in the last two "
        "minutes. High with a full queue: overload. High without one: long prompts; see `Where "
        "does the time go?`.",
        "s",
        or_few(
            quantile(0.95, "specops_time_to_first_token_seconds"),
            "specops_time_to_first_token_seconds_count",
        ),
        warn=5,
        alarm=20,
    )
    yield tile(
        "Latency, p95",
        "95 of 100 requests were answered faster, waiting included, in the last two minutes; the "
        "objective is 30 s. Bad together with a long queue: overload. Bad without one: long "
        "outputs, or a slow machine.",
        "s",
        or_few(quantile(0.95, "specops_latency_seconds"), "specops_latency_seconds_count"),
        warn=OBJECTIVE / 2,
        alarm=OBJECTIVE,
    )
    yield tile(
        "Queue in use",
        "Requests that wait for a slot, as a share of the queue. It returns to 0 when load "
        "does; if it stays up, send less, or add slots (SPECOPS_SLOTS) if memory allows. When it "
        "is full, further requests get 429.",
        "percentunit",
        f"{now('specops_requests_waiting')} / ({now('specops_queue_size')} > 0)",
        warn=0.25,
        alarm=0.8,
        nothing="no queue",
    )
    yield tile(
        "Refused",
        "Share of the requests of the last two minutes that were refused for load (429). This is "
        "right under overload, since it keeps the others fast; if it lasts, send less or add "
        "machines.",
        "percentunit",
        or_few(share_and(REFUSED, ENDED, BY_LOAD, window=QUANTILE_WINDOW), REFUSED, ENDED),
        warn=0.01,
        alarm=0.2,
    )
    yield tile(
        "Failed",
        "Share of the requests of the last two minutes that ended with an error or at their "
        "deadline. Errors: the API's log says why. Deadlines: the queue is too long for this "
        "machine, lower SPECOPS_QUEUE_SIZE.",
        "percentunit",
        or_few(share(ENDED, ENDED, 'outcome=~"error|timeout"', window=QUANTILE_WINDOW), ENDED),
        warn=0.001,
        alarm=0.05,
    )
    yield tile(
        "Memory of the cap",
        "Anonymous memory, the part that cannot be dropped, as a share of the limit. Above "
        "90 % the kernel swaps or kills: a smaller KV cache (SPECOPS_KV_TOKENS) or smaller "
        "weights (SPECOPS_QUANT).",
        "percentunit",
        part("specops_memory_bytes", 'kind="anon"', 'kind="limit"'),
        warn=0.75,
        alarm=0.9,
        nothing="no limit",
    )
    yield tile(
        "Error budget burn",
        "How fast slow answers of the last hour use up the 5 % that may take longer than the "
        "objective of 30 s: 1 uses it up exactly, 10 pages. Above 1 for long: shorten the queue "
        "(SPECOPS_QUEUE_SIZE) so that requests are refused sooner, or give it more processors.",
        TIMES,
        f"max(instance:specops_slow_requests:burn_rate1h {BURNING})",
        decimals=2,
        warn=1,
        alarm=10,
    )
    yield tile(
        "Ready for",
        "Time since the model became ready. Short although nobody restarted it: it ended by "
        "itself; `docker inspect` says whether for lack of memory, the API's log gives other "
        "reasons.",
        "s",
        f"time() - min({gauge('specops_model_ready_timestamp_seconds')} > 0)",
        nothing="not ready",
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
            "generated": speed("specops_generated_tokens_total"),
            "prompt": speed("specops_prompt_tokens_total"),
            "wasted": speed("specops_wasted_tokens_total"),
        },
        colours={"wasted": "red"},
    )
    yield curves(
        f"{JUMP} over time",
        "Tokens that a request gets from one pass of the target, from the counters and as the "
        "service itself reports it. 1 is plain decoding. Falling while the load is the same: "
        "the text has become harder to predict, see `Does speculation pay?`.",
        MEAN,
        {
            "now": ratio("specops_decode_tokens_total", "specops_sequence_steps_total"),
            "last minute": TOKENS_PER_PASS,
        },
    )
    yield curves(
        "Output that drafts brought",
        "Share of the generated tokens that were draft tokens: the target only checked them. "
        "Falling while the load is the same: the text has become harder to predict. 0 for long: "
        "drafting is off, or does not pay; see `Does speculation pay?`.",
        "percentunit",
        {"of all tokens": share("specops_accepted_tokens_total", "specops_generated_tokens_total")},
    )


def _waiting() -> Panels:
    yield Row("How long do people wait?")
    yield curves(
        "Latency",
        "From a request's arrival to its end. p99 far above p50: some ask for much more than "
        "others, or wait in the queue; compare with the time to first token. Dots are single "
        "requests.",
        "s",
        quantiles("specops_latency_seconds"),
        alarm=OBJECTIVE,
        exemplars="p99",
    )
    yield curves(
        "Time to first token",
        "From a request's arrival to its first token, waiting included. High with a queue: "
        "overload. High without one: long prompts, so look at the time of passes with prompts. "
        "Dots are single requests.",
        "s",
        quantiles("specops_time_to_first_token_seconds"),
        exemplars="p99",
    )
    yield curves(
        "Time between tokens",
        "What a reader of a stream notices. It grows with the number of running requests, which "
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
        COUNT,
        {
            "running": now("specops_requests_running"),
            "waiting": now("specops_requests_waiting"),
            "slots": now("specops_slots"),
            "room to wait": now("specops_queue_size"),
        },
        limits=("slots", "room to wait"),
        nothing=UNREACHABLE,
    )
    yield curves(
        "Requests per second, by their end",
        "`stop` and `length` are good ends. `refused`: not admitted; `How is the load spread?` "
        "says for which reason. `cancelled`: the client left. `timeout`: the deadline passed, so "
        "the queue is too long for this machine. `error`: the engine failed, and the API's log "
        "says why.",
        "reqps",
        {
            "{{outcome}}": rate_by("outcome", ENDED),
            "refused": f"{total(REFUSED)} and on () sum(increase({series(REFUSED)}[$__range])) > 0",
        },
        stacked=True,
        colours={
            **{"stop": "green", "length": "blue", "cancelled": "yellow"},
            **{"timeout": "orange", "error": "red", "refused": "purple"},
        },
    )
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
        nothing=UNREACHABLE,
    )


def _promises() -> Panels:
    yield Row("Does it keep its promise?")
    yield curves(
        "Error budget burn, by window",
        "The share of answers slower than 30 s, over the 5 % that may be, in four windows. "
        "An alert needs a long and a short window at once: it neither pages for one slow "
        "answer nor sleeps through a slow hour.",
        TIMES,
        {
            window: f"max(instance:specops_slow_requests:burn_rate{window} {BURNING})"
            for window in ("5m", "30m", "1h", "6h")
        },
        warn=3,
        alarm=10,
        width=24,
    )


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "healthy",
        "Is it healthy?",
        "Speed, waiting, load and memory of the inference service at a glance.",
        (_glance, _objectives, _speed, _waiting, _load, _promises),
    )
