"""Plans the next pass: one flat batch of spans, and the request of each span.

Requests that decode come first, each with its last token and the draft tokens to verify
(`drafting`). The rest of the pass goes to the prompts of admitted requests, as far as its budget
(`pass_budget`) goes.
"""

from __future__ import annotations

from collections.abc import Callable

from specops.engine.drafting import Drafting
from specops.engine.pass_budget import PassBudget
from specops.engine.request_state import RequestState, Status
from specops.engine.scheduled import Scheduled
from specops.engine.slots import MAX_RECOMPUTED, SlotManager
from specops.request import PRIORITY_SECONDS, Step, StepKind
from specops.runtime.batch import Batch
from specops.runtime.kvcache.block_pool import ROLLBACK
from specops.runtime.kvcache.manager import WORTH_A_PASS, KvCache
from specops.runtime.memory_plan import PROMPT_ROWS

_ROWS_PER_SLOT = 8  # of logits, at most, for a prompt that needs all its tokens' logits


class Planner:
    """Fills batches. Used by the engine's thread.

    Args:
        cache: the target's.
        slots: the requests that hold a slot.
        drafting: collects draft tokens.
        budget: of the passes.
        clock: seconds.
    """

    def __init__(
        self,
        cache: KvCache,
        slots: SlotManager,
        drafting: Drafting,
        budget: PassBudget,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._slots = cache, slots
        self._drafting, self._budget = drafting, budget
        self._clock = clock

    def plan(self, step: Step, started: float) -> tuple[Batch, list[Scheduled]]:
        """Choose the spans of the next pass, maybe none, and the request of each span.

        May preempt requests, and runs draft models.

        Args:
            step: gets the figures that are known before the pass.
            started: when the step began.
        """
        batch, decoding = Batch(), self._slots.schedule_decodes()
        prompts = self._prompts(step) if len(decoding) < len(self._slots) else []
        self._slots.order.sort(prompts)
        waiting = 0
        if prompts:
            uncomputed = sum(item.num_uncomputed_tokens for item in prompts)
            waiting = min(uncomputed, self._budget.usual_chunk)
        scheduled = self._drafting.propose(step, decoding, waiting)
        for item in scheduled:
            batch.add(item.slot, item.start, item.tokens, item.num_logits, item.num_committed)
        step.decoding, decoded = len(scheduled), batch.num_tokens
        if prompts:
            self._add_prompts(step, batch, scheduled, prompts, started)
        step.prompt_tokens = batch.num_tokens - decoded
        step.kind = _kind(step, batch)
        return batch, scheduled

    def _prompts(self, step: Step) -> list[RequestState]:
        """The prompts in slots, less beginnings that other requests have computed."""
        prompts = [item for item in self._slots if item.status is Status.PREFILL]
        for state in prompts:
            self._take_prefix(step, state)
        return prompts

    def _add_prompts(
        self,
        step: Step,
        batch: Batch,
        scheduled: list[Scheduled],
        prompts: list[RequestState],
        started: float,
    ) -> None:
        """Fill the pass with the prompts' next tokens, the first's first, within the budget."""
        others = [item.state.request for item in scheduled]
        urgent = min(request.priority for request in (*others, prompts[0].request))
        # Nobody waits for prompts that are computed ahead, but a request that arrives meanwhile
        # waits for the end of the pass.
        client_waits = urgent > 0 or any(item.stream or item.priority < 0 for item in others)
        after = sum(item.state.choosing_seconds for item in scheduled)
        spent = self._clock() - started + after
        seconds = self._budget.pass_seconds(batch, client_waits=client_waits, spent=spent)
        least = self._budget.least_seconds(batch)
        decoding = batch.num_tokens
        for state in prompts:
            if state.status is Status.WAITING:  # preempted for one before it
                continue
            held = state.num_computed
            if state.request.turn > self._clock() + PRIORITY_SECONDS * urgent:  # it can wait
                seconds = min(seconds, least)
            each = state.reader.seconds if state.reader and not state.generated else 0.0
            followed = self._drafting.read_seconds(state)
            room = self._budget.prompt_tokens(
                batch, held, seconds, first=batch.num_tokens == decoding, each=each + followed
            )
            step.budget_tokens = max(step.budget_tokens, batch.num_tokens - decoding + room)
            if room < 1:
                return
            if self._is_being_computed(state, scheduled[step.decoding :]):
                continue
            if (chunk := self._next_chunk(batch, state, room)) is not None:
                # Later texts often diverge shortly before a prompt's end, which opens the answer:
                # the snapshot there then serves them, too, wherever the prompt's pieces end. For a
                # draft head the last tokens before any snapshot may have to be computed again.
                recomputed = MAX_RECOMPUTED if followed else 0
                end = chunk.start + len(chunk.tokens) - recomputed
                committed = min(end, len(state.tokens) - ROLLBACK)
                count, scored = chunk.num_logits, chunk.scored
                batch.add(chunk.slot, chunk.start, chunk.tokens, count, committed, scored=scored)
                scheduled.append(chunk)
                seconds -= chunk.num_logits * each + len(chunk.tokens) * followed

    def _next_chunk(self, batch: Batch, state: RequestState, room: int) -> Scheduled | None:
        """A prompt's next tokens, at most `room`; None where there is nothing to compute or no KV
        block for it."""
        # None are left where another request has recomputed all that this one had lost.
        held, count = state.num_computed, min(room, state.num_uncomputed_tokens)
        reads = state.reader is not None and not state.generated
        if reads and not state.request.embed:
            left = self._budget.most_rows + PROMPT_ROWS - batch.num_logits
            count = min(count, _ROWS_PER_SLOT * self._cache.num_slots, max(0, left))
        if not count:
            return None
        if (border := self._cache.next_snapshot(state.slot)) is not None:
            count = min(count, border - held)
        if not self._slots.reserve(state, held + count, batch):
            return None
        state.was_scheduled = True
        ends = count == state.num_uncomputed_tokens and not state.generated
        tokens, num_logits = state.tokens[held : held + count], count if reads else int(ends)
        return Scheduled(state, state.slot, held, tokens, num_logits, ends_prompt=ends)

    def _is_being_computed(self, state: RequestState, prompts: list[Scheduled]) -> bool:
        """Whether the pass computes a prompt's next tokens for another one, which will share them.

        A piece that leaves room behind it ends where that is possible. To wait for a few tokens
        would take longer than to compute them.
        """
        ends = ((item.slot, item.start + len(item.tokens)) for item in prompts)
        return any(
            end - state.num_computed >= WORTH_A_PASS
            and self._cache.shares_prefix(slot, state.slot, end)
            for slot, end in ends
        )

    def _take_prefix(self, step: Step, state: RequestState) -> None:
        """Skip the part of the beginning that other requests have computed."""
        before = state.num_computed if state.was_scheduled else state.num_cached_tokens
        held = self._slots.share_prefix(state)
        if held > before and not state.preemptions:
            step.cached_tokens += held - before
            state.num_cached_tokens += held - before


def _kind(step: Step, batch: Batch) -> StepKind | None:
    if step.prompt_tokens:
        return StepKind.MIXED if step.decoding else StepKind.PREFILL
    if not step.decoding:
        return None
    return StepKind.VERIFY if batch.num_tokens > step.decoding else StepKind.DECODE
