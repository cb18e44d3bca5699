"""The dashboard "Is it healthy?": the first to look at, and the page that Grafana opens with.

From top to bottom: the three figures that the service is judged by, a line of small ones, then how
fast it is, how long people wait, whether it is overloaded, who sends requests, and what went wrong.
Each panel's description says what to do when it looks bad; the other dashboards go deeper.
"""

from board import (
    Panels,
    board,
    killed,
    memory_against_the_cap,
    memory_of_the_cap,
    row,
    state,
)
from empty import Empty
from panels import (
    COUNT,
    ENDS,
    MEAN,
    PER_SECOND,
    REASONS,
    STATUSES,
    TIMES,
    TOKENS_PER_SECOND,
    Json,
    curves,
    headline,
    tile,
    words,
)
from promql import (
    FIRING,
    GAIN,
    NEWEST,
    NOW,
    QUANTILE_WINDOW,
    TOKENS_PER_PASS,
    UP,
    now,
    or_few,
    quantiles,
    rate_by,
    rates,
    ratio,
    series,
    share_and,
    speed,
    told_quantile,
    total,
)

OBJECTIVE = 30  # seconds; prometheus/rules/specops.yml counts the slower answers
ENDED, REFUSED = "specops_requests_total", "specops_requests_rejected_total"
BY_LOAD = 'reason=~"queue_full|kv_tokens|memory|pressure"'
# For recorded series of an instance, which go on for as long as they look back after it is gone.
BURNING = f"and on (instance) {UP}"


def _headlines() -> Panels:
    yield headline(
        "Tokens per second",
        "Tokens generated per second for all requests, over the last minute. If it is low while "
        "requests wait, see the jump length next to it, and `Where does the time go?`.",
        {"generated": speed("specops_generated_tokens_total", window=NOW)},
        [TOKENS_PER_SECOND],
        decimals=1,
    )
    yield headline(
        "Average jump length",
        "Tokens per pass: new tokens of a request from one pass of the target, over the last "
        "minute. Next to it, the speed as a multiple of plain decoding's, estimated from the "
        "measured costs of passes. 1 is plain decoding; below about 1.2 drafting hardly pays: see "
        "`Does speculation pay?` for other drafters to try.",
        {"tokens per pass": TOKENS_PER_PASS, "gain over plain decoding": GAIN},
        [MEAN, TIMES],
        decimals=2,
        warn=1,
        alarm=0.95,
        low_is_bad=True,
    )
    latency = "specops_latency_seconds"
    yield headline(
        "Latency",
        "Time from a request's arrival to its end, waiting included: in the last two minutes, 50 % "
        "and 95 % of the requests took less. The objective is 30 s. High with a long queue: "
        "overload. High without one: long answers, or a slow machine.",
        {f"p{q * 100:g}": told_quantile(q, latency) + NEWEST for q in (0.5, 0.95)},
        ["s", "s"],
        warn=OBJECTIVE / 2,
        alarm=OBJECTIVE,
    )


def _glance() -> Panels:
    yield state(4)
    yield tile(
        "Requests per second",
        "Requests per second that ended in the last minute, refused ones included. "
        "`Requests per second, by their end` says how they ended.",
        "reqps",
        f"{total(ENDED, window=NOW)} + {total(REFUSED, window=NOW)}",
        width=4,
        decimals=2,
        empty_when=Empty.UNREACHABLE,
    )
    yield tile(
        "Refused",
        "Share of the requests of the last two minutes that were refused for load (429). Under "
        "overload this keeps the others fast; if it lasts, send fewer requests or add machines.",
        "percentunit",
        or_few(share_and(REFUSED, ENDED, BY_LOAD, window=QUANTILE_WINDOW), REFUSED, ENDED),
        width=4,
        warn=0.01,
        alarm=0.2,
    )
    yield tile(
        "Queue in use",
        "Requests that wait for a slot, as a share of the queue's size. It falls to 0 when the "
        "load ends; if it stays high, send fewer requests, or add slots (SPECOPS_SLOTS) if memory "
        "allows. When the queue is full, further requests get 429.",
        "percentunit",
        # While slots are free, requests waiting for KV blocks may outnumber the queue's places.
        f"clamp_max({now('specops_requests_waiting')} / ({now('specops_queue_size')} > 0), 1)",
        width=4,
        warn=0.25,
        alarm=0.8,
        empty_when=Empty.NO_QUEUE,
    )
    yield memory_of_the_cap(4)
    yield words(
        "Alerts",
        "Alerts of prometheus/rules/alerts.yml that fire now, and `killed for memory` for an hour "
        "after a kill; orange marks on the time axis say when each began. The first to begin "
        "usually causes the others. Prometheus' page /alerts says what to do about each.",
        {
            "killed for memory": f"{killed()} > 0",
            "{{alertname}}": f"count by (alertname) ({FIRING})",
            "none": f"vector(1) and on () {UP} unless on () ({FIRING} or {killed()} > 0)",
            Empty.UNREACHABLE: f"vector(1) unless on () {UP}",
        },
        {"none": "green", "killed for memory": "red", Empty.UNREACHABLE: "red"},
        width=4,
        other="orange",
    )


def _speed() -> Panels:
    yield row("Is it fast?")
    yield curves(
        "Tokens per second, by use",
        "`generated`: tokens for clients. `prompt`: computed before the first token. `wasted`: "
        "generated for requests whose client left or whose deadline passed. If many are wasted, "
        "clients give up: shorten the queue (SPECOPS_QUEUE_SIZE) or the deadline "
        "(SPECOPS_REQUEST_TIMEOUT).",
        TOKENS_PER_SECOND,
        {
            "generated": speed("specops_generated_tokens_total"),
            "prompt": speed("specops_prompt_tokens_total"),
            "wasted": speed("specops_wasted_tokens_total"),
        },
    )
    yield curves(
        "Tokens per pass (average jump length)",
        "Tokens that a request gets from one pass of the target: `now` from counters, `last "
        "minute` as the service reports it. 1 is plain decoding. If it falls under the same load, "
        "the text has become harder to predict: see `Does speculation pay?`.",
        MEAN,
        {
            "now": ratio("specops_decode_tokens_total", "specops_sequence_steps_total"),
            "last minute": TOKENS_PER_PASS,
        },
    )
    yield curves(
        "Time between tokens",
        "What a reader of a stream notices. It grows with the number of running requests, which "
        "share the CPU; prompts computed in between show in p99. If streams stutter, lower "
        "SPECOPS_SLOTS or SPECOPS_MAX_INTER_TOKEN_LATENCY.",
        "s",
        quantiles("specops_inter_token_latency_seconds"),
    )


def _waiting() -> Panels:
    yield row("How long do people wait?")
    yield curves(
        "Latency over time",
        "Time from a request's arrival to its end. p99 far above p50: some answers are much longer "
        "than others, or wait in the queue; compare with the time to first token. Dots are single "
        "requests.",
        "s",
        quantiles("specops_latency_seconds"),
        alarm=OBJECTIVE,
        exemplars="p99",
    )
    yield curves(
        "Time to first token",
        "Time from a request's arrival to its first token, waiting included. High with a queue: "
        "overload. High without one: long prompts; see the time of passes with prompts. "
        "Dots are single requests.",
        "s",
        quantiles("specops_time_to_first_token_seconds"),
        exemplars="p99",
    )
    yield curves(
        "Error budget burn",
        "The share of answers slower than 30 s, divided by the allowed 5 %, in four windows: 1 "
        "uses up the budget exactly, 10 pages. An alert needs a long and a short window at once, "
        "so it does not page for one slow answer, nor miss a slow hour. Above 1 for long: "
        "shorten the queue (SPECOPS_QUEUE_SIZE), or add CPUs.",
        TIMES,
        {
            window: f"max(instance:specops_slow_requests:burn_rate{window} {BURNING})"
            for window in ("5m", "30m", "1h", "6h")
        },
        warn=3,
        alarm=10,
    )


def _load() -> Panels:
    yield row("Is it overloaded?")
    yield curves(
        "Queue",
        "Requests that hold a slot, requests that wait for one, and the limits of both. "
        "When `waiting` is at its limit, further requests get 429. If requests wait while slots "
        "are free, the KV cache has no room for them: see `Will it fit?`.",
        COUNT,
        {
            "running": now("specops_requests_running"),
            "waiting": now("specops_requests_waiting"),
            "slots": now("specops_slots"),
            "room to wait": now("specops_queue_size"),
        },
        limits={"slots": "running", "room to wait": "waiting"},
        empty_when=Empty.UNREACHABLE,
    )
    yield curves(
        "Requests per second, by their end",
        "`stop`, `length` and `grammar`: answered. `refused`: not admitted; `Turned away, by "
        "reason` says why. `cancelled`: the client left. `timeout`: the deadline passed, so the "
        "queue is too long for this machine. `error`: the engine failed; the API's log says why.",
        "reqps",
        {
            "{{outcome}}": rate_by("outcome", ENDED),
            "refused": f"{total(REFUSED)} and on () sum(increase({series(REFUSED)}[$__range])) > 0",
        },
        stacked=True,
        named=ENDS,
        empty_when=Empty.NO_REQUESTS,
    )
    yield memory_against_the_cap()


def _clients() -> Panels:
    yield row("Who sends requests, and what becomes of them?")
    yield curves(
        "Tokens by client",
        "Tokens generated per second for each client, by the name of its key (SPECOPS_API_KEYS). "
        "If one gets most of them while others wait, give it a separate replica, or limit its rate "
        "at the gateway.",
        TOKENS_PER_SECOND,
        {"{{client}}": f"sum by (client) ({rates('specops_client_generated_tokens_total')}) > 0"},
        width=6,
        stacked=True,
    )
    yield curves(
        "HTTP status, by endpoint",
        "Requests per second by endpoint and status. 429: refused for load. 499: the client left. "
        "503: loading or draining. Other 4xx: the client's mistakes. 5xx: the API's log says why.",
        "reqps",
        {"{{endpoint}} {{status}}": _http()},
        width=12,
        stacked=True,
        matching=STATUSES,
        empty_when=Empty.NO_REQUESTS,
    )
    yield curves(
        "Turned away, by reason",
        "`queue_full`, `kv_tokens`, `memory` and `pressure` are overload (429). That is right "
        "during a peak; if it lasts, send fewer requests or add machines. `not_ready`: loading "
        "or draining. The others are the client's mistakes.",
        "reqps",
        {"{{reason}}": rate_by("reason", REFUSED)},
        width=6,
        stacked=True,
        named=REASONS,
        empty_when=Empty.NEVER,
    )


def _faults() -> Panels:
    yield row("Did anything go wrong?", folded=True)
    yield curves(
        "Connections closed, by reason",
        "`idle` is normal. `slow_headers`, `slow_body` and `unread`: clients sent or read too "
        "slowly; many of them mean an attack, or a network that loses packets. `full`: too many "
        "connections at once; put a proxy in front, or find out who opens them. `malformed`: not "
        "HTTP, for example TLS on this port.",
        PER_SECOND,
        {"{{reason}}": rate_by("reason", "specops_connections_closed_total")},
        stacked=True,
        width=12,
        empty_when=Empty.NEVER,
    )
    yield curves(
        "Failed callbacks, by origin",
        "The service's callbacks that raised an exception. `connection`, `engine` and `trace`: one "
        "client's connection or request ended. `scrape`: figures are missing. `tick` and `loop`: "
        "the server continued without it. Each is a defect: the API's log has the traceback.",
        PER_SECOND,
        {"{{where}}": rate_by("where", "specops_callback_failures_total")},
        stacked=True,
        width=12,
        empty_when=Empty.NEVER,
    )


def _http() -> str:
    """Requests per second by endpoint and status, health checks and scrapes excluded."""
    counter = "specops_http_requests_total"
    api = 'endpoint!~"/health.*|/metrics"'
    moved = f"increase({series(counter, api)}[$__range]) > 0"
    return f"sum by (endpoint, status) ({rates(counter, api)} and {moved})"


def build() -> Json:
    """The whole dashboard."""
    return board(
        "healthy",
        "Is it healthy?",
        "Speed, waiting, load and memory of the inference service at a glance.",
        (_headlines, _glance, _speed, _waiting, _load, _clients, _faults),
    )
