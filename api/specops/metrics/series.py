"""Declares the service's Prometheus series: names, meanings, labels, buckets. `metrics` sets them.

Every series whose label values are known exists from the start with 0, so no panel lacks data
before the first request. A series is named after its attribute of `Series`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.samples import Sample

from specops.metrics.collectors import NAMESPACE
from specops.request import DRAFTERS, PLACES, SOURCES, FinishReason, StepKind

MODELS = ("target", "draft")
USES = ("decoded", "verified", "prompt")
SUGGESTION_USES = ("cached", "computed", "decoded", "accepted")
BLOCK_STATES = ("used", "shared", "kept", "free")
STATE_KINDS = ("slots", "snapshots", "limit")
SNAPSHOT_EVENTS = ("taken", "used", "dropped")
REJECTIONS = (
    *("queue_full", "kv_tokens", "memory", "pressure"),
    *("not_ready", "prompt_too_long", "invalid", "too_large", "large_bodies", "unauthorized"),
    "unknown_host",
)
# Origins of callbacks: a connection, the server's tick, a metric, the engine's reports, any other
# of the event loop, a trace.
CALLBACKS = ("connection", "tick", "scrape", "engine", "loop", "trace")
CLOSINGS = ("slow_headers", "slow_body", "unread", "idle", "malformed", "full")
POSITIONS = range(0)  # a placeholder for as many positions as a draft has
EVERYONE = "everyone"  # the only client of a service without keys
OTHER = "other"  # stands for all paths without an endpoint
LOAD_SHAPES = ("users", "arrivals", "trace", "smoke", "ramp", "spike", "soak", "other")
STATES = ("starting", "downloading", "converting", "loading", "ready", "draining", "failed")

# Buckets for a CPU: a step takes milliseconds on the demo pair and a second on Phi-3 without AVX;
# a request takes up to minutes. A quantile may be off by its bucket's width, half its value.
_STEP_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_WAIT_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0),
    *(6.0, 8.0, 11.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0),
)
_REQUEST_BUCKETS = (
    *(0.025, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
    *(11.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)
# After half a second people have typed on.
_SUGGESTION_BUCKETS = (
    *(0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0),
)
# Powers of two, from one token to the longest context of a model.
_TOKEN_BUCKETS = tuple(float(1 << power) for power in range(18))
_LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


_T = TypeVar("_T")


class _Declared(Generic[_T]):
    """Declares a metric of `Series`; an instance has the metric, or its series by label values.

    Args:
        kind: the metric's class.
        text: its meaning.
        labels: its label values, by the labels' names; empty if not known yet.
        options: further arguments of the class.
    """

    def __init__(
        self, kind: type[Any], text: str, labels: Mapping[str, Iterable[Any]], **options: Any
    ) -> None:
        self._kind, self._text, self._labels, self._options = kind, text, labels, options

    def __get__(self, series: Series, owner: type[Series]) -> _T:
        raise AttributeError("the registry is missing")  # an instance has its own attributes

    def made(self, name: str, registry: CollectorRegistry, max_k_draft: int) -> Any:
        """Make the metric in a registry.

        Args:
            name: the metric's name.
            registry: the registry.
            max_k_draft: number of values of `POSITIONS`.
        """
        options = {"namespace": NAMESPACE, "registry": registry, **self._options}
        metric = self._kind(name, self._text, [*self._labels], **options)
        values, *others = self._labels.values() or [()]
        if not others or not values:
            return {value: metric.labels(value) for value in values} or metric
        second = range(1, max_k_draft + 1) if others[0] is POSITIONS else others[0]
        return {value: [metric.labels(value, other) for other in second] for value in values}


def counter(text: str, *labels: str) -> _Declared[Count]:
    """Declare a counter whose label values are not known yet."""
    return _Declared(Count, text, dict.fromkeys(labels, ()))


def counters(text: str, **label: Iterable[str]) -> _Declared[dict[str, Count]]:
    """Declare a counter, available as its series by label value."""
    return _Declared(Count, text, label)


def gauge(text: str) -> _Declared[Gauge]:
    """Declare a gauge."""
    return _Declared(Gauge, text, {})


def gauges(text: str, **label: Iterable[str]) -> _Declared[dict[str, Gauge]]:
    """Declare a gauge, available as its series by label value."""
    return _Declared(Gauge, text, label)


class Count(Counter):
    """A counter that a single thread adds to: without a lock, in a fifth of the time."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._count = 0.0

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Add an amount."""
        del exemplar
        self._count += amount

    def _child_samples(self) -> Iterable[Sample]:
        self._value.set(self._count)
        return super()._child_samples()


class Distribution(Histogram):
    """A histogram that counts several equal values at once."""

    def observe_equal(self, value: float, count: int) -> None:
        """Count a value several times."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


def histogram(text: str, buckets: tuple[float, ...]) -> _Declared[Distribution]:
    """Declare a histogram."""
    return _Declared(Distribution, text, {}, buckets=buckets)


def histograms(
    text: str, buckets: tuple[float, ...], **label: Iterable[str]
) -> _Declared[dict[str, Histogram]]:
    """Declare a histogram, available as its series by label value."""
    return _Declared(Histogram, text, label, buckets=buckets)


def per_drafter(text: str, **label: Iterable[int]) -> _Declared[dict[str, list[Count]]]:
    """Declare a counter with the label `drafter` and another, available as series by drafter."""
    return _Declared(Count, text, {"drafter": SOURCES, **label})


class Series:
    """All series of the service, in one registry.

    Args:
        registry: the registry.
        max_k_draft: number of draft positions with separate counters.
    """

    # Passes.
    target_steps = counters("Forward passes of the target, by what they contain.", kind=StepKind)
    target_step_seconds = histograms(
        "One forward pass of the target.", _STEP_BUCKETS, kind=StepKind
    )
    pass_tokens = counters(
        "Tokens in the target's passes. `decoded`: one per decoding request; `verified`: draft "
        "tokens; `prompt`: prompt tokens.",
        use=USES,
    )
    prompt_budget_tokens = counter("Prompt tokens that passes had room for while a prompt waited.")
    sequence_steps = counter("Passes in which a request decoded, counted once per request.")
    preemptions = counter(
        "How often a request gave up its KV blocks to others; it is computed again later."
    )

    # Tokens.
    prompt_tokens = counter("Prompt tokens computed, including again after a preemption.")
    prefix_hits = counter("Ended requests whose prompt began with tokens from the prefix cache.")
    cached_prompt_tokens = counter("Prompt tokens from the prefix cache.")
    generated_tokens = counter("Generated tokens, including the first token of each request.")
    decode_tokens = counter("Generated tokens, except the first token of each request.")

    # Draft tokens.
    drafts = counters("Sequence steps with at least one draft token.", drafter=SOURCES)
    draft_tokens = counters("Draft tokens verified.", drafter=SOURCES)
    accepted_tokens = counters("Draft tokens accepted.", drafter=SOURCES)
    accepted_tokens_found = counters(
        "Draft tokens accepted, by source: the request's `text`, the client's `history`, the "
        "model's `table` of n-grams, a `head`, a `draft` model or a `grammar`.",
        found_in=PLACES,
    )
    draft_misses = counters(
        "Sequence steps in which a drafter was asked but proposed nothing. A draft model that has "
        "not caught up with the prompt is not asked.",
        drafter=SOURCES,
    )
    drafter_failures = counters(
        "Drafters that raised an error and are off until the next start.",
        drafter=DRAFTERS,
    )
    draft_promises = per_drafter(
        "Draft tokens with a promised probability of acceptance, if all before them were "
        "accepted; by the tenth of this probability.",
        tenth=range(10),
    )
    draft_promised = per_drafter(
        "Sum of their promised probabilities: the expected number of accepted draft tokens.",
        tenth=range(10),
    )
    draft_promises_kept = per_drafter(
        "Draft tokens of `draft_promises` that were accepted.", tenth=range(10)
    )
    draft_seconds = counter("Seconds spent on proposing draft tokens.")
    draft_tokens_per_position = per_drafter(
        "Drafts whose token at this position was verified; a grammar's drafts may be longer.",
        position=POSITIONS,
    )
    accepted_tokens_per_position = per_drafter(
        "Drafts whose token at this position was accepted.", position=POSITIONS
    )
    chosen_draft_tokens = histograms(
        "Draft tokens per sequence step, if the controller chose their number; 0: none seemed to "
        "pay. Draft misses do not count.",
        _LENGTH_BUCKETS,
        drafter=DRAFTERS,
    )

    # The last minute, and the KV cache.
    avg_jump = gauge(
        "Tokens per pass (average jump length) over the last minute: decoded tokens per sequence "
        "step, with drafts or without. 1: plain decoding; NaN: no request decoded. To average "
        "several instances, use `specops_avg_jump > 0`: one NaN makes the whole average NaN."
    )
    draft_length = gauge(
        "Draft tokens per sequence step over the last minute. NaN: no request decoded."
    )
    estimated_speedup = gauge(
        "Speed of the latest steps as a multiple of plain decoding's with as many requests, by "
        "the measured costs of passes, at most `specops_avg_jump`; NaN: no request decoded in the "
        "last minute."
    )
    kv_tokens = gauge("Tokens of running requests in the target's KV cache.")
    kv_kept_tokens = gauge(
        "Tokens of finished requests in the target's KV cache, for prompts that begin alike."
    )
    kv_capacity_tokens = gauge("Tokens that the target's KV cache can hold.")
    kv_blocks = gauges(
        "Blocks of the target's KV cache. `used`: by running requests; `shared`: by several of "
        "them; `kept`: from finished requests, until their room is needed; `free`.",
        state=BLOCK_STATES,
    )
    kv_usage_ratio = gauge("Share of the blocks that running requests use, 0 to 1.")
    state_bytes = gauges(
        "Memory of the target's recurrent layers: `slots`; `snapshots`, from which prompts with "
        "the same beginning continue; `limit`: the maximum of snapshots.",
        kind=STATE_KINDS,
    )
    state_snapshots = counters(
        "Snapshots of recurrent layers: `taken`, `used` by a prompt, or `dropped` for another.",
        event=SNAPSHOT_EVENTS,
    )

    # Times.
    latency_seconds = histogram("From a request's arrival to its end.", _REQUEST_BUCKETS)
    time_to_first_token_seconds = histogram(
        "From a request's arrival to its first token.", _WAIT_BUCKETS
    )
    inter_token_latency_seconds = histogram(
        "Time between a request's tokens; a step of n tokens counts as n equal intervals.",
        _STEP_BUCKETS,
    )
    queue_wait_seconds = histogram("From a request's arrival to its slot.", _WAIT_BUCKETS)

    # Lengths.
    request_prompt_tokens = histogram(
        "Prompt tokens of each ended request, cached ones included.",
        _TOKEN_BUCKETS,
    )
    request_generated_tokens = histogram(
        "Tokens of each answer that ended with `stop` or `length`; embeddings have none.",
        _TOKEN_BUCKETS,
    )

    # Suggestions: requests that an editor waits for, which go before others.
    suggestions = counters(
        "Ended requests for a suggestion in an editor, by outcome; `cancelled`: the editor closed "
        "the connection. `specops_requests_total` counts them, too.",
        outcome=FinishReason,
    )
    suggestion_seconds = histogram(
        "From the arrival of a request for a suggestion to its end with `stop` or `length`.",
        _SUGGESTION_BUCKETS,
    )
    suggestion_steps = counter("Passes in which such a suggestion decoded.")
    suggestion_tokens = counters(
        "Tokens of these suggestions. `cached`: prompt tokens from the prefix cache; `computed`: "
        "other prompt tokens; `decoded`: generated, except the first; `accepted`: draft tokens.",
        use=SUGGESTION_USES,
    )

    # Clients.
    client_requests = counter("Admitted requests, by client.", "client")
    client_prompt_tokens = counter("Prompt tokens of admitted requests, by client.", "client")
    client_generated_tokens = counter("Generated tokens, by client.", "client")
    http_requests = counter(
        "Ended HTTP requests, by endpoint and status. "
        f"`{OTHER}`: paths without an endpoint; 499: the client left before the answer ended.",
        "endpoint",
        "status",
    )

    # Requests.
    requests = counters("Ended requests, by outcome.", outcome=FinishReason)
    requests_rejected = counters("Refused requests, by reason.", reason=REJECTIONS)
    connections_closed = counters("Connections that the server closed, by reason.", reason=CLOSINGS)
    callback_failures = counters(
        "Failures of the service's callbacks, each a defect that ended one connection, request, "
        "timer or figure; the log has the traceback.",
        where=CALLBACKS,
    )
    load_test_requests = counters("Requests of load tests, by shape.", shape=LOAD_SHAPES)
    wasted_tokens = counter(
        "Generated tokens of requests that failed, missed their deadline or lost their client."
    )
    requests_running = gauge("Requests that hold a slot.")
    requests_waiting = gauge("Requests that wait for a slot.")
    slots = gauge("Requests that can run at the same time.")
    queue_size = gauge("Requests that may wait; further requests get 429.")

    # The model.
    draft_head_agreement = gauge(
        "Share of a test text's positions at which the draft head guesses the target's likeliest "
        "token; NaN: no head. Near 0: the head was made for another model."
    )
    download_bytes = gauges("Downloaded bytes of a model's files; 0: no download.", model=MODELS)
    download_total_bytes = gauges("Size of a model's files in bytes; 0: no download.", model=MODELS)
    model: _Declared[Info] = _Declared(Info, "The model that is served.", {})
    model_state = gauges("1 for the current state of the model.", state=STATES)
    model_ready_timestamp_seconds = gauge("Time at which the model became ready; 0 before.")

    def __init__(self, registry: CollectorRegistry, max_k_draft: int) -> None:
        for name, declared in vars(Series).items():
            if isinstance(declared, _Declared):
                setattr(self, name, declared.made(name, registry, max_k_draft))
        self.estimated_speedup.set(math.nan)
        self.draft_head_agreement.set(math.nan)
        self.http_requests.labels(OTHER, 404)
        self.model.info({"name": "not loaded"})
        self.set_clients([])

    def set_clients(self, names: Iterable[str]) -> None:
        """Name the clients that have keys; without names, all requests belong to one client."""
        counters = (self.client_requests, self.client_prompt_tokens, self.client_generated_tokens)
        for one in counters:
            one.clear()
        self.clients = {
            name: tuple(one.labels(name) for one in counters) for name in list(names) or [EVERYONE]
        }
