"""What comes of a pass: drafts are verified, tokens appended, and both counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specops.engine.planner import Chunk, PlannedStep
from specops.engine.proposer import Proposal
from specops.engine.sequence import Sequence
from specops.request import DraftStats
from specops.runtime.kv_cache import KvCache
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
        cache: the target's.
        controller: is told what became of drafts.
        clock: seconds.
    """

    def __init__(self, cache: KvCache, controller: Controller, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self.controller = controller

    def take(self, step: PlannedStep, logits: Floats) -> Progress:
        """Give every sequence of a pass what it brought.

        Args:
            step: what was computed.
            logits: [n, V], of the tokens that wanted them, in the order of the spans.
        """
        progress, row = Progress(), 0
        for proposal in step.proposals:
            rows = 1 + len(proposal.draft.tokens)
            self._take_decoded(progress, proposal, logits[row : row + rows])
            row += rows
        for chunk in step.chunks:
            self._take_chunk(progress, chunk, logits[row : row + chunk.last])
            row += chunk.last
        return progress

    def _take_decoded(self, progress: Progress, proposal: Proposal, logits: Floats) -> None:
        """Verify a draft and append what stands, with the target's own token after it.

        `logits` [k + 1, V] follow the sequence's last token and each of its draft tokens.
        """
        sequence, draft = proposal.sequence, proposal.draft
        start = self._clock()
        verdict = verify(
            logits,
            draft.tokens,
            draft.probs,
            sampling=sequence.request.sampling,
            rng=sequence.rng,
            position=len(sequence.tokens),
        )
        seconds = self._clock() - start
        self.controller.verified(proposal.candidate, len(draft.tokens), verdict.accepted, seconds)
        tokens = [*draft.tokens[: verdict.accepted], verdict.next_token]
        emitted = sequence.append(tokens, verdict.accepted, proposal.drafter, logits)
        # A stop inside of the accepted tokens: what came after it never was output.
        accepted = min(verdict.accepted, emitted)
        # What was computed of rejected tokens is overwritten by what comes instead.
        self._computed(sequence, 1 + accepted)
        sequence.count_step(asked=proposal.asked, draft_tokens=len(draft.tokens), accepted=accepted)
        if draft.tokens and (name := proposal.drafter) is not None:
            progress.drafts.append(DraftStats(name, len(draft.tokens), accepted))
        progress.decoded.append(emitted)

    def _take_chunk(self, progress: Progress, chunk: Chunk, logits: Floats) -> None:
        """A piece of a prompt is computed; `logits` [1, V] follow its last token, [0, V] before."""
        sequence = chunk.sequence
        self._computed(sequence, chunk.tokens)
        if chunk.last:
            sequence.append([sequence.next_token(logits[0])], 0, None, logits)
            progress.first_tokens += 1

    def _computed(self, sequence: Sequence, tokens: int) -> None:
        sequence.num_computed += tokens
        self._cache.commit(sequence.slot, sequence.tokens, sequence.num_computed)
