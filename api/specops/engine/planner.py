"""Plans the next pass: one flat batch of spans, and the sequence of each span.

Requests that decode come first, each with its last token and the draft tokens to verify. The rest
of the token budget goes to the prompts of admitted requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specops.engine.proposer import DraftTimes, Proposer, SequenceProposal
from specops.engine.request_state import RequestState
from specops.engine.slots import SlotManager
from specops.engine.token_budget import TokenBudget
from specops.request import StepKind
from specops.runtime.batch import Batch
from specops.runtime.kv_cache import KvCache

# Rows of logits of a pass. The memory plan counts nine for each slot, and a prompt that wants the
# logits of all its tokens takes no more than that.
_ROWS_PER_SLOT, _LEAST_ROWS = 8, 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt in a pass.

    Attributes:
        sequence: the request.
        tokens: number of tokens.
        last: the prompt ends with this piece, whose last token brings the answer's first.
        rows: number of its last tokens that need logits.
    """

    sequence: RequestState
    tokens: int
    last: bool
    rows: int


@dataclass(slots=True)
class PlannedStep:
    """The plan of one step.

    Attributes:
        batch: the spans of `proposals`, then those of `chunks`.
        proposals: the requests that decode, with their draft tokens.
        chunks: pieces of prompts.
        budget: number of prompt tokens that there was room for; 0 where no prompt waited.
        drafting: time to get the draft tokens.
        reading_seconds: time that a draft model took to catch up with a sequence.
        cached: number of prompt tokens that need no pass.
        prefix_hits: number of requests with such tokens.
    """

    batch: Batch = field(default_factory=Batch)
    proposals: list[SequenceProposal] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    budget: int = 0
    drafting: DraftTimes = field(default_factory=DraftTimes)
    reading_seconds: float = 0.0
    cached: int = 0
    prefix_hits: int = 0

    @property
    def kind(self) -> StepKind:
        """What the pass is for."""
        if self.chunks:
            return StepKind.MIXED if self.proposals else StepKind.PREFILL
        drafted = self.batch.num_tokens > len(self.proposals)
        return StepKind.VERIFY if drafted else StepKind.DECODE


class Planner:
    """Fills batches. Used by the engine's thread.

    Args:
        cache: the target's.
        running: the sequences that hold a slot.
        proposer: asks for draft tokens.
        budget: bounds what prompts get.
        clock: seconds.
    """

    def __init__(
        self,
        cache: KvCache,
        running: SlotManager,
        proposer: Proposer,
        budget: TokenBudget,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._most_rows = _ROWS_PER_SLOT * cache.num_slots
        self._running = running
        self._proposer = proposer
        self._budget = budget
        self._clock = clock

    def plan(self, started: float) -> PlannedStep:
        """Choose the spans of the next pass, maybe none; `started` is when the step began."""
        step = PlannedStep()
        decoding = self._running.schedule_decodes()
        prompts = [item for item in self._running if item.num_uncomputed_tokens and not item.finish]
        beside = 0
        if prompts:
            beside = min(
                sum(item.num_uncomputed_tokens for item in prompts), self._budget.usual_chunk
            )
        else:
            step.reading_seconds = self._proposer.prefill_draft_model(
                decoding, lambda past: self._budget.draft_model_tokens(len(decoding), past)
            )
        if decoding:
            step.proposals, step.drafting = self._proposer.propose(decoding, beside)
        for proposal in step.proposals:
            self._add_decoding(step, proposal)
        if prompts:
            self._add_prompts(step, decoding, prompts, started)
        return step

    def _add_prompts(
        self,
        step: PlannedStep,
        decoding: list[RequestState],
        prompts: list[RequestState],
        started: float,
    ) -> None:
        """Fill the pass with the prompts' next tokens, as far as the budget goes."""
        # A text to be embedded may be far longer than any prompt, so it gets what is left.
        prompts.sort(key=lambda item: item.request.embed)
        watched = any(sequence.request.stream for sequence in decoding)
        after = sum(proposal.sequence.choosing_seconds for proposal in step.proposals)
        seconds = self._budget.pass_seconds(
            step.batch, watched=watched, spent=self._clock() - started + after
        )
        for sequence in prompts:
            if sequence.slot < 0:  # preempted for one before it
                continue
            rows = step.batch.num_logits
            if not self._add_chunk(step, sequence, seconds):
                break
            seconds -= (step.batch.num_logits - rows) * _reading_seconds(sequence)

    def _add_decoding(self, step: PlannedStep, proposal: SequenceProposal) -> None:
        sequence = proposal.sequence
        tokens = [sequence.tokens[-1], *proposal.tokens]
        step.batch.add(sequence.slot, sequence.num_computed, tokens, proposal.num_logits)

    def _add_chunk(self, step: PlannedStep, sequence: RequestState, seconds: float) -> bool:
        """Let a prompt's next tokens join the pass; False where the pass is full."""
        held = self._take_prefix(step, sequence)
        each, first = _reading_seconds(sequence), not step.chunks
        room = self._budget.prompt_tokens(step.batch, held, seconds, first=first, each=each)
        taken = sum(chunk.tokens for chunk in step.chunks)
        step.budget = max(step.budget, taken + room)
        if room < 1:
            return False
        count = min(room, sequence.num_uncomputed_tokens)
        if not count:  # another request has computed all that this one had given up
            return True
        reads = sequence.reader is not None and not sequence.generated
        if reads:
            count = min(count, max(_LEAST_ROWS, self._most_rows - step.batch.num_logits))
        if not self._running.reserve(sequence, held + count, step.batch):
            return True
        last = count == sequence.num_uncomputed_tokens and not sequence.generated
        tokens = sequence.tokens[held : held + count]
        rows = count if reads else int(last)
        step.batch.add(sequence.slot, held, tokens, rows)
        step.batch.hidden |= sequence.request.embed
        step.chunks.append(Chunk(sequence, count, last, rows))
        sequence.was_scheduled = True
        return True

    def _take_prefix(self, step: PlannedStep, sequence: RequestState) -> int:
        """Skip what other requests have computed of the beginning; returns the computed tokens."""
        before = sequence.num_computed if sequence.was_scheduled else sequence.num_cached_tokens
        held = self._running.extend_prefix(sequence)
        if held > before and not sequence.preemptions:
            step.prefix_hits += not sequence.num_cached_tokens
            step.cached += held - before
            sequence.num_cached_tokens += held - before
        return held


def _reading_seconds(sequence: RequestState) -> float:
    """Seconds that a reader of the prompt takes for each of its tokens, after the pass."""
    return sequence.reader.seconds if sequence.reader and not sequence.generated else 0.0
