"""The dashboard "How is the load spread?": all replicas side by side, their gateway, the clients.

With one replica and no gateway it shows this replica's figures, and says that there is no gateway.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import Panels, board, state
from panels import COUNT, PER_SECOND, TIMES, TOKENS_PER_SECOND, curves, tile
from promql import (
    ANSWERS,
    NOW,
    QUANTILE_WINDOW,
    WINDOW,
    now_by,
    rate_by,
    rates,
    replicas_missing,
    series,
)

REQUESTS, REFUSED = "specops_requests_total", "specops_requests_rejected_total"
CACHED, COMPUTED = "specops_cached_prompt_tokens_total", "specops_prompt_tokens_total"
BY_LOAD = 'reason=~"queue_full|kv_tokens|memory|pressure"'
GENERATING = 'envoy_cluster_name="replicas"'  # the gateway's two ways to the replicas
EITHER = 'envoy_cluster_name=~"replicas|replicas_any"'
CLIENTS = 'envoy_http_conn_manager_prefix="gateway"'
NO_GATEWAY = "no gateway"


def _gateway(counter: str, labels: str = EITHER, window: str = WINDOW) -> str:
    """Events per second at the gateway."""
    return f"sum(rate({counter}{{{labels}}}[{window}]) {ANSWERS})"


def _seconds(histogram: str, labels: str, q: float) -> str:
    """A quantile of one of the gateway's histograms, which count milliseconds."""
    rate = f"rate({histogram}_bucket{{{labels}}}[{QUANTILE_WINDOW}]) {ANSWERS}"
    return f"histogram_quantile({q}, sum by (le) ({rate})) / 1000 >= 0"


def _mean(histogram: str, labels: str) -> str:
    """The mean of one of the gateway's histograms, in seconds."""
    total, number = (
        _gateway(f"{histogram}_{part}", labels, QUANTILE_WINDOW) for part in ("sum", "count")
    )
    return f"{total} / ({number} > 0) / 1000"


def _cached_share() -> str:
    """Cached prompt tokens of all, by replica; the second counter has only computed ones."""
    cached, computed = (f"sum by (instance) ({rates(name)})" for name in (CACHED, COMPUTED))
    return f"{cached} / ({cached} + {computed} > 0)"


OUT_OF_ROTATION = (
    f"sum(envoy_cluster_membership_total{{{GENERATING}}}) "
    f"- sum(envoy_cluster_membership_healthy{{{GENERATING}}})"
)


def _glance() -> Panels:
    yield state(counted=True)
    yield tile(
        "Replicas missing",
        "Replicas that answered Prometheus within the last half hour, and do not now. Not 0 "
        "although none was removed on purpose: is its process running, and what does its log say?",
        COUNT,
        replicas_missing(),
        warn=1,
        alarm=1,
    )
    yield tile(
        "Out of rotation",
        "Replicas that the gateway skips: their checks fail, or a connection to them broke off. "
        "Not 0 for minutes: GET /health of each says which one, its log says why.",
        COUNT,
        OUT_OF_ROTATION,
        warn=1,
        nothing=NO_GATEWAY,
    )
    per_replica = f"sum by (instance) ({rates(REQUESTS, window='5m')})"
    yield tile(
        "Most over mean",
        "Requests of the replica that gets the most, over the mean of all, in five minutes. 1 "
        "is even; the gateway bounds what runs at the same time to 1.25. Above 1.5 for long: "
        "few sessions make most of the load, or one replica answers faster than the others.",
        TIMES,
        f"max({per_replica}) / (avg({per_replica}) > 0)",
        warn=1.5,
        alarm=2.5,
        decimals=2,
    )
    yield tile(
        "Tried again",
        "Requests per second that the gateway sent to another replica: the first could not be "
        "reached, broke off before its answer, or was full. More than a few in a hundred: see "
        "below which replica it is.",
        PER_SECOND,
        _gateway("envoy_cluster_upstream_rq_retry", window=NOW),
        decimals=1,
        nothing=NO_GATEWAY,
    )
    yield tile(
        "Refused to clients",
        "Answers 4xx per second through the gateway, 429 among them: every replica that was "
        "asked was full, or one client exceeded its rate. Many: add a replica.",
        PER_SECOND,
        _gateway("envoy_http_downstream_rq_xx", f'{CLIENTS}, envoy_response_code_class="4"', NOW),
        decimals=1,
        nothing=NO_GATEWAY,
    )
    yield tile(
        "The gateway's part",
        "What a mean request takes at the gateway beyond what its last replica takes, with "
        "the time to send it in. Under a millisecond is usual; more with many retries, or "
        "with clients that send slowly.",
        "s",
        f"({_mean('envoy_http_downstream_rq_time', CLIENTS)}) - "
        f"({_mean('envoy_cluster_upstream_rq_time', EITHER)}) >= 0",
        warn=0.05,
        nothing=NO_GATEWAY,
    )


def _replicas() -> Panels:
    yield Row("How much does each replica do?")
    yield curves(
        "Requests by replica",
        "Requests per second that each replica finished. Lines far apart for long: look at "
        "what runs and waits there. A line at 0 while others are not: it is out of rotation.",
        PER_SECOND,
        {"{{instance}}": rate_by("instance", REQUESTS)},
    )
    yield curves(
        "Prompt tokens from the cache, by replica",
        "Share of the prompt tokens that each replica read from its prefix cache. One far below "
        "the others: conversations reach it that belong elsewhere, or its cache is too small "
        "(SPECOPS_KV_TOKENS). All low: no X-Session-ID, and prompts do not begin alike.",
        "percentunit",
        {"{{instance}}": _cached_share()},
        maximum=1,
    )
    yield curves(
        "Running and waiting, by replica",
        "Requests that run or wait at each replica now. One long queue beside empty ones "
        "should not be: look whether requests go around the gateway. All long: add a replica.",
        COUNT,
        {
            "{{instance}} runs": now_by("instance", "specops_requests_running"),
            "{{instance}} waits": now_by("instance", "specops_requests_waiting", moved=True),
        },
    )


def _gateway_row() -> Panels:
    yield Row("What does the gateway do?")
    yield curves(
        "Refused, by replica",
        "Answers 429 per second of each replica. The gateway asks another one then, so clients "
        "see fewer of them. One replica alone: it is slower or smaller than the others.",
        PER_SECOND,
        {"{{instance}}": rate_by("instance", REFUSED, BY_LOAD)},
        width=6,
        nothing="none was refused",
    )
    yield curves(
        "Tried again, and with success",
        "Requests per second that went to another replica, and those that were answered there. "
        "Far apart: no replica had room, or none could be reached.",
        PER_SECOND,
        {
            "tried again": _gateway("envoy_cluster_upstream_rq_retry"),
            "answered": _gateway("envoy_cluster_upstream_rq_retry_success"),
        },
        width=6,
        nothing=NO_GATEWAY,
    )
    yield curves(
        "Ejected and unhealthy",
        "Replicas that a broken connection or a 503 has taken out, and all that are out of "
        "rotation. A spike at a restart is right. For longer: that replica's log says why.",
        COUNT,
        {
            "ejected": f"sum(envoy_cluster_outlier_detection_ejections_active{{{GENERATING}}})",
            "out of rotation": OUT_OF_ROTATION,
        },
        width=6,
        nothing=NO_GATEWAY,
    )
    yield curves(
        "Latency, with and without the gateway",
        "What clients of the gateway wait for a whole answer, and what of that its replicas "
        "take. The lines should coincide; a gap means retries, or clients that read slowly.",
        "s",
        {
            f"{name} {q}": _seconds(histogram, labels, quantile)
            for q, quantile in (("p50", 0.5), ("p95", 0.95))
            for name, histogram, labels in (
                ("with", "envoy_http_downstream_rq_time", CLIENTS),
                ("without", "envoy_cluster_upstream_rq_time", EITHER),
            )
        },
        width=6,
        nothing=NO_GATEWAY,
    )


def _clients() -> Panels:
    yield Row("Who asks, and what becomes of it?")
    yield curves(
        "Tokens by client",
        "Tokens generated per second for each client, by the name of its key (SPECOPS_API_KEYS). "
        "One takes most of them while others wait: give it a replica of its own, or bound its rate "
        "at the gateway.",
        TOKENS_PER_SECOND,
        {"{{client}}": f"sum by (client) ({rates('specops_client_generated_tokens_total')}) > 0"},
        stacked=True,
    )
    yield curves(
        "HTTP status, by endpoint",
        "Requests per second by endpoint and status. 429: refused for load. 499: the client left. "
        "503: loading or draining. Other 4xx: the client's mistakes. 5xx: the API's log says why.",
        "reqps",
        {"{{endpoint}} {{status}}": _http()},
        stacked=True,
    )
    yield curves(
        "Turned away, by reason",
        "`queue_full`, `kv_tokens`, `memory` and `pressure` are overload (429): right during "
        "a peak, wrong if it lasts; then send less or add machines. `not_ready`: loading "
        "or draining. The others are the client's mistakes.",
        "reqps",
        {"{{reason}}": rate_by("reason", REFUSED)},
        stacked=True,
        nothing="none was turned away",
    )
    yield curves(
        "Connections closed, by reason",
        "`idle` is normal. `slow_headers`, `slow_body` and `unread`: clients that sent or "
        "read too slowly; many of them are an attack, or a network that loses packets. `full`: "
        "too many connections at once; put a proxy in front, or find who opens them. "
        "`malformed`: the bytes were not HTTP, such as TLS on this port.",
        PER_SECOND,
        {"{{reason}}": rate_by("reason", "specops_connections_closed_total")},
        stacked=True,
        width=12,
        nothing="none was closed",
    )
    yield curves(
        "Failed callbacks, by origin",
        "Callbacks of the service itself that raised an exception. `connection`, `engine` and "
        "`trace`: one client's connection or request ended. `scrape`: figures are missing. `tick` "
        "and `loop`: the server continued without it. Each is a defect: the API's log has its "
        "traceback.",
        PER_SECOND,
        {"{{where}}": rate_by("where", "specops_callback_failures_total")},
        stacked=True,
        width=12,
        nothing="none failed",
    )


def _http() -> str:
    """Requests per second for each endpoint and status, without the stack's own health checks."""
    counter = "specops_http_requests_total"
    api = 'endpoint!~"/health.*|/metrics"'
    moved = f"increase({series(counter, api)}[$__range]) > 0"
    return f"sum by (endpoint, status) ({rates(counter, api)} and {moved})"


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "spread",
        "How is the load spread?",
        "Requests, prefix hits, refusals and retries by replica, and the gateway's part.",
        (_glance, _replicas, _gateway_row, _clients),
    )
