"""Collects the draft tokens of a step: from every request's drafter, as far as they pay.

A lookup costs little, so it comes first, and its promises decide how many tokens are verified. A
draft model is asked only for as many tokens as pay, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specops.engine.request_state import RequestState
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kv_cache import KvCache
from specops.speculation.controller import Controller, Proposal
from specops.speculation.drafters.base import (
    LEAST_REACH,
    NO_DRAFT,
    Draft,
    Drafter,
    DraftRequest,
)

# A pass takes longer by each forced token, and other requests wait for it.
_MOST_FORCED = 16
_CATCH_UP = 32  # largest backlog that a draft model computes together with its first draft token


@dataclass(slots=True, kw_only=True)
class SequenceProposal(Proposal):
    """One request's part in a step.

    Attributes:
        sequence: the request, past its prompt.
        forced: tokens that the grammar leaves no choice about; they come before the draft.
        draft: draft tokens to verify, maybe none.
        missed: name of the drafter that was asked and had nothing.
        declined: name of the drafter whose draft tokens did not seem to pay.
    """

    sequence: RequestState
    forced: tuple[int, ...] = ()
    draft: Draft = NO_DRAFT
    missed: str | None = None
    declined: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that follow the sequence's last token in the pass."""
        return self.forced + self.draft.tokens if self.forced else self.draft.tokens

    @property
    def num_logits(self) -> int:
        """Number of tokens in the pass that need logits: a forced token's choice needs none."""
        told = self.sequence.request.logprobs is not None
        return 1 + len(self.tokens if told else self.draft.tokens)

    def decline(self) -> None:
        """Verify no draft token."""
        if self.most:
            self.declined, self.missed = self.drafter, None
        self.draft = NO_DRAFT


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Seconds that it took to get a step's draft tokens.

    Attributes:
        total: all of it.
        model: the part that draft models took.
        asking: the part that looking up and weighing took for the requests that were asked because
            that seemed to pay; requests of a fixed length have no part in it.
    """

    total: float = 0.0
    model: float = 0.0
    asking: float = 0.0


class Proposer:
    """Asks drafters. Used by the engine's thread.

    Args:
        cache: the target's; draft tokens take its free blocks before they are asked for.
        drafters: by name.
        controller: chooses how many draft tokens each request gets; may be exchanged.
        clock: seconds.
        max_tokens: largest number of tokens in a pass.
    """

    def __init__(
        self,
        cache: KvCache,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        clock: Callable[[], float],
        *,
        max_tokens: int,
    ) -> None:
        self._cache = cache
        self._max_tokens = max_tokens
        self._drafters = drafters
        self.controller = controller
        self._clock = clock

    def propose(
        self, sequences: list[RequestState], prompt_tokens: int
    ) -> tuple[list[SequenceProposal], DraftTimes]:
        """Collect the draft tokens that a pass verifies.

        Args:
            sequences: the requests that decode in the pass.
            prompt_tokens: number of prompt tokens that will be in the pass, too.

        Returns:
            A proposal for each request whose drafter does not fail, and the seconds that it took.
        """
        start, asking = self._clock(), 0.0
        proposals = []
        for sequence in sequences:
            if sequence.finish:
                continue
            request = sequence.request
            proposal = SequenceProposal(
                sequence.speculation,
                sequence.num_computed,
                request.sampling.temperature > 0,
                not request.adaptive,
                sequence=sequence,
            )
            drafter = self._drafters.get(request.drafter)
            if drafter is not None and request.k_draft:
                begun = self._clock()
                try:
                    self._look_up(proposal, drafter, len(sequences), prompt_tokens)
                except Exception as error:
                    sequence.fail(error)
                    continue
                if proposal.asked:
                    asking += self._clock() - begun
            proposals.append(proposal)
        model = 0.0
        if any(proposal.most for proposal in proposals):
            begun, weighed = self._clock(), any(proposal.asked for proposal in proposals)
            model = self._cut(proposals, prompt_tokens)
            asking += (self._clock() - begun - model) * weighed
            proposals = [item for item in proposals if not item.sequence.finish]
        return proposals, DraftTimes(self._clock() - start, model, asking)

    def prefill_draft_model(
        self, sequences: list[RequestState], room: Callable[[int], int]
    ) -> float:
        """Let a draft model compute a piece of one sequence that it cannot propose for yet.

        It does not read ahead while its draft tokens do not pay. If it is asked later, it catches
        up then.

        Args:
            sequences: the requests that decode.
            room: how many tokens it may compute, by how many the target has computed.

        Returns:
            The seconds that it took.
        """
        start = self._clock()
        for sequence in sequences:
            drafter = self._drafters.get(sequence.request.drafter)
            try:
                if drafter is None or not drafter.runs_model or not self._lags(drafter, sequence):
                    continue
                if drafter.prefill(sequence.slot, sequence.tokens, room(sequence.num_computed)):
                    break
            except Exception as error:
                sequence.fail(error)
        return self._clock() - start

    def _look_up(
        self, proposal: SequenceProposal, drafter: Drafter, requests: int, prompt_tokens: int
    ) -> None:
        """Have draft tokens looked up, or find out how many a draft model could make.

        Args:
            proposal: without a draft yet.
            drafter: the request's.
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        sequence = proposal.sequence
        request, slot, tokens = sequence.request, sequence.slot, sequence.tokens
        if sequence.matcher is not None:
            share = self._max_tokens // requests
            most = min(_MOST_FORCED, sequence.remaining - 1, share - 1 - request.k_draft)
            proposal.forced = sequence.matcher.forced(self._room(sequence, max(0, most)))
            tokens = [*tokens, *proposal.forced]
        # The target adds a token of its own to the accepted ones: the last is never drafted.
        forced = len(proposal.forced)
        most = min(request.k_draft, sequence.remaining - 1 - forced)
        if most < 1:
            return
        least = LEAST_REACH
        if request.adaptive:
            if not self.controller.asking_pays(sequence.speculation):
                proposal.declined = drafter.name
                return
            least = self.controller.least(requests, prompt_tokens)
        most = self._room(sequence, forced + most) - forced
        if most < 1:
            return
        proposal.asked = request.adaptive
        found = drafter.look_up(slot, tokens, most, least)
        proposal.draft = draft = _allowed(proposal, found) if proposal.sequence.matcher else found
        proposal.drafter, proposal.most = draft.origin or drafter.name, len(draft.tokens)
        proposal.promised = draft.promised
        if proposal.most:
            return
        if not drafter.runs_model:
            proposal.missed = proposal.drafter
        elif self._lags(drafter, sequence):  # the model cannot propose yet
            proposal.missed = draft.origin
        else:
            proposal.drafter, proposal.most = drafter.name, most
            proposal.backlog = drafter.backlog(slot, len(tokens))

    def _room(self, sequence: RequestState, tokens: int) -> int:
        """Make room in the cache behind the sequence's next token; no sequence is preempted for it.

        So no draft is made that has no room: a drafter takes what it has drafted for said.

        Returns:
            The number of tokens that there is room for, at most `tokens`.
        """
        length = sequence.num_computed + 1  # the next token has its place
        if self._cache.reserve(sequence.slot, length + tokens):
            return tokens
        return min(tokens, -length % BLOCK_TOKENS)  # the rest of its block

    def _cut(self, proposals: list[SequenceProposal], prompt_tokens: int) -> float:
        """Leave the draft tokens that pay, and have draft models make those that pay.

        Returns:
            The seconds that the draft models took.
        """
        certain = sum(len(proposal.forced) for proposal in proposals)
        lengths = self.controller.choose(proposals, prompt_tokens + certain)
        asked: dict[str, list[tuple[SequenceProposal, int]]] = {}
        for proposal, length in zip(proposals, lengths, strict=True):
            if length < 1:
                proposal.decline()
            elif proposal.backlog:
                asked.setdefault(proposal.drafter, []).append((proposal, length))
            elif length < proposal.most:
                proposal.draft = proposal.draft.cut(length)
        if not asked:
            return 0.0
        start = self._clock()
        for name, members in asked.items():
            self._ask(self._drafters[name], members)
        return self._clock() - start

    def _ask(self, drafter: Drafter, asked: list[tuple[SequenceProposal, int]]) -> None:
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
            if not proposal.draft.tokens:
                proposal.missed = draft.origin or drafter.name

    def _lags(self, drafter: Drafter, sequence: RequestState) -> bool:
        """Whether a draft model should read more of a sequence before it proposes."""
        request = sequence.request
        if request.adaptive and not self.controller.model_pays(drafter.name):
            return False
        if min(request.k_draft, sequence.remaining - 1) < 1:
            return False
        return drafter.backlog(sequence.slot, len(sequence.tokens)) > _CATCH_UP


def _allowed(proposal: SequenceProposal, draft: Draft) -> Draft:
    """The draft up to where the sequence's grammar does not allow it."""
    matcher, forced = proposal.sequence.matcher, proposal.forced
    if matcher is None or not draft.tokens:
        return draft
    allowed = matcher.allows(forced + draft.tokens) - len(forced)
    # A drawn token has to be rejected by the rule, so that what replaces it is drawn from what the
    # target has more of. Leaving the token out would favour what the draft model draws.
    allowed += draft.probs is not None
    return draft if allowed >= len(draft.tokens) else draft.cut(allowed)


def _request(proposal: SequenceProposal, count: int) -> DraftRequest:
    sequence = proposal.sequence
    tokens = [*sequence.tokens, *proposal.forced] if proposal.forced else sequence.tokens
    return DraftRequest(sequence.slot, tokens, count, sequence.request.sampling, sequence.rng)
