"""The dashboard "How is the load spread?": all replicas side by side, and their gateway.

With one replica and no gateway it shows this replica's figures, and 0 for the gateway.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import Panels, board
from panels import PER_SECOND, TIMES, big_number, curves
from promql import INSTANCES, QUANTILE_WINDOW, WINDOW, now_by, rate_by

REQUESTS, REFUSED = "specops_requests_total", "specops_requests_rejected_total"
CACHED, COMPUTED = "specops_cached_prompt_tokens_total", "specops_prompt_tokens_total"
BY_LOAD = 'reason=~"queue_full|kv_tokens|memory|pressure"'
GENERATING = 'envoy_cluster_name="replicas"'  # the gateway's two ways to the replicas
EITHER = 'envoy_cluster_name=~"replicas|replicas_any"'
CLIENTS = 'envoy_http_conn_manager_prefix="gateway"'


def _gateway(counter: str, labels: str = EITHER) -> str:
    """Events per second at the gateway; 0 without one."""
    return f"sum(rate({counter}{{{labels}}}[{WINDOW}])) or vector(0)"


def _seconds(histogram: str, labels: str, q: float) -> str:
    """A quantile of one of the gateway's histograms, which count milliseconds."""
    rates = f"sum by (le) (rate({histogram}_bucket{{{labels}}}[{QUANTILE_WINDOW}]))"
    return f"histogram_quantile({q}, {rates}) / 1000 >= 0 or vector(0)"


def _mean(histogram: str, labels: str) -> str:
    """The mean of one of the gateway's histograms, in seconds."""
    total, number = (
        f"sum(rate({histogram}_{part}{{{labels}}}[{QUANTILE_WINDOW}])) or vector(0)"
        for part in ("sum", "count")
    )
    return f"({total}) / (({number}) > 0) / 1000"


def _cached_share() -> str:
    """Cached prompt tokens of all, by replica; the second counter has only computed ones."""
    cached, computed = (
        f"sum by (instance) (rate({name}{{{INSTANCES}}}[{WINDOW}]))" for name in (CACHED, COMPUTED)
    )
    return (
        f"{cached} / ({cached} + {computed} > 0) or 0 * sum by (instance) ({CACHED}{{{INSTANCES}}})"
    )


def _glance() -> Panels:
    yield big_number(
        "Replicas",
        "Replicas whose model is ready. Fewer than there should be: `Is it healthy?` shows "
        "what the others are at; the log of the one that is missing says why.",
        "none",
        f'sum(specops_model_state{{{INSTANCES}, state="ready"}}) or vector(0)',
    )
    yield big_number(
        "Out of rotation",
        "Replicas that the gateway does not ask: their checks fail, or a connection to them "
        "broke off. Not 0 for minutes: GET /health of each says which one, its log why.",
        "none",
        f"sum(envoy_cluster_membership_total{{{GENERATING}}}) "
        f"- sum(envoy_cluster_membership_healthy{{{GENERATING}}}) or vector(0)",
        warn=1,
    )
    per_replica = f"sum by (instance) (rate({REQUESTS}{{{INSTANCES}}}[5m]))"
    yield big_number(
        "Most over mean",
        "Requests of the replica that gets the most, over the mean of all, in five minutes. 1 "
        "is even; the gateway bounds what runs at the same time to 1.25. Above 1.5 for long: "
        "few sessions make most of the load, or one replica answers faster than the others.",
        TIMES,
        f"max({per_replica}) / (avg({per_replica}) > 0) or vector(0)",
        warn=1.5,
        alarm=2.5,
        decimals=2,
    )
    yield big_number(
        "Tried again",
        "Requests per second that the gateway sent to another replica: the first could not be "
        "reached, broke off before its answer, or was full. More than a few in a hundred: see "
        "below which replica it is.",
        PER_SECOND,
        _gateway("envoy_cluster_upstream_rq_retry"),
        decimals=1,
    )
    yield big_number(
        "Refused to clients",
        "Answers 4xx per second through the gateway, 429 among them: every replica that was "
        "asked was full, or one client exceeded its rate. Many: add a replica.",
        PER_SECOND,
        _gateway("envoy_http_downstream_rq_xx", f'{CLIENTS}, envoy_response_code_class="4"'),
        decimals=1,
    )
    yield big_number(
        "The gateway's part",
        "What a mean request takes at the gateway beyond what its last replica takes, with "
        "the time to send it in. Under a millisecond is usual; more with many retries, or "
        "with clients that send slowly.",
        "s",
        f"({_mean('envoy_http_downstream_rq_time', CLIENTS)}) - "
        f"({_mean('envoy_cluster_upstream_rq_time', EITHER)}) >= 0 or vector(0)",
        warn=0.05,
    )


def _replicas() -> Panels:
    yield Row("How much does each replica do?")
    yield curves(
        "Requests by replica",
        "Requests per second that each replica finished. Lines far apart for long: look at "
        "what runs and waits beside. A line at 0 while others are not: it is out of rotation.",
        PER_SECOND,
        {"{{instance}}": rate_by("instance", REQUESTS)},
    )
    yield curves(
        "Prompt tokens from the cache, by replica",
        "Share of the prompt tokens that each replica found in its prefix cache. One far below "
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
        "short",
        {
            "{{instance}} runs": now_by("instance", "specops_requests_running"),
            "{{instance}} waits": now_by("instance", "specops_requests_waiting"),
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
    )
    yield curves(
        "Ejected and unhealthy",
        "Replicas that a broken connection or a 503 has taken out, and all that are out of "
        "rotation. A spike at a restart is right. For longer: that replica's log says why.",
        "short",
        {
            "ejected": f"sum(envoy_cluster_outlier_detection_ejections_active{{{GENERATING}}}) "
            "or vector(0)",
            "out of rotation": f"sum(envoy_cluster_membership_total{{{GENERATING}}}) "
            f"- sum(envoy_cluster_membership_healthy{{{GENERATING}}}) or vector(0)",
        },
        width=6,
    )
    yield curves(
        "Latency, with and without the gateway",
        "What clients of the gateway wait for a whole answer, and what of that its replicas "
        "take. The lines lie upon each other; a gap is retries, or clients that read slowly.",
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
    )


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "spread",
        "How is the load spread?",
        "Requests, prefix hits, refusals and retries by replica, and the gateway's part.",
        (_glance, _replicas, _gateway_row),
    )
