"""The Prometheus series of the service: names, meanings, labels, buckets. `metrics` sets them.

Every series with known values of its labels exists from the start with 0, so no panel lacks data
before the first request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from specops.metrics.collectors import NAMESPACE
from specops.request import DRAFTERS, SOURCES, FinishReason, StepKind
from specops.tracing import RESULTS

MODELS = ("target", "draft")
USES = ("decoded", "verified", "prompt")
BLOCK_STATES = ("used", "shared", "kept", "free")
REJECTIONS = (
    *("queue_full", "kv_tokens", "memory", "pressure"),
    *("not_ready", "prompt_too_long", "invalid", "too_large", "large_bodies", "unauthorized"),
    "unknown_host",
)
# Whose callback failed: a connection's, the server's tick, a metric's, the engine's reports, or
# another one of the event loop.
CALLBACKS = ("connection", "tick", "scrape", "engine", "loop", "trace")
CLOSINGS = ("slow_headers", "slow_body", "unread", "idle", "malformed", "full")
EVERYONE = "everyone"  # the only client of a service without keys
OTHER = "other"  # the endpoint of a path that the service does not have
LOAD_SHAPES = ("users", "arrivals", "smoke", "ramp", "spike", "soak", "other")
STATES = ("starting", "downloading", "converting", "loading", "ready", "draining", "failed")

# Buckets for a CPU: a step takes milliseconds on the demo pair and a second on Phi-3 without AVX;
# a request takes up to minutes.
_STEP_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_WAIT_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0),
)
_REQUEST_BUCKETS = (
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# Powers of two, from one token to the longest context that models have.
_TOKEN_BUCKETS = tuple(float(1 << power) for power in range(18))
_LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


class Series:
    """All series of the service, in one registry.

    Args:
        registry: registry of the series.
        max_k_draft: number of draft positions that have counters of their own.
    """

    def __init__(self, registry: CollectorRegistry, max_k_draft: int) -> None:
        self._registry = registry
        self._make_passes()
        self._make_tokens()
        self._make_drafts(max_k_draft)
        self._make_gauges()
        self._make_times()
        self._make_lengths()
        self._make_clients()
        self._make_requests()
        self._make_model()

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self._registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(
            name, text, labels, namespace=NAMESPACE, registry=self._registry, buckets=buckets
        )

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> dict[str, Counter]:
        """Make a counter with one label; return its series by the value of the label."""
        counter = self._counter(name, text, [label])
        return {value: counter.labels(value) for value in values}

    def _gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """Make a gauge with one label; return its series by the value of the label."""
        gauge = self._gauge(name, text, [label])
        return {value: gauge.labels(value) for value in values}

    def _per_drafter(
        self, name: str, text: str, label: str, values: Iterable[int]
    ) -> dict[str, list[Counter]]:
        """Make a counter with the labels `drafter` and `label`; return its series by drafter."""
        counter = self._counter(name, text, ["drafter", label])
        return {name: [counter.labels(name, value) for value in values] for name in SOURCES}

    def _make_passes(self) -> None:
        self.target_steps = self._counters(
            "target_steps",
            "Forward passes of the target, by their kind of tokens.",
            "kind",
            StepKind,
        )
        seconds = self._histogram(
            "target_step_seconds", "One forward pass of the target.", _STEP_BUCKETS, ["kind"]
        )
        self.target_step_seconds = {kind: seconds.labels(kind) for kind in StepKind}
        self.pass_tokens = self._counters(
            "pass_tokens",
            "Tokens in the target's passes: `decoded`: one per request that decodes; "
            "`verified`: draft tokens; `prompt`: prompt tokens.",
            "use",
            USES,
        )
        self.prompt_budget_tokens = self._counter(
            "prompt_budget_tokens",
            "Prompt tokens that the passes had room for while a prompt waited.",
        )
        self.sequence_steps = self._counter(
            "sequence_steps", "Passes in which a request decoded; each request of a pass counts."
        )
        self.preemptions = self._counter(
            "preemptions",
            "How often a request gave its KV blocks to other requests; its tokens are computed "
            "again later.",
        )

    def _make_tokens(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens that were computed; after a preemption all tokens of the request "
            "count again.",
        )
        self.prefix_hits = self._counter(
            "prefix_hits", "Requests whose prompt began with tokens of the prefix cache."
        )
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens",
            "Prompt tokens that the prefix cache had, so that no pass computed them.",
        )
        self.generated_tokens = self._counter(
            "generated_tokens", "Generated tokens, with the first token of each request."
        )
        self.decode_tokens = self._counter(
            "decode_tokens", "Generated tokens without the first token of each request."
        )

    def _make_drafts(self, max_k_draft: int) -> None:
        positions = range(1, max_k_draft + 1)
        self.drafts = self._counters(
            "drafts", "Sequence steps with at least one draft token.", "drafter", SOURCES
        )
        self.draft_tokens = self._counters(
            "draft_tokens", "Draft tokens verified.", "drafter", SOURCES
        )
        self.accepted_tokens = self._counters(
            "accepted_tokens", "Draft tokens accepted.", "drafter", SOURCES
        )
        self.draft_misses = self._counters(
            "draft_misses",
            "Sequence steps in which a drafter was asked and proposed nothing. A draft model "
            "that has not caught up with the prompt is not asked: alone, this is no miss; in a "
            "cascade, it is a miss of `suffix`.",
            "drafter",
            SOURCES,
        )
        self.draft_promises = self._per_drafter(
            "draft_promises",
            "Draft tokens with a promised probability of acceptance whose predecessors were all"
            " accepted, by the tenth of this probability, 0 to 9.",
            "tenth",
            range(10),
        )
        self.draft_promised = self._per_drafter(
            "draft_promised",
            "Sum of the promised probabilities: the expected number of accepted draft tokens.",
            "tenth",
            range(10),
        )
        self.draft_promises_kept = self._per_drafter(
            "draft_promises_kept",
            "Draft tokens of `draft_promises` that were accepted.",
            "tenth",
            range(10),
        )
        self.draft_seconds = self._counter(
            "draft_seconds", "Seconds spent on proposing draft tokens."
        )
        self.verified_per_position = self._per_drafter(
            "draft_tokens_per_position",
            "Drafts whose token at this position was verified; drafts of a grammar may be "
            "longer than the last position.",
            "position",
            positions,
        )
        self.accepted_per_position = self._per_drafter(
            "accepted_tokens_per_position",
            "Drafts whose token at this position was accepted.",
            "position",
            positions,
        )
        lengths = self._histogram(
            "chosen_draft_tokens",
            "Draft tokens per sequence step in which the controller chose their number; 0: "
            "draft tokens did not seem to pay. Draft misses are not counted here, nor steps in "
            "which a draft model has not caught up with the prompt.",
            _LENGTH_BUCKETS,
            ["drafter"],
        )
        self.chosen_draft_tokens = {name: lengths.labels(name) for name in DRAFTERS}

    def _make_gauges(self) -> None:
        self.avg_jump = self._gauge(
            "avg_jump",
            "Tokens per pass (average jump length) over the last minute: tokens without the first "
            "of each request, divided by sequence steps (one per request in a pass; steps without "
            "draft tokens count). 1: plain decoding; NaN: no request decoded. Over several "
            "instances, aggregate `specops_avg_jump > 0`: one NaN makes the whole average NaN.",
        )
        self.draft_length = self._gauge(
            "draft_length",
            "Draft tokens per sequence step over the last minute; steps without draft tokens "
            "count. NaN: no request decoded.",
        )
        self.estimated_speedup = self._gauge(
            "estimated_speedup",
            "Tokens per second of the latest steps, divided by those of plain decoding with as "
            "many requests, by the measured costs of the passes; 1: plain decoding; NaN: no "
            "request decoded in the last minute.",
        )
        self.estimated_speedup.set(math.nan)
        self.kv_tokens = self._gauge(
            "kv_tokens", "Tokens of running requests in the target's KV cache."
        )
        self.kv_kept_tokens = self._gauge(
            "kv_kept_tokens",
            "Tokens of finished requests in the target's KV cache: prompts that begin alike use"
            " them; new tokens overwrite them when they need the room.",
        )
        self.kv_capacity_tokens = self._gauge(
            "kv_capacity_tokens", "Tokens that the target's KV cache can hold."
        )
        self.kv_blocks = self._gauges(
            "kv_blocks",
            "Blocks of the target's KV cache. `used`: by running requests; `shared`: those of "
            "them that several requests use; `kept`: of finished requests, usable at once; "
            "`free`.",
            "state",
            BLOCK_STATES,
        )
        self.kv_usage = self._gauge(
            "kv_usage_ratio",
            "Share of the blocks that running requests use, 0 to 1; routers of several replicas"
            " read it.",
        )

    def _make_times(self) -> None:
        self.latency = self._histogram(
            "latency_seconds",
            "Time from the arrival of a request to its end, waiting included.",
            _REQUEST_BUCKETS,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from the arrival of a request to its first token, waiting included.",
            _WAIT_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time between the tokens of a request; a step with n tokens counts as n intervals "
            "of an n-th of its time.",
            _STEP_BUCKETS,
        )
        self.queue_wait = self._histogram(
            "queue_wait_seconds",
            "Time from the arrival of a request until it gets a slot.",
            _WAIT_BUCKETS,
        )

    def _make_lengths(self) -> None:
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens",
            "Tokens of the prompt of each request that has ended, those of the prefix cache "
            "included.",
            _TOKEN_BUCKETS,
        )
        self.request_generated_tokens = self._histogram(
            "request_generated_tokens",
            "Tokens of each answer that ended with `stop` or `length`; embeddings have none.",
            _TOKEN_BUCKETS,
        )

    def _make_clients(self) -> None:
        self._clients = [
            self._counter(name, text, ["client"])
            for name, text in (
                ("client_requests", "Requests that were admitted, by client."),
                ("client_prompt_tokens", "Tokens of the prompts of admitted requests, by client."),
                ("client_generated_tokens", "Generated tokens, by client."),
            )
        ]
        self.http_requests = self._counter(
            "http_requests",
            "HTTP requests that have ended, by the endpoint and the status of the answer. "
            f"`{OTHER}`: paths that are no endpoint; 499: the client left before the answer's end.",
            ["endpoint", "status"],
        )
        self.http_requests.labels(OTHER, 404)
        self.set_clients([])

    def set_clients(self, names: Iterable[str]) -> None:
        """Name the clients that have keys; without any, all requests are of one client."""
        for counter in self._clients:
            counter.clear()
        self.clients = {
            name: tuple(counter.labels(name) for counter in self._clients)
            for name in list(names) or [EVERYONE]
        }

    def _make_requests(self) -> None:
        self.requests = self._counters(
            "requests", "Requests that have ended, by their outcome.", "outcome", FinishReason
        )
        self.requests_rejected = self._counters(
            "requests_rejected",
            "Requests that were refused before any work was done, by the reason.",
            "reason",
            REJECTIONS,
        )
        self.connections_closed = self._counters(
            "connections_closed",
            "Connections that the server closed. The client sent or read too slowly, was idle "
            "for too long or sent no HTTP, or there were too many connections.",
            "reason",
            CLOSINGS,
        )
        self.callback_failures = self._counters(
            "callback_failures",
            "Failures of the service's own callbacks, by where they ran: each ended one "
            "connection, request, timer or figure, and the log has its reason. A defect of the "
            "service; 0 is right.",
            "where",
            CALLBACKS,
        )
        self.load_test_requests = self._counters(
            "load_test_requests",
            "Requests of load tests, by the shape of the load.",
            "shape",
            LOAD_SHAPES,
        )
        self.trace_spans = self._counters(
            "trace_spans",
            "Spans of traces: `sent` to the collector, `failed` to be sent, or `dropped` because "
            "too many were waiting.",
            "result",
            RESULTS,
        )
        self.wasted_tokens = self._counter(
            "wasted_tokens",
            "Generated tokens of requests that failed, passed their deadline or lost their client.",
        )
        self.requests_running = self._gauge("requests_running", "Requests that hold a slot.")
        self.requests_waiting = self._gauge("requests_waiting", "Requests that wait for a slot.")
        self.slots = self._gauge("slots", "Requests that can run at the same time.")
        self.queue_size = self._gauge(
            "queue_size", "Requests that may wait; further requests get 429."
        )

    def _make_model(self) -> None:
        self.download = self._gauges(
            "download_bytes",
            "Downloaded bytes of a model's files; 0: no download.",
            "model",
            MODELS,
        )
        self.download_total = self._gauges(
            "download_total_bytes",
            "Size of a model's files in bytes; 0: no download.",
            "model",
            MODELS,
        )
        self.model = Info(
            "model", "The model that is served.", namespace=NAMESPACE, registry=self._registry
        )
        self.model.info({"name": "not loaded"})
        self.model_state = self._gauges(
            "model_state", "1 for the current state of the model.", "state", STATES
        )
        self.model_ready_at = self._gauge(
            "model_ready_timestamp_seconds", "Time at which the model became ready; 0 before."
        )
