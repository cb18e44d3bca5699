"""What comes of a pass: drafts are verified, tokens appended, and both counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specops.engine.planner import Chunk, PlannedStep
from specops.engine.proposer import Proposal
from specops.engine.sequence import Sequence
from specops.request import GRAMMAR, DraftStats
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats
from specops.speculation.controller import Controller
from specops.speculation.verifier import verify


@dataclass(slots=True)
class Progress:
    """What the requests of a pass got.

    Attributes:
        decoded: tokens per request that decoded.
        first_tokens: requests that got their first one.
        drafts: what became of each verified draft.
    """

    decoded: list[int] = field(default_factory=list)
    first_tokens: int = 0
    drafts: list[DraftStats] = field(default_factory=list)


class Postprocessor:
    """Turns logits into tokens. Used by the engine's thread.

    Args:
        target: whose logits they are.
        controller: is told what became of drafts.
        clock: seconds.
    """

    def __init__(
        self, target: ModelRunner, controller: Controller, clock: Callable[[], float]
    ) -> None:
        self._target = target
        self._clock = clock
        self.controller = controller

    def take(self, step: PlannedStep, logits: Floats) -> Progress:
        """Give every sequence of a pass what it brought; one whose turn goes wrong fails alone.

        Args:
            step: what was computed.
            logits: [n, V], of the tokens that wanted them, in the order of the spans.
        """
        progress, row = Progress(), 0
        for proposal in step.proposals:
            rows = proposal.num_logits
            try:
                self._take_decoded(progress, proposal, logits[row : row + rows], row)
            except Exception as error:
                proposal.sequence.fail(error)
                progress.decoded.append(0)
            row += rows
        for chunk in step.chunks:
            try:
                self._take_chunk(progress, chunk, logits[row : row + chunk.rows], row)
            except Exception as error:
                chunk.sequence.fail(error)
            row += chunk.rows
        return progress

    def _take_decoded(
        self, progress: Progress, proposal: Proposal, logits: Floats, row: int
    ) -> None:
        """Verify a draft and append what stands, with the target's own token after it.

        `logits` [k + 1, V] follow the sequence's last token, or the last that its grammar forced,
        and each of its draft tokens; where probabilities are told those of the forced ones are
        before them. The first of all is `row` of the pass.
        """
        sequence, draft, forced = proposal.sequence, proposal.draft, proposal.forced
        choices = logits[len(logits) - 1 - len(draft.tokens) :]
        start = self._clock()
        verdict = verify(
            sequence.adjusted(choices, draft.tokens, forced),
            draft.tokens,
            draft.probs,
            sampling=sequence.request.sampling,
            rng=sequence.rng,
            position=len(sequence.tokens) + len(forced),
        )
        seconds = self._clock() - start
        self.controller.verified(proposal.candidate, len(draft.tokens), verdict.accepted, seconds)
        tokens = [*forced, *draft.tokens[: verdict.accepted], verdict.next_token]
        most = len(forced) + verdict.accepted
        emitted = sequence.append(tokens, most, proposal.drafter, logits, forced=len(forced))
        # A stop inside of the accepted tokens: what came after it never was output.
        accepted = min(most, emitted)
        # What was computed of rejected tokens is overwritten by what comes instead.
        self._computed(sequence, 1 + accepted)
        last = row + len(logits) - 1 - len(draft.tokens) + verdict.accepted
        self._target.keep_hidden(sequence.slot, last, sequence.num_computed, sequence.tokens[-1])
        drafts = []
        if forced:
            kept = min(len(forced), accepted)
            drafts.append(DraftStats(GRAMMAR, len(forced), kept))
        if draft.tokens and (name := proposal.drafter) is not None:
            kept = max(0, accepted - len(forced))
            judged = draft.promised[: kept + (kept == verdict.accepted)]
            drafts.append(DraftStats(name, len(draft.tokens), kept, judged))
        sequence.count_step(drafts, missed=proposal.missed is not None)
        progress.drafts += drafts
        progress.decoded.append(emitted)

    def _take_chunk(self, progress: Progress, chunk: Chunk, logits: Floats, row: int) -> None:
        """A piece of a prompt is computed; `logits` [chunk.rows, V] follow its last tokens."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        self._computed(sequence, chunk.tokens)
        if sequence.reader is not None and chunk.rows:
            hidden = self._target.hidden_states(row, chunk.rows)
            sequence.reader.take(start, logits, hidden)
        if chunk.last and sequence.request.embed:
            if sequence.next_prompt():
                self._computed(sequence, 0)
        elif chunk.last:
            token = sequence.next_token(logits[-1:])
            row += chunk.rows - 1
            self._target.keep_hidden(sequence.slot, row, sequence.num_computed, token)
            sequence.append([token], 0, None, logits[-1:])
            progress.first_tokens += 1

    def _computed(self, sequence: Sequence, tokens: int) -> None:
        sequence.num_computed += tokens
        self._target.cache.commit(sequence.slot, sequence.tokens, sequence.num_computed)
