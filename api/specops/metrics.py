"""What the service counts, in Prometheus' words; `collectors` has what is read from the machine.

Counters and histograms in base units; rates and ratios are PromQL's work, except the two gauges
over the last minute, which are there for whoever reads `/metrics` without a Prometheus. Every
series with known label values exists from the start with 0, so no panel lacks data before the
first request.

Useful queries:
    tokens per second          rate(specops_generated_tokens_total[1m])
    tokens per jump            rate(specops_decode_tokens_total[5m])
                               / rate(specops_sequence_steps_total[5m])
    mean acceptance length     1 + rate(specops_accepted_tokens_total[5m])
                               / rate(specops_drafts_total[5m])
    acceptance at position 1   rate(specops_accepted_tokens_per_position_total{position="1"}[5m])
                               / ignoring(position) sum(rate(specops_drafts_total[5m]))
    chosen draft length        rate(specops_chosen_draft_tokens_sum[5m])
                               / rate(specops_chosen_draft_tokens_count[5m])
    guessing did not pay in    rate(specops_chosen_draft_tokens_bucket{le="0.0"}[5m])
                               / ignoring(le) rate(specops_chosen_draft_tokens_count[5m])
    cost of 4 guesses          specops_pass_cost_seconds{kind="verify", size="5"}
    in plain steps             / ignoring(kind, size)
                               specops_pass_cost_seconds{kind="decode", size="1"}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder

from specops.collectors import (
    NAMESPACE,
    MemoryCollector,
    PassCostCollector,
    PassCosts,
    ResourceCollector,
)
from specops.jump_window import JumpWindow
from specops.request import FinishReason, GenerationStats, StepKind, StepResult, StepStats

DRAFTERS = ("draft", "ngram", "ngram_cache", "cascade")
MODELS = ("target", "draft")
REJECTIONS = (
    *("queue_full", "kv_tokens", "memory", "pressure"),
    *("not_ready", "prompt_too_long", "invalid", "too_large", "unauthorized"),
)
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

# A `_created` series beside every counter would double the page; no dashboard here reads them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All series of one service, in a registry of its own.

    Args:
        registry: where the series are registered; a new registry by default.
        max_k_draft: positions of `accepted_tokens_per_position_total` that exist from the start.
        volume: a folder on the volume that models are kept on.
        clock: seconds, for the window over the last minute.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        max_k_draft: int = 8,
        volume: Path = Path(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._window = JumpWindow(clock)
        self._make_histograms()
        self._make_counters(max_k_draft)
        self._make_gauges()
        self._pass_costs = PassCostCollector()
        self.registry.register(self._pass_costs)
        self.registry.register(MemoryCollector())
        self.registry.register(ResourceCollector(volume))
        prometheus_client.ProcessCollector(registry=self.registry)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type, in the format that the `Accept` header wants."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def read(self, names: Iterable[str]) -> dict[str, float]:
        """Return what the series called `names` are now, by name and label: `draft_tokens/ngram`.

        Only what was asked for is read; the namespace is left out of the keys.
        """
        families = self.registry.restricted_registry(names).collect()
        return {
            "/".join([sample.name.removeprefix(f"{NAMESPACE}_"), *sample.labels.values()]): (
                sample.value
            )
            for family in families
            for sample in family.samples
        }

    # -- what the service reports ----------------------------------------------------------

    def observe_step(self, step: StepStats) -> None:
        """Count one forward pass of the target."""
        self._target_steps[step.kind].inc()
        self._target_step_seconds[step.kind].observe(step.seconds)
        self._prompt_tokens.inc(step.prompt_tokens)
        if step.cached_tokens:
            self._prefix_hits.inc()
            self._cached_tokens.inc(step.cached_tokens)
        self._generated_tokens.inc(step.emitted_tokens)
        if step.kind is StepKind.PREFILL:
            return
        self._decode_tokens.inc(step.emitted_tokens)
        self._sequence_steps.inc(step.rows)
        self._window.add(step.emitted_tokens, step.rows, step.draft_tokens)
        for drafter in step.missed_drafters:
            self._draft_misses[drafter].inc()
        for drafter in step.declined_drafters:
            self._chosen_draft_tokens[drafter].observe(0)
        self._draft_seconds.inc(step.draft_seconds)
        if step.drafter is not None and step.draft_tokens:
            self._observe_draft(step, step.drafter)

    def _observe_draft(self, step: StepStats, drafter: str) -> None:
        self._drafts[drafter].inc(step.rows - len(step.missed_drafters))
        self._chosen_draft_tokens[drafter].observe(step.draft_tokens)
        self._draft_tokens[drafter].inc(step.draft_tokens)
        self._accepted_tokens[drafter].inc(step.accepted_tokens)
        for position, accepted in enumerate(step.accepted_per_position, start=1):
            if accepted:
                self._accepted_per_position.labels(position).inc(accepted)

    def observe_step_result(self, result: StepResult) -> None:
        """Set the gauges of the scheduler's load."""
        self._requests_running.set(result.running)
        self._requests_waiting.set(result.waiting)
        self._kv_tokens.set(result.kv_tokens)
        self._kept_tokens.set(result.kept_tokens)

    def observe_finish(
        self,
        reason: FinishReason,
        stats: GenerationStats | None,
        latency_seconds: float,
        ttft_seconds: float | None,
    ) -> None:
        """Count a request that ended; `ttft_seconds` is None where no token came."""
        self._requests[reason].inc()
        self._latency.observe(latency_seconds)
        if ttft_seconds is not None:
            self._ttft.observe(ttft_seconds)
        if stats is not None and reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            self._wasted_tokens.inc(stats.generated_tokens)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """Count the time since the request's last tokens, spread over the `tokens` it brought."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def observe_queue_wait(self, seconds: float) -> None:
        """Count the time that a request waited for a row."""
        self._queue_wait.observe(seconds)

    def observe_rejected(self, reason: str) -> None:
        """Count a request that was turned away; `reason` is one of `REJECTIONS`.

        Raises:
            KeyError: another reason, which would make the label unbounded.
        """
        self._rejected[reason].inc()

    def observe_load_test(self, shape: str) -> None:
        """Count a request that says that it is part of a load test; unknown shapes are one."""
        self._load_tests.get(shape, self._load_tests[LOAD_SHAPES[-1]]).inc()

    def set_state(self, state: str) -> None:
        """Show the state of the model, one of `STATES`.

        Raises:
            ValueError: another state.
        """
        if state not in STATES:
            raise ValueError(f"no state of the model: {state!r}")
        for name in STATES:
            self._model_state.labels(name).set(name == state)
        if state == "ready":
            self._model_ready_at.set_to_current_time()

    def set_download(self, model: str, done: int, total: int) -> None:
        """Show how much of a model's files is here, in bytes; `model` is one of `MODELS`.

        Raises:
            ValueError: another model, which would make the label unbounded.
        """
        if model not in MODELS:
            raise ValueError(f"no such model: {model!r}")
        self._download.labels(model).set(done)
        self._download_total.labels(model).set(total)

    def set_model(self, fields: Mapping[str, str]) -> None:
        """Show what is served: name, weights, drafters and so on, as labels."""
        self._model.info(dict(fields))

    def set_rows(self, rows: int) -> None:
        """Show how many requests can run at the same time."""
        self._rows.set(rows)

    def set_queue_size(self, requests: int) -> None:
        """Show how many requests may wait."""
        self._queue_size.set(requests)

    def set_kv_capacity(self, tokens: int) -> None:
        """Show how many tokens the target's KV cache can hold."""
        self._kv_capacity.set(tokens)

    def watch_controller(
        self, speedup: Callable[[], float], costs: Callable[[], PassCosts]
    ) -> None:
        """Show the controller's estimates, read whenever Prometheus asks.

        Args:
            speedup: over plain decoding.
            costs: kind of pass, its size, seconds; as few sizes as the model has.
        """
        self._estimated_speedup.set_function(speedup)
        self._pass_costs.costs = costs

    # -- the series --------------------------------------------------------------------------

    def _make_histograms(self) -> None:
        self._latency = self._histogram(
            "latency_seconds",
            "From a request's arrival to its end, waiting included.",
            _REQUEST_BUCKETS,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token, waiting included.",
            _WAIT_BUCKETS,
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between a request's tokens; a step that brings n tokens counts as n intervals "
            "of an n-th of its time.",
            _STEP_BUCKETS,
        )
        self._queue_wait = self._histogram(
            "queue_wait_seconds", "From a request's arrival to its row.", _WAIT_BUCKETS
        )
        steps = self._histogram(
            "target_step_seconds", "One forward pass of the target.", _STEP_BUCKETS, ["kind"]
        )
        self._target_step_seconds = {kind: steps.labels(kind) for kind in StepKind}
        lengths = self._histogram(
            "chosen_draft_tokens",
            "Guesses verified in a sequence step that had a choice; 0: guessing did not seem to "
            "pay. Steps for which the drafter had nothing are draft misses and not in here, nor "
            "are those in which a draft model still reads the prompt.",
            _LENGTH_BUCKETS,
            ["drafter"],
        )
        self._chosen_draft_tokens = {name: lengths.labels(name) for name in DRAFTERS}

    def _make_counters(self, max_k_draft: int) -> None:
        counter = self._counter
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._prefix_hits = counter(
            "prefix_hits", "Requests whose prompt began with tokens that the KV cache held already."
        )
        self._cached_tokens = counter(
            "cached_prompt_tokens",
            "Prompt tokens that needed no processing: the KV cache had them.",
        )
        self._generated_tokens = counter(
            "generated_tokens", "Tokens generated, each request's first included."
        )
        self._decode_tokens = counter(
            "decode_tokens", "Tokens generated after a request's first, by decode and verify steps."
        )
        self._wasted_tokens = counter(
            "wasted_tokens",
            "Tokens generated for requests whose client left, whose deadline passed or that "
            "failed.",
        )
        self._sequence_steps = counter(
            "sequence_steps", "Decode and verify steps, counted once per request taking part."
        )
        steps = counter("target_steps", "Forward passes of the target.", ["kind"])
        self._target_steps = {kind: steps.labels(kind) for kind in StepKind}
        requests = counter("requests", "Requests that ended, by how.", ["outcome"])
        self._requests = {reason: requests.labels(reason) for reason in FinishReason}
        load_tests = counter(
            "load_test_requests", "Requests that a load test sent, by its shape.", ["shape"]
        )
        self._load_tests = {shape: load_tests.labels(shape) for shape in LOAD_SHAPES}
        rejected = counter("requests_rejected", "Requests turned away at the door.", ["reason"])
        self._rejected = {reason: rejected.labels(reason) for reason in REJECTIONS}
        self._drafts = self._per_drafter("drafts", "Sequence steps with at least one guess.")
        self._draft_tokens = self._per_drafter("draft_tokens", "Tokens guessed.")
        self._accepted_tokens = self._per_drafter("accepted_tokens", "Guesses accepted.")
        self._draft_misses = self._per_drafter(
            "draft_misses",
            "Sequence steps for which a drafter was asked and had no guess. A draft model that "
            "still reads the prompt is not asked: for it alone that is no miss, and in a cascade "
            "it is one of ngram's.",
        )
        self._draft_seconds = counter("draft_seconds", "Seconds spent on guessing.")
        self._accepted_per_position = counter(
            "accepted_tokens_per_position", "Drafts whose guess here was accepted.", ["position"]
        )
        for position in range(1, max_k_draft + 1):
            self._accepted_per_position.labels(position)

    def _make_gauges(self) -> None:
        gauge = self._gauge
        gauge(
            "avg_jump",
            "Tokens per jump over the last minute: tokens generated by decode and verify steps, "
            "divided by sequence steps (one per request in a step; steps without a guess count). "
            "1 is plain decoding, 0 is no traffic.",
        ).set_function(self._window.average_jump)
        gauge(
            "draft_length",
            "Tokens guessed per sequence step over the last minute; steps without a guess count.",
        ).set_function(self._window.draft_length)
        self._estimated_speedup = gauge(
            "estimated_speedup",
            "Tokens per second of rounds with as many requests as the latest, over plain "
            "decoding's, by the measured costs of the passes; 1: plain decoding, or no round yet.",
        )
        self._estimated_speedup.set(1)
        self._requests_running = gauge("requests_running", "Requests that hold a row.")
        self._requests_waiting = gauge("requests_waiting", "Requests that wait for a row.")
        self._rows = gauge("rows", "Requests that can run at the same time.")
        self._queue_size = gauge("queue_size", "Requests that may wait before 429 is answered.")
        self._kv_tokens = gauge("kv_tokens", "Tokens of running requests in the target's KV cache.")
        self._kept_tokens = gauge(
            "kv_kept_tokens",
            "Tokens that finished requests have left in the target's KV cache: prompts that begin "
            "alike use them, whoever needs the room overwrites them.",
        )
        self._kv_capacity = gauge(
            "kv_capacity_tokens", "Tokens that the target's KV cache can hold."
        )
        self._download = gauge(
            "download_bytes", "Bytes of a model's files that are here; 0: no download.", ["model"]
        )
        self._download_total = gauge(
            "download_total_bytes", "Bytes of a model's files in all; 0: no download.", ["model"]
        )
        for model in MODELS:
            self.set_download(model, 0, 0)
        self._model = Info("model", "What is served.", namespace=NAMESPACE, registry=self.registry)
        self._model.info({"name": "not loaded"})
        self._model_state = gauge("model_state", "1 for the state the model is in.", ["state"])
        self._model_ready_at = gauge(
            "model_ready_timestamp_seconds", "When the model became ready; 0 before."
        )
        self.set_state(STATES[0])

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(
            name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets
        )

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _per_drafter(self, name: str, text: str) -> dict[str, Counter]:
        counter = self._counter(name, text, ["drafter"])
        return {drafter: counter.labels(drafter) for drafter in DRAFTERS}

    def _gauge(self, name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)
