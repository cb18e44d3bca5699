"""Turns a pass's logits into tokens: verifies drafts, appends what is accepted, and counts both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specops.engine.planner import Chunk, PlannedStep
from specops.engine.proposer import SequenceProposal
from specops.engine.request_state import RequestState
from specops.request import GRAMMAR, DraftStats
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import NO_DRAFT, Draft
from specops.speculation.verifier import Verdict, compare, verify


@dataclass(slots=True)
class Progress:
    """What the requests of a pass got.

    Attributes:
        decoded: number of tokens of each request that decoded.
        first_tokens: number of requests that got their first token.
        drafts: counts of each verified draft.
    """

    decoded: list[int] = field(default_factory=list)
    first_tokens: int = 0
    drafts: list[DraftStats] = field(default_factory=list)


class Postprocessor:
    """Turns logits into tokens. Used by the engine's thread.

    Args:
        target: the model that computed the logits.
        controller: learns from each verified draft; may be exchanged.
        clock: seconds.
    """

    def __init__(
        self, target: ModelRunner, controller: Controller, clock: Callable[[], float]
    ) -> None:
        self._target = target
        self._clock = clock
        self.controller = controller

    def process(self, step: PlannedStep, logits: Floats) -> Progress:
        """Give every sequence of a pass its tokens. A sequence that raises an error fails alone.

        Args:
            step: the pass that was computed.
            logits: [n, V], of the tokens that needed them, in the order of the spans.
        """
        progress, row = Progress(), 0
        likeliest: list[int] | None = None
        if not any(proposal.sampled for proposal in step.proposals):
            rows = sum(proposal.num_logits for proposal in step.proposals)
            likeliest = logits[:rows].argmax(axis=-1).tolist()
        for proposal in step.proposals:
            rows, start = proposal.num_logits, self._clock()
            try:
                self._take_decoded(progress, proposal, logits[row : row + rows], row, likeliest)
            except Exception as error:
                proposal.sequence.fail(error)
                progress.decoded.append(0)
            proposal.sequence.took_to_choose(self._clock() - start)
            row += rows
        for chunk in step.chunks:
            try:
                self._take_chunk(progress, chunk, logits[row : row + chunk.rows], row)
            except Exception as error:
                chunk.sequence.fail(error)
            row += chunk.rows
        return progress

    def _take_decoded(
        self,
        progress: Progress,
        proposal: SequenceProposal,
        logits: Floats,
        row: int,
        likeliest: Sequence[int] | None,
    ) -> None:
        """Verify a draft. Append its accepted tokens and the target's own token after them.

        Args:
            progress: is added to.
            proposal: the request's part in the pass.
            logits: [k + 1, V], after the sequence's last token, or the last forced one, and after
                each of the k draft tokens. Where the request wants probabilities, the logits of the
                forced tokens come before these.
            row: of the first of them among the pass's logits.
            likeliest: [n], the likeliest token of each of the pass's rows; None where a request
                draws its tokens.
        """
        sequence, draft, forced = proposal.sequence, proposal.draft, proposal.forced
        drafted, before = len(draft.tokens), len(logits) - 1 - len(draft.tokens)
        if likeliest is not None and not sequence.adjusts:
            verdict = compare(likeliest[row + before : row + len(logits)], draft.tokens)
        else:
            start = self._clock()
            wanted = logits[before:] if before else logits
            adjusted = sequence.adjusted(wanted, draft.tokens, forced)
            if sequence.adjusts:
                begun, start = start, self._clock()
                self.controller.adjusted(proposal.state, drafted + 1, start - begun)
            verdict = _verify(sequence, adjusted, draft, len(forced))
            if proposal.sampled:
                self.controller.drawn(verdict.accepted + 1, self._clock() - start)
        accepted = verdict.accepted
        if drafted:
            self.controller.verified(proposal, drafted, accepted)
        name = draft.origin or proposal.drafter
        tokens = [*forced, *draft.tokens[:accepted], verdict.next_token]
        emitted = sequence.append(tokens, len(tokens) - 1, name, logits, forced=len(forced))
        # Where the request ends inside of the accepted tokens, the rest was never output.
        stands = min(len(tokens) - 1, emitted)
        # The cache's entries of rejected tokens are overwritten by the next pass.
        self._computed(sequence, 1 + stands)
        last = row + before + accepted
        self._target.keep_hidden_state(
            sequence.slot, last, sequence.num_computed, sequence.tokens[-1]
        )
        drafts = []
        if forced:
            stood = min(len(forced), stands)
            drafts.append(DraftStats(GRAMMAR, len(forced), stood, chosen=False))
        if drafted:
            kept = max(0, stands - len(forced))
            judged = draft.promised[: kept + (kept == accepted)]
            drafts.append(DraftStats(name, drafted, kept, judged, chosen=not proposal.fixed))
        sequence.count_step(drafts, missed=proposal.missed is not None)
        progress.drafts += drafts
        progress.decoded.append(emitted)

    def _take_chunk(self, progress: Progress, chunk: Chunk, logits: Floats, row: int) -> None:
        """Take in a piece of a prompt; `logits` [chunk.rows, V] follow its last tokens."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        self._computed(sequence, chunk.tokens)
        if sequence.reader is not None and chunk.rows:
            hidden, begun = self._target.hidden_states(row, chunk.rows), self._clock()
            sequence.reader.take(start, logits, hidden)
            sequence.reader.took(chunk.rows, self._clock() - begun)
        if chunk.last and sequence.request.embed:
            if sequence.next_prompt():
                cache = self._target.cache
                cache.release(sequence.slot)
                cache.begin(sequence.slot, sequence.tokens, share=False)
        elif chunk.last:
            token = _verify(sequence, sequence.adjusted(logits[-1:], ())).next_token
            row += chunk.rows - 1
            self._target.keep_hidden_state(sequence.slot, row, sequence.num_computed, token)
            sequence.append([token], 0, None, logits[-1:])
            progress.first_tokens += 1

    def _computed(self, sequence: RequestState, tokens: int) -> None:
        sequence.num_computed += tokens
        self._target.cache.commit(sequence.slot, sequence.tokens, sequence.num_computed)


def _verify(
    sequence: RequestState, logits: Floats, draft: Draft = NO_DRAFT, forced: int = 0
) -> Verdict:
    """Verify a draft behind so many forced tokens; without a draft, choose the next token."""
    return verify(
        logits,
        draft.tokens,
        draft.probs,
        sampling=sequence.request.sampling,
        rng=sequence.rng,
        position=len(sequence.tokens) + forced,
    )
