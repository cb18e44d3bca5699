"""Collects the draft tokens of a step: from every request's drafter, as far as they pay.

Looking tokens up costs little, so that is done first, and how good they look decides how many are
verified; a draft model is asked only for as many as pay, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specops.engine.sequence import Sequence
from specops.speculation.controller import Candidate, Controller
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, Drafter, DraftRequest

# Wider passes take longer by as many tokens as they bring, and other requests wait for them.
_MOST_FORCED = 16
# How far promises may be below what comes of them: 0.12 at most in a tenth (demo pair's texts).
_DOUBT = 0.1
_CATCH_UP = 32  # tokens that a draft model takes in with its first draft token; more come before


@dataclass(slots=True)
class Proposal:
    """A request's part in a step.

    Attributes:
        sequence: past its prompt.
        candidate: what the controller knows of it.
        forced: tokens that the grammar leaves no choice about; they come before the draft.
        draft: tokens to verify, maybe none.
        asked: a drafter was asked; a draft model that still takes in the prompt is not.
        declined: whose draft tokens, had or to be had, did not seem to pay.
    """

    sequence: Sequence
    candidate: Candidate
    forced: tuple[int, ...] = ()
    draft: Draft = NO_DRAFT
    asked: bool = False
    declined: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that follow the sequence's last token in the pass."""
        return self.forced + self.draft.tokens

    @property
    def num_logits(self) -> int:
        """Tokens of the pass whose logits are wanted: nothing is chosen before a forced token."""
        told = self.sequence.request.logprobs is not None
        return 1 + len(self.tokens if told else self.draft.tokens)

    @property
    def drafter(self) -> str | None:
        """The drafter that made the draft, or that was asked for one; None where none was."""
        return (self.draft.origin or self.sequence.request.drafter) if self.asked else None

    @property
    def missed(self) -> str | None:
        """The drafter that was asked and had nothing."""
        return None if self.draft.tokens else self.drafter

    def decline(self) -> None:
        """Verify nothing of the draft, though there was something to be had."""
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
        max_tokens: most tokens of a pass.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        clock: Callable[[], float],
        *,
        max_tokens: int,
    ) -> None:
        self._max_tokens = max_tokens
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
            A proposal for each whose drafter does not fail, and the seconds that drafting took.
        """
        start = self._clock()
        share, least = self._max_tokens // max(1, len(sequences)), LEAST_REACH
        if any(sequence.request.k_draft for sequence in sequences):
            sampled = (sequence.request.sampling.temperature > 0 for sequence in sequences)
            line = self.controller.line(len(sequences), sampled, prompt_tokens)
            least = max(least, line - _DOUBT)
        found = (self._look_up(sequence, share, least) for sequence in sequences)
        proposals = [item for item in found if item is not None]
        if not any(proposal.candidate.most for proposal in proposals):
            return proposals, self._clock() - start
        certain = sum(len(proposal.forced) for proposal in proposals)
        lengths = self.controller.choose(
            [proposal.candidate for proposal in proposals], prompt_tokens + certain
        )
        asking: dict[str, list[tuple[Proposal, int]]] = {}
        for proposal, length in zip(proposals, lengths, strict=True):
            candidate, draft = proposal.candidate, proposal.draft
            if candidate.most and not length:
                proposal.decline()
            elif length and candidate.backlog:
                asking.setdefault(proposal.sequence.request.drafter, []).append((proposal, length))
            elif length < len(draft.tokens):
                proposal.draft = draft.cut(length)
        for name, asked in asking.items():
            self._ask(self._drafters[name], asked)
        return [item for item in proposals if not item.sequence.finish], self._clock() - start

    def _ask(self, drafter: Drafter, asked: list[tuple[Proposal, int]]) -> None:
        """Have draft tokens made for several requests: again for each alone where that fails."""
        try:
            requests = [_request(proposal, length) for proposal, length in asked]
            drafts = list(zip(asked, drafter.propose(requests), strict=True))
        except Exception as error:
            if len(asked) == 1:
                asked[0][0].sequence.fail(error)
                return
            for one in asked:
                self._ask(drafter, [one])
            return
        for (proposal, _), draft in drafts:
            proposal.draft = _allowed(proposal, draft)

    def let_one_read(self, sequences: list[Sequence], room: Callable[[int], int]) -> float:
        """Let a draft model take in a piece of one sequence that it cannot propose for yet.

        Not where its draft tokens have not paid of late: should they be asked for, it catches up.

        Args:
            sequences: that decode.
            room: how many tokens it may take in, by how many the target has computed.

        Returns:
            The seconds that it took.
        """
        start = self._clock()
        for sequence in sequences:
            drafter = self._drafters.get(sequence.request.drafter)
            try:
                if drafter is None or not drafter.runs_model or not self._lags(drafter, sequence):
                    continue
                if drafter.take_in(sequence.slot, sequence.tokens, room(sequence.num_computed)):
                    break
            except Exception as error:
                sequence.fail(error)
        return self._clock() - start

    def _lags(self, drafter: Drafter, sequence: Sequence) -> bool:
        request = sequence.request
        if min(request.k_draft, sequence.remaining - 1) < 1:
            return False
        if request.adaptive and not self.controller.pays(drafter.name):
            return False
        return drafter.backlog(sequence.slot, len(sequence.tokens)) > _CATCH_UP

    def _look_up(self, sequence: Sequence, share: int, least: float) -> Proposal | None:
        """Ask grammar and drafter for what they have at hand; None where the request has failed.

        Args:
            sequence: that decodes.
            share: its part of the tokens of a pass.
            least: probability of a draft token that may pay.
        """
        if sequence.finish:
            return None
        sampled = sequence.request.sampling.temperature > 0
        candidate = Candidate(sequence.speculation, sequence.num_computed, sampled=sampled)
        proposal = Proposal(sequence, candidate)
        drafter, k_draft = self._drafters.get(sequence.request.drafter), sequence.request.k_draft
        if drafter is None or not k_draft:
            return proposal
        try:
            if sequence.matcher is not None:
                most = min(_MOST_FORCED, sequence.remaining - 1, share - 1 - k_draft)
                proposal.forced = sequence.matcher.forced(most)
            # The target adds a token of its own to the accepted ones: the last is never drafted.
            most = min(k_draft, sequence.remaining - 1 - len(proposal.forced))
            if most > 0:
                candidate.drafter, candidate.fixed = drafter.name, not sequence.request.adaptive
                judged = not candidate.fixed and not drafter.runs_model
                if judged and not self.controller.look_ups.due(sequence.speculation):
                    proposal.declined = drafter.name
                else:
                    candidate.looked_up = judged
                    self._fill_in(proposal, drafter, most, least)
        except Exception as error:
            sequence.fail(error)
            return None
        return proposal

    def _fill_in(self, proposal: Proposal, drafter: Drafter, most: int, least: float) -> None:
        """Have up to `most` draft tokens looked up, or say how many a draft model could make."""
        sequence, candidate = proposal.sequence, proposal.candidate
        proposal.asked = True
        least = LEAST_REACH if candidate.fixed else least
        found = drafter.look_up(sequence.slot, _certain(proposal), most, least)
        proposal.draft = draft = _allowed(proposal, found)
        candidate.most = len(draft.tokens)
        candidate.source = draft.origin
        candidate.promised = draft.promised
        if candidate.most or not drafter.runs_model:
            return
        if not self._lags(drafter, sequence):
            candidate.most, candidate.source = most, None
            candidate.backlog = drafter.backlog(sequence.slot, len(_certain(proposal)))
        elif draft.origin is None:  # the model cannot propose yet, and there was no lookup
            proposal.asked, candidate.drafter = False, None


def _certain(proposal: Proposal) -> list[int]:
    """The sequence with what its grammar adds to it."""
    tokens = proposal.sequence.tokens
    return [*tokens, *proposal.forced] if proposal.forced else tokens


def _allowed(proposal: Proposal, draft: Draft) -> Draft:
    """The draft up to where the sequence's grammar does not allow it."""
    matcher, forced = proposal.sequence.matcher, proposal.forced
    if matcher is None or not draft.tokens:
        return draft
    allowed = matcher.allows(forced + draft.tokens) - len(forced)
    # A token that was drawn has to be rejected, so that what replaces it is drawn from what the
    # target has more of: to leave it out would favour what the draft model draws.
    allowed += draft.probs is not None
    return draft if allowed >= len(draft.tokens) else draft.cut(allowed)


def _request(proposal: Proposal, count: int) -> DraftRequest:
    sequence = proposal.sequence
    return DraftRequest(
        sequence.slot, _certain(proposal), count, sequence.request.sampling, sequence.rng
    )
