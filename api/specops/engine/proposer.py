"""Collects the draft tokens of a step: from every request's drafter, as far as they pay.

Looking tokens up costs little, so that is done first, and how good they look decides how many are
verified; a draft model is asked only for as many as pay, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from specops.engine.sequence import Sequence
from specops.speculation.controller import Candidate, Controller, kind_of_match
from specops.speculation.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest

_CATCH_UP = 32  # tokens that a draft model takes in with its first draft token; more come before


@dataclass(slots=True)
class Proposal:
    """A request's part in a step.

    Attributes:
        sequence: past its prompt.
        candidate: what the controller knows of it.
        draft: tokens to verify, maybe none.
        asked: a drafter was asked; a draft model that still takes in the prompt is not.
        declined: whose draft tokens, had or to be had, did not seem to pay.
    """

    sequence: Sequence
    candidate: Candidate
    draft: Draft = NO_DRAFT
    asked: bool = False
    declined: str | None = None

    @property
    def drafter(self) -> str | None:
        """The drafter that made the draft, or that was asked for one; None where none was."""
        return (self.draft.origin or self.sequence.request.drafter) if self.asked else None

    @property
    def missed(self) -> str | None:
        """The drafter that was asked and had nothing."""
        return None if self.draft.tokens else self.drafter

    def decline(self) -> None:
        """Verify nothing, though there was something to be had."""
        # A lookup in vain has an origin, too, but then it is a model's tokens that do not pay.
        origin = None if self.candidate.backlog else self.draft.origin
        self.declined = origin or self.candidate.drafter
        self.asked, self.draft = False, NO_DRAFT


class Proposer:
    """Asks drafters. Used by the engine's thread.

    Args:
        drafters: by name.
        controller: chooses how many draft tokens each request gets; may be exchanged.
        clock: seconds.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        clock: Callable[[], float],
    ) -> None:
        self._drafters = drafters
        self.controller = controller
        self._clock = clock

    def propose(
        self, sequences: list[Sequence], prompt_tokens: int
    ) -> tuple[list[Proposal], float]:
        """Collect the draft tokens that a pass verifies.

        Args:
            sequences: that decode in it.
            prompt_tokens: that will be in it, too.

        Returns:
            A proposal for each, and the seconds that drafting took.
        """
        start = self._clock()
        proposals = [self._look_up(sequence) for sequence in sequences]
        if not any(proposal.candidate.most for proposal in proposals):
            return proposals, self._clock() - start
        lengths = self.controller.choose(
            [proposal.candidate for proposal in proposals], prompt_tokens
        )
        asking: dict[str, list[tuple[Proposal, int]]] = {}
        for proposal, length in zip(proposals, lengths, strict=True):
            candidate, draft = proposal.candidate, proposal.draft
            if candidate.most and not length:
                proposal.decline()
            elif length and candidate.backlog:
                asking.setdefault(proposal.sequence.request.drafter, []).append((proposal, length))
            elif length < len(draft.tokens):
                proposal.draft = replace(draft, tokens=draft.tokens[:length])
        for name, asked in asking.items():
            drafts = self._drafters[name].propose(
                [_request(proposal.sequence, length) for proposal, length in asked]
            )
            for (proposal, _), draft in zip(asked, drafts, strict=True):
                proposal.draft = draft
        return proposals, self._clock() - start

    def behind(self, sequences: list[Sequence]) -> Iterator[tuple[Drafter, Sequence]]:
        """Draft models that have to take in more of a sequence before they can propose.

        Not where its draft tokens have not paid of late: should they be asked for, it catches up.
        """
        for sequence in sequences:
            drafter = self._drafters.get(sequence.request.drafter)
            if drafter is not None and drafter.runs_model and self._lags(drafter, sequence):
                yield drafter, sequence

    def _lags(self, drafter: Drafter, sequence: Sequence) -> bool:
        request = sequence.request
        if min(request.k_draft, sequence.remaining - 1) < 1:
            return False
        if request.adaptive and not self.controller.pays(drafter.name):
            return False
        return drafter.backlog(sequence.slot, len(sequence.tokens)) > _CATCH_UP

    def _look_up(self, sequence: Sequence) -> Proposal:
        """Ask the request's drafter for what it has at hand."""
        request = sequence.request
        sampled = request.sampling.temperature > 0
        candidate = Candidate(sequence.speculation, sequence.num_computed, sampled=sampled)
        proposal = Proposal(sequence, candidate)
        drafter = self._drafters.get(request.drafter)
        # The target adds a token of its own to the accepted ones: the last is never drafted.
        most = min(request.k_draft, sequence.remaining - 1)
        if drafter is None or most < 1:
            return proposal
        candidate.drafter, candidate.fixed = drafter.name, not request.adaptive
        proposal.asked = True
        proposal.draft = draft = drafter.look_up(sequence.slot, sequence.tokens, most)
        candidate.most = len(draft.tokens)
        candidate.source = draft.origin
        candidate.kind = kind_of_match(draft.match_length)
        if candidate.most or not drafter.runs_model:
            return proposal
        if not self._lags(drafter, sequence):
            candidate.most, candidate.source = most, None
            candidate.backlog = drafter.backlog(sequence.slot, len(sequence.tokens))
        elif draft.origin is None:  # the model cannot propose yet, and there was no lookup
            proposal.asked, candidate.drafter = False, None
        return proposal


def _request(sequence: Sequence, count: int) -> DraftRequest:
    return DraftRequest(
        sequence.slot, sequence.tokens, count, sequence.request.sampling, sequence.rng
    )
