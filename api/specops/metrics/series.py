"""The Prometheus series of the service: names, meanings, labels, buckets. `metrics` sets them.

Every series with known label values exists from the start with 0, so no panel lacks data before
the first request.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from specops.metrics.collectors import NAMESPACE
from specops.request import SOURCES, FinishReason, StepKind

MODELS = ("target", "draft")
USES = ("decoded", "verified", "prompt")
BLOCK_STATES = ("used", "shared", "kept", "free")
REJECTIONS = (
    *("queue_full", "kv_tokens", "memory", "pressure"),
    *("not_ready", "prompt_too_long", "invalid", "too_large", "large_bodies", "unauthorized"),
)
CLOSINGS = ("slow_headers", "slow_body", "unread", "idle", "malformed", "full")
LOAD_SHAPES = ("smoke", "ramp", "spike", "soak", "arrivals", "other")
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
_LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


class _Maker:
    """Makes metrics of the service's namespace in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

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
        """A counter with one label, by the values that this has."""
        counter = self._counter(name, text, [label])
        return {value: counter.labels(value) for value in values}

    def _per_drafter(self, name: str, text: str) -> dict[str, Counter]:
        return self._counters(name, text, "drafter", SOURCES)

    def _per_position(self, name: str, text: str, positions: int) -> dict[str, list[Counter]]:
        """A counter for each of the first positions of a draft, by drafter."""
        counter = self._counter(name, text, ["drafter", "position"])
        numbers = range(1, positions + 1)
        return {drafter: [counter.labels(drafter, one) for one in numbers] for drafter in SOURCES}

    def _per_tenth(self, name: str, text: str) -> dict[str, list[Counter]]:
        """A counter for each tenth of what drafters promise, by drafter."""
        counter = self._counter(name, text, ["drafter", "tenth"])
        return {
            drafter: [counter.labels(drafter, tenth) for tenth in range(10)] for drafter in SOURCES
        }


class EngineSeries(_Maker):
    """What the engine does: passes of the target, their tokens, draft tokens, KV blocks.

    Args:
        max_k_draft: positions of drafts that are counted one by one.
    """

    def __init__(self, registry: CollectorRegistry, max_k_draft: int) -> None:
        super().__init__(registry)
        self._make_passes()
        self._make_tokens()
        self._make_drafts(max_k_draft)
        self._make_gauges()

    def _make_passes(self) -> None:
        self.target_steps = self._counters(
            "target_steps", "Forward passes of the target, by what was in them.", "kind", StepKind
        )
        seconds = self._histogram(
            "target_step_seconds", "One forward pass of the target.", _STEP_BUCKETS, ["kind"]
        )
        self.target_step_seconds = {kind: seconds.labels(kind) for kind in StepKind}
        self.pass_tokens = self._counters(
            "pass_tokens",
            "Tokens in the target's passes: `decoded`, one per request that decodes; `verified`, "
            "draft tokens; `prompt`, tokens of prompts.",
            "use",
            USES,
        )
        self.prompt_budget_tokens = self._counter(
            "prompt_budget_tokens",
            "Prompt tokens that passes had room for while a prompt waited for a pass.",
        )
        self.sequence_steps = self._counter(
            "sequence_steps", "Passes in which a request decoded, counted once per request."
        )
        self.preemptions = self._counter(
            "preemptions",
            "Times that a request gave its KV blocks up to others, to be computed again later.",
        )

    def _make_tokens(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens computed; of a request that gave its KV blocks up, all of its tokens "
            "again.",
        )
        self.prefix_hits = self._counter(
            "prefix_hits", "Requests whose prompt began with tokens that the KV cache held already."
        )
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens",
            "Prompt tokens that needed no pass: the KV cache had them.",
        )
        self.generated_tokens = self._counter(
            "generated_tokens", "Tokens generated, each request's first included."
        )
        self.decode_tokens = self._counter(
            "decode_tokens", "Tokens generated after a request's first."
        )

    def _make_drafts(self, max_k_draft: int) -> None:
        self.drafts = self._per_drafter("drafts", "Sequence steps with at least one draft token.")
        self.draft_tokens = self._per_drafter("draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._per_drafter("accepted_tokens", "Draft tokens accepted.")
        self.draft_misses = self._per_drafter(
            "draft_misses",
            "Sequence steps for which a drafter was asked and had nothing. A draft model that has "
            "not caught up with the prompt is not asked: for it alone that is no miss, and in a "
            "cascade it is one of suffix's.",
        )
        self.draft_promises = self._per_tenth(
            "draft_promises",
            "Draft tokens that came with a probability to be accepted, and that were verified "
            "because all before them were; by the tenth that it fell into, 0 to 9.",
        )
        self.draft_promised = self._per_tenth(
            "draft_promised", "Sum of these probabilities: how many were promised to be accepted."
        )
        self.draft_promises_kept = self._per_tenth(
            "draft_promises_kept", "How many of them were accepted."
        )
        self.draft_seconds = self._counter("draft_seconds", "Seconds spent on drafting.")
        self.verified_per_position = self._per_position(
            "draft_tokens_per_position",
            "Drafts whose token at this position was verified; a grammar's go on beyond the last.",
            max_k_draft,
        )
        self.accepted_per_position = self._per_position(
            "accepted_tokens_per_position",
            "Drafts whose token at this position was accepted.",
            max_k_draft,
        )
        lengths = self._histogram(
            "chosen_draft_tokens",
            "Draft tokens verified in a sequence step that had a choice; 0: drafting did not seem "
            "to pay. Steps for which the drafter had nothing are draft misses and not in here, nor "
            "are those for which a draft model has not caught up with the prompt.",
            _LENGTH_BUCKETS,
            ["drafter"],
        )
        self.chosen_draft_tokens = {name: lengths.labels(name) for name in SOURCES}

    def _make_gauges(self) -> None:
        self.avg_jump = self._gauge(
            "avg_jump",
            "Tokens per jump over the last minute: tokens generated after requests' first ones, "
            "divided by sequence steps (one per request in a pass; steps without a draft count). "
            "1 is plain decoding, 0 is no traffic.",
        )
        self.draft_length = self._gauge(
            "draft_length",
            "Draft tokens per sequence step over the last minute; steps without a draft count.",
        )
        self.estimated_speedup = self._gauge(
            "estimated_speedup",
            "Tokens per second of the latest steps over those of plain decoding with as many "
            "requests, by the measured costs of the passes; 1: plain decoding, or no step yet.",
        )
        self.estimated_speedup.set(1)
        self.kv_tokens = self._gauge(
            "kv_tokens", "Tokens of running requests in the target's KV cache."
        )
        self.kv_kept_tokens = self._gauge(
            "kv_kept_tokens",
            "Tokens that finished requests have left in the target's KV cache: prompts that begin "
            "alike use them, new ones that need the room overwrite them.",
        )
        self.kv_capacity_tokens = self._gauge(
            "kv_capacity_tokens", "Tokens that the target's KV cache can hold."
        )
        blocks = self._gauge(
            "kv_blocks",
            "Blocks of the target's KV cache: `used` by running requests, of them `shared` by more "
            "than one; `kept` from finished requests, to be had for the asking; `free`.",
            ["state"],
        )
        self.kv_blocks = {state: blocks.labels(state) for state in BLOCK_STATES}
        self.kv_usage = self._gauge(
            "kv_usage_ratio",
            "Share of the blocks that running requests use, 0 to 1: what routers of several "
            "replicas ask for.",
        )


class RequestSeries(_Maker):
    """What clients see: requests, their times, what the service has room for, its model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._make_times()
        self._make_requests()
        self._make_model()

    def _make_times(self) -> None:
        self.latency = self._histogram(
            "latency_seconds",
            "From a request's arrival to its end, waiting included.",
            _REQUEST_BUCKETS,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token, waiting included.",
            _WAIT_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time between a request's tokens; a step that brings n tokens counts as n intervals "
            "of an n-th of its time.",
            _STEP_BUCKETS,
        )
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "From a request's arrival to its slot.", _WAIT_BUCKETS
        )

    def _make_requests(self) -> None:
        self.requests = self._counters(
            "requests", "Requests that ended, by how.", "outcome", FinishReason
        )
        self.requests_rejected = self._counters(
            "requests_rejected",
            "Requests that were refused before any work was done.",
            "reason",
            REJECTIONS,
        )
        self.connections_closed = self._counters(
            "connections_closed",
            "Connections that the server closed: their client sent or read too slowly, or nothing "
            "for long, or no HTTP; or there were too many.",
            "reason",
            CLOSINGS,
        )
        self.load_test_requests = self._counters(
            "load_test_requests",
            "Requests that a load test sent, by its shape.",
            "shape",
            LOAD_SHAPES,
        )
        self.wasted_tokens = self._counter(
            "wasted_tokens",
            "Tokens generated for requests whose client left, whose deadline passed or that "
            "failed.",
        )
        self.requests_running = self._gauge("requests_running", "Requests that hold a slot.")
        self.requests_waiting = self._gauge("requests_waiting", "Requests that wait for a slot.")
        self.slots = self._gauge("slots", "Requests that can run at the same time.")
        self.queue_size = self._gauge(
            "queue_size", "Requests that may wait before 429 is answered."
        )

    def _make_model(self) -> None:
        self.download = self._gauge(
            "download_bytes", "Bytes of a model's files that are here; 0: no download.", ["model"]
        )
        self.download_total = self._gauge(
            "download_total_bytes", "Bytes of a model's files in all; 0: no download.", ["model"]
        )
        self.model = Info("model", "What is served.", namespace=NAMESPACE, registry=self._registry)
        self.model.info({"name": "not loaded"})
        self.model_state = self._gauge("model_state", "1 for the state the model is in.", ["state"])
        self.model_ready_at = self._gauge(
            "model_ready_timestamp_seconds", "When the model became ready; 0 before."
        )
