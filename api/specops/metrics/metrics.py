"""Turns what the service does into Prometheus' figures: one method per kind of event.

`series` has the names and their meanings, `collectors` what is read from the machine. Counters and
histograms in base units; rates and ratios are PromQL's work, except the gauges over the last
minute, which are there for readers of `/metrics` without a Prometheus.

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
    drafting did not pay in    rate(specops_chosen_draft_tokens_bucket{le="0.0"}[5m])
                               / ignoring(le) rate(specops_chosen_draft_tokens_count[5m])
    tokens of a pass           sum(rate(specops_pass_tokens_total[5m]))
                               / sum(rate(specops_target_steps_total[5m]))
    share of the prompt        rate(specops_pass_tokens_total{use="prompt"}[5m])
    budget that is used        / ignoring(use) rate(specops_prompt_budget_tokens_total[5m])
    cost of a pass of 4        specops_pass_cost_seconds{kind="tokens", size="4"}
    tokens in plain steps      / ignoring(kind, size)
                               specops_pass_cost_seconds{kind="tokens", size="1"}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from specops.metrics.collectors import (
    NAMESPACE,
    MemoryCollector,
    PassCostCollector,
    PassCosts,
    ResourceCollector,
)
from specops.metrics.jump_window import JumpWindow
from specops.metrics.series import LOAD_SHAPES, MODELS, STATES, EngineSeries, RequestSeries
from specops.request import DraftStats, FinishReason, GenerationStats, StepResult, StepStats

# A `_created` series beside every counter would double the page; no dashboard here reads them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All series of one service, in a registry of its own.

    Args:
        registry: where the series are registered; a new registry by default.
        max_k_draft: positions of drafts that are counted one by one.
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
        self._engine = EngineSeries(self.registry, max_k_draft)
        self._requests = RequestSeries(self.registry)
        self._window = JumpWindow(clock)
        self._engine.avg_jump.set_function(self._window.average_jump)
        self._engine.draft_length.set_function(self._window.draft_length)
        self._blocks = 0
        self._pass_costs = PassCostCollector()
        self.registry.register(self._pass_costs)
        self.registry.register(MemoryCollector())
        self.registry.register(ResourceCollector(volume))
        prometheus_client.ProcessCollector(registry=self.registry)
        for model in MODELS:
            self.set_download(model, 0, 0)
        self.set_state(STATES[0])

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type, in the format that the `Accept` header wants."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def read(self, names: Iterable[str]) -> dict[str, float]:
        """Return what the series called `names` are now, by name and label: `draft_tokens/suffix`.

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

    # -- what the engine did -----------------------------------------------------------------

    def observe_step(self, step: StepStats) -> None:
        """Count one forward pass of the target."""
        series = self._engine
        series.target_steps[step.kind].inc()
        series.target_step_seconds[step.kind].observe(step.seconds)
        series.generated_tokens.inc(step.emitted_tokens)
        if step.prompt_tokens or step.budget_tokens or step.cached_tokens:
            self._observe_prompts(step)
        if step.decoding:
            self._observe_decoding(step)
        series.draft_seconds.inc(step.draft_seconds)
        series.preemptions.inc(step.preempted)

    def _observe_prompts(self, step: StepStats) -> None:
        series = self._engine
        series.pass_tokens["prompt"].inc(step.prompt_tokens)
        series.prompt_budget_tokens.inc(step.budget_tokens)
        series.prompt_tokens.inc(step.prompt_tokens)
        series.prefix_hits.inc(step.prefix_hits)
        series.cached_prompt_tokens.inc(step.cached_tokens)

    def _observe_decoding(self, step: StepStats) -> None:
        series, draft_tokens = self._engine, step.draft_tokens
        decoded = step.emitted_tokens - step.first_tokens
        series.pass_tokens["decoded"].inc(step.decoding)
        series.pass_tokens["verified"].inc(draft_tokens)
        series.decode_tokens.inc(decoded)
        series.sequence_steps.inc(step.decoding)
        self._window.add(decoded, step.decoding, draft_tokens)
        for drafter in step.missed_drafters:
            series.draft_misses[drafter].inc()
        for drafter in step.declined_drafters:
            series.chosen_draft_tokens[drafter].observe(0)
        for draft in step.drafts:
            self._observe_draft(draft)

    def _observe_draft(self, draft: DraftStats) -> None:
        series, drafter = self._engine, draft.drafter
        series.drafts[drafter].inc()
        series.chosen_draft_tokens[drafter].observe(draft.draft_tokens)
        series.draft_tokens[drafter].inc(draft.draft_tokens)
        series.accepted_tokens[drafter].inc(draft.accepted)
        for position, promised in enumerate(draft.promised):
            tenth = min(int(10 * promised), 9)
            series.draft_promises[drafter][tenth].inc()
            series.draft_promised[drafter][tenth].inc(promised)
            series.draft_promises_kept[drafter][tenth].inc(position < draft.accepted)
        # A grammar's drafts may be longer than there are positions.
        for verified in series.verified_per_position[drafter][: draft.draft_tokens]:
            verified.inc()
        for accepted in series.accepted_per_position[drafter][: draft.accepted]:
            accepted.inc()

    def observe_step_result(self, result: StepResult) -> None:
        """Set the gauges of the scheduler's load."""
        self._requests.requests_running.set(result.running)
        self._requests.requests_waiting.set(result.waiting)
        series = self._engine
        series.kv_tokens.set(result.kv_tokens)
        series.kv_kept_tokens.set(result.kept_tokens)
        series.kv_blocks["used"].set(result.used_blocks)
        series.kv_blocks["shared"].set(result.shared_blocks)
        series.kv_blocks["kept"].set(result.kept_blocks)
        series.kv_blocks["free"].set(self._blocks - result.used_blocks - result.kept_blocks)
        series.kv_usage.set(result.used_blocks / self._blocks if self._blocks else 0.0)

    def watch_controller(
        self, speedup: Callable[[], float], costs: Callable[[], PassCosts]
    ) -> None:
        """Show the engine's estimates, read whenever Prometheus asks.

        Args:
            speedup: over plain decoding.
            costs: kind of cost, its size, seconds; as few sizes as the model has.
        """
        self._engine.estimated_speedup.set_function(speedup)
        self._pass_costs.costs = costs

    # -- what became of requests ---------------------------------------------------------------

    def observe_finish(
        self,
        reason: FinishReason,
        stats: GenerationStats | None,
        latency_seconds: float,
        ttft_seconds: float | None,
    ) -> None:
        """Count a request that ended; `ttft_seconds` is None where no token came."""
        self._requests.requests[reason].inc()
        self._requests.latency.observe(latency_seconds)
        if ttft_seconds is not None:
            self._requests.time_to_first_token.observe(ttft_seconds)
        if stats is not None and reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            self._requests.wasted_tokens.inc(stats.generated_tokens)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """Count the time since the request's last tokens, spread over the `tokens` it brought."""
        for _ in range(tokens):
            self._requests.inter_token_latency.observe(seconds / tokens)

    def observe_queue_wait(self, seconds: float) -> None:
        """Count the time that a request waited for a slot."""
        self._requests.queue_wait.observe(seconds)

    def observe_rejected(self, reason: str) -> None:
        """Count a request that was turned away; `reason` is one of `series.REJECTIONS`.

        Raises:
            KeyError: another reason, which would make the label unbounded.
        """
        self._requests.requests_rejected[reason].inc()

    def observe_closing(self, reason: str) -> None:
        """Count a connection that the server closed; `reason` is one of `series.CLOSINGS`.

        Raises:
            KeyError: another reason.
        """
        self._requests.connections_closed[reason].inc()

    def observe_load_test(self, shape: str) -> None:
        """Count a request that says that it is part of a load test; unknown shapes are one."""
        shapes = self._requests.load_test_requests
        shapes.get(shape, shapes[LOAD_SHAPES[-1]]).inc()

    # -- what the service is -------------------------------------------------------------------

    def set_state(self, state: str) -> None:
        """Show the state of the model, one of `series.STATES`.

        Raises:
            ValueError: another state.
        """
        if state not in STATES:
            raise ValueError(f"no state of the model: {state!r}")
        for name in STATES:
            self._requests.model_state.labels(name).set(name == state)
        if state == "ready":
            self._requests.model_ready_at.set_to_current_time()

    def set_download(self, model: str, done: int, total: int) -> None:
        """Show how much of a model's files is here, in bytes; `model` is one of `series.MODELS`.

        Raises:
            ValueError: another model, which would make the label unbounded.
        """
        if model not in MODELS:
            raise ValueError(f"no such model: {model!r}")
        self._requests.download.labels(model).set(done)
        self._requests.download_total.labels(model).set(total)

    def set_model(self, fields: Mapping[str, str]) -> None:
        """Show what is served: name, weights, drafters and so on, as labels."""
        self._requests.model.info(dict(fields))

    def set_slots(self, slots: int) -> None:
        """Show how many requests can run at the same time."""
        self._requests.slots.set(slots)

    def set_queue_size(self, requests: int) -> None:
        """Show how many requests may wait."""
        self._requests.queue_size.set(requests)

    def set_kv_capacity(self, tokens: int, blocks: int) -> None:
        """Show how many tokens, in how many blocks, the target's KV cache can hold."""
        self._engine.kv_capacity_tokens.set(tokens)
        self._blocks = blocks
        self._engine.kv_blocks["free"].set(blocks)
