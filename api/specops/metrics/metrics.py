"""Counts the service's events in Prometheus' series: one method for each kind of event.

`series` has the names and meanings of the series; `collectors` reads the machine's figures.
Counters and histograms have base units. PromQL computes rates and ratios, except for gauges over
the last minute, for those who read `/metrics` without Prometheus.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

from specops.metrics.collectors import NAMESPACE, MachineCollector, PassCosts
from specops.metrics.series import EVERYONE, LOAD_SHAPES, STATES, Series
from specops.request import (
    SUGGESTION,
    Draft,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Step,
)
from specops.system.failures import Failures

# A `_created` series for each counter would double the page; our dashboards do not read them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
_WINDOW_SECONDS = 60


class Metrics(Series):
    """All series of one service, in a private registry, with a method for each event.

    A label value that `series` does not list raises KeyError, so their number is bounded.

    Args:
        max_k_draft: number of draft positions with separate counters.
        volume: a folder on the volume that holds the models.
        clock: returns seconds, for the window over the last minute.

    Attributes:
        registry: holds the series.
        failures: counts the failures of callbacks.
    """

    def __init__(
        self,
        *,
        max_k_draft: int = 8,
        volume: Path = Path(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        super().__init__(self.registry, max_k_draft)
        self.failures = Failures(lambda where: self.callback_failures[where].inc())
        self._last_minute = _LastMinute(clock)
        self._read_when_asked(self.avg_jump, self._last_minute.tokens_per_pass)
        self._read_when_asked(self.draft_length, self._last_minute.draft_length)
        self._machine = MachineCollector(volume, self.failures)
        self.registry.register(self._machine)
        self.set_state(STATES[0])

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type, in the format of the `Accept` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def read(self, names: Iterable[str]) -> dict[str, float]:
        """Return the current values of the named series.

        Only these series are read. A key is the name without the namespace, followed by its label
        values: `draft_tokens/suffix`. NaN: nothing was measured.
        """
        families = self.registry.restricted_registry(names).collect()
        return {
            "/".join([sample.name.removeprefix(f"{NAMESPACE}_"), *sample.labels.values()]): (
                sample.value
            )
            for family in families
            for sample in family.samples
        }

    def _read_when_asked(self, gauge: Gauge, read: Callable[[], float]) -> None:
        """Let each scrape read a gauge; NaN if that fails."""

        def value() -> float:
            with self.failures.report_errors("scrape"):
                return read()
            return math.nan

        gauge.set_function(value)

    # -- the engine's work --------------------------------------------------------------------

    def observe_step(self, step: Step) -> None:
        """Count one step: its forward pass, if it had one, and the load after it."""
        if step.kind is not None:
            self.target_steps[step.kind].inc()
            self.target_step_seconds[step.kind].observe(step.seconds)
            self._observe_tokens(step)
            if step.prompt_tokens or step.budget_tokens or step.cached_tokens:
                self._observe_prompts(step)
            if step.decoding:
                self._observe_decoding(step)
            self.draft_seconds.inc(step.draft_seconds)
            self.preemptions.inc(step.preempted)
        for drafter in step.failed_drafters:
            self.drafter_failures[drafter].inc()
        self.requests_running.set(step.running)
        for event, count in step.snapshots.items():
            self.state_snapshots[event].inc(count)

    def _observe_tokens(self, step: Step) -> None:
        self.generated_tokens.inc(step.emitted_tokens)
        for client, tokens in step.client_tokens.items():
            *_, generated = self.clients[client or EVERYONE]
            generated.inc(tokens)
        for seconds, tokens in step.intervals.items():
            self.inter_token_latency_seconds.observe_equal(seconds, tokens)

    def _observe_prompts(self, step: Step) -> None:
        self.pass_tokens["prompt"].inc(step.prompt_tokens)
        self.prompt_budget_tokens.inc(step.budget_tokens)
        self.prompt_tokens.inc(step.prompt_tokens)
        self.cached_prompt_tokens.inc(step.cached_tokens)

    def _observe_decoding(self, step: Step) -> None:
        draft_tokens = step.draft_tokens
        decoded = step.emitted_tokens - step.first_tokens
        self.pass_tokens["decoded"].inc(step.decoding)
        self.pass_tokens["verified"].inc(draft_tokens)
        self.decode_tokens.inc(decoded)
        self.sequence_steps.inc(step.decoding)
        self._last_minute.add(decoded, step.decoding, draft_tokens)
        for drafter in step.missed_drafters:
            self.draft_misses[drafter].inc()
        for drafter in step.declined_drafters:
            self.chosen_draft_tokens[drafter].observe(0)
        for draft in step.drafts:
            self._observe_draft(draft)

    def _observe_draft(self, draft: Draft) -> None:
        drafter, count = draft.drafter, len(draft.tokens)
        self.drafts[drafter].inc()
        if draft.adaptive:
            self.chosen_draft_tokens[drafter].observe(count)
        self.draft_tokens[drafter].inc(count)
        self.accepted_tokens[drafter].inc(draft.accepted)
        self.accepted_tokens_found[draft.found_in or drafter].inc(draft.accepted)
        for position, probability in enumerate(draft.accept_probs):
            tenth = min(int(10 * probability), 9)
            self.draft_promises[drafter][tenth].inc()
            self.draft_promised[drafter][tenth].inc(probability)
            self.draft_promises_kept[drafter][tenth].inc(position < draft.accepted)
        # Drafts of a grammar may be longer than the counted positions.
        for verified in self.draft_tokens_per_position[drafter][:count]:
            verified.inc()
        for accepted in self.accepted_tokens_per_position[drafter][: draft.accepted]:
            accepted.inc()

    def watch_waiting(self, waiting: Callable[[], float]) -> None:
        """Show the number of waiting requests, read at each scrape."""
        self._read_when_asked(self.requests_waiting, waiting)

    def watch_cache(self, cache: Any) -> None:
        """Show how full the target's KV cache (`KvCache`) is, read at each scrape."""
        read, kept = self._read_when_asked, cache.recurrent
        read(self.kv_tokens, lambda: cache.tokens)
        read(self.kv_kept_tokens, lambda: cache.cached_tokens)
        read(self.kv_usage_ratio, lambda: cache.used_blocks / cache.num_blocks)
        read(self.kv_blocks["used"], lambda: cache.used_blocks)
        read(self.kv_blocks["shared"], lambda: cache.shared_blocks)
        read(self.kv_blocks["kept"], lambda: cache.cached_blocks)
        read(self.kv_blocks["free"], lambda: cache.available_blocks - cache.cached_blocks)
        read(self.state_bytes["snapshots"], lambda: kept.used_bytes if kept else 0)

    def watch_controller(
        self, speedup: Callable[[], float], costs: Callable[[], PassCosts]
    ) -> None:
        """Show the engine's estimates, read at each scrape.

        Tokens per pass of the last minute, which would be the speedup if draft tokens were free,
        limit the speedup that is shown: the latest steps may differ.

        Args:
            speedup: returns the latest steps' estimated speedup over plain decoding.
            costs: returns kind, size and seconds of each pass cost.
        """
        jump = self._last_minute.tokens_per_pass  # if it is NaN, so is `min` below
        self._read_when_asked(self.estimated_speedup, lambda: min(jump(), speedup()))
        self._machine.pass_costs = costs

    # -- results of requests and clients -----------------------------------------------------------

    def observe_admitted(self, request: GenerationRequest) -> None:
        """Count an admitted request and its prompt for its client."""
        requests, prompt_tokens, _ = self.clients[request.client or EVERYONE]
        requests.inc()
        prompt_tokens.inc(request.num_prompt_tokens)

    def observe_finish(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        stats: GenerationStats | None,
        latency_seconds: float,
    ) -> None:
        """Count a request that ended.

        The latest request in each bucket of latency and time to first token is that bucket's
        exemplar, named by its trace's id, or without one by the id in the answer and the log.

        Args:
            request: the request.
            reason: why it ended.
            stats: its statistics; None: it never ran.
            latency_seconds: from its arrival to its end.
        """
        trace = request.trace
        exemplar = {"trace_id": trace.trace_id} if trace else {"request_id": request.client_id}
        self.requests[reason].inc()
        self.latency_seconds.observe(latency_seconds, exemplar)
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        if stats is not None:
            if stats.generated_tokens:
                ttft = stats.queue_seconds + stats.prefill_seconds
                self.time_to_first_token_seconds.observe(ttft, exemplar)
            self.queue_wait_seconds.observe(stats.queue_seconds)
            self.prefix_hits.inc(stats.cached_prompt_tokens > 0)
            if reason not in {FinishReason.STOP, FinishReason.LENGTH}:
                self.wasted_tokens.inc(stats.generated_tokens)
            elif not request.embed:
                self.request_generated_tokens.observe(stats.generated_tokens)
        if request.priority == SUGGESTION:
            self.suggestions[reason].inc()
            if stats is not None and reason in {FinishReason.STOP, FinishReason.LENGTH}:
                self._observe_suggestion(stats, latency_seconds)

    def _observe_suggestion(self, stats: GenerationStats, latency_seconds: float) -> None:
        self.suggestion_seconds.observe(latency_seconds)
        self.suggestion_steps.inc(stats.sequence_steps)
        cached, tokens = stats.cached_prompt_tokens, self.suggestion_tokens
        tokens["cached"].inc(cached)
        tokens["computed"].inc(stats.prompt_tokens - cached)
        tokens["decoded"].inc(max(0, stats.generated_tokens - 1))
        tokens["accepted"].inc(stats.accepted_tokens)

    def observe_rejected(self, reason: str) -> None:
        """Count a refused request; `reason` is one of `series.REJECTIONS`."""
        self.requests_rejected[reason].inc()

    def observe_closing(self, reason: str) -> None:
        """Count a connection that the server closed; `reason` is one of `series.CLOSINGS`."""
        self.connections_closed[reason].inc()

    def observe_http(self, endpoint: str, status: int) -> None:
        """Count an answered HTTP request; `endpoint` names a route, not a path."""
        self.http_requests.labels(endpoint, status).inc()

    def observe_load_test(self, shape: str) -> None:
        """Count a request of a load test; all unknown shapes count as one shape."""
        shapes = self.load_test_requests
        shapes.get(shape, shapes[LOAD_SHAPES[-1]]).inc()

    # -- state of the service ------------------------------------------------------------------

    def set_endpoint(self, endpoint: str, statuses: Iterable[int]) -> None:
        """Make the series of an endpoint's statuses before its first answer."""
        for status in statuses:
            self.http_requests.labels(endpoint, status)

    def set_state(self, state: str) -> None:
        """Show the state of the model, one of `series.STATES`."""
        current = self.model_state[state]
        for gauge in self.model_state.values():
            gauge.set(gauge is current)
        if state == "ready":
            self.model_ready_timestamp_seconds.set_to_current_time()

    def set_download(self, model: str, done: int, total: int) -> None:
        """Show a download's progress.

        Args:
            model: one of `series.MODELS`.
            done: downloaded bytes.
            total: size of the files in bytes.
        """
        self.download_bytes[model].set(done)
        self.download_total_bytes[model].set(total)

    def set_model(
        self,
        labels: Mapping[str, str],
        slots: int,
        kv_tokens: int,
        state_bytes: Mapping[str, int],
    ) -> None:
        """Show the served model.

        Args:
            labels: of `specops_model_info`.
            slots: maximum number of running requests.
            kv_tokens: capacity of its KV cache.
            state_bytes: bytes of recurrent states, by kind.
        """
        self.model.info(dict(labels))
        self.slots.set(slots)
        self.kv_capacity_tokens.set(kv_tokens)
        for kind, count in state_bytes.items():
            self.state_bytes[kind].set(count)

    def set_draft_head_agreement(self, share: float) -> None:
        """Show how often a draft head agrees with the target in a test text."""
        self.draft_head_agreement.set(share)

    def set_queue_size(self, requests: int) -> None:
        """Show how many requests may wait."""
        self.queue_size.set(requests)


class _LastMinute:
    """Tokens, steps and draft tokens of the last minute, in buckets of a second. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[list[int]] = deque()  # [second, tokens, steps, draft tokens]

    def add(self, tokens: int, steps: int, draft_tokens: int) -> None:
        """Count a pass: decoded tokens, decoding requests, verified draft tokens."""
        second = int(self._clock())
        with self._lock:
            if not self._buckets or self._buckets[-1][0] != second:
                self._forget(second)
                self._buckets.append([second, 0, 0, 0])
            bucket = self._buckets[-1]
            bucket[1] += tokens
            bucket[2] += steps
            bucket[3] += draft_tokens

    def tokens_per_pass(self) -> float:
        """Return decoded tokens per sequence step; NaN without a step in the window."""
        return self._per_step(1)

    def draft_length(self) -> float:
        """Return draft tokens per sequence step; NaN without a step in the window."""
        return self._per_step(3)

    def _per_step(self, column: int) -> float:
        with self._lock:
            self._forget(int(self._clock()))
            steps = sum(bucket[2] for bucket in self._buckets)
            return sum(bucket[column] for bucket in self._buckets) / steps if steps else math.nan

    def _forget(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] <= second - _WINDOW_SECONDS:
            self._buckets.popleft()
