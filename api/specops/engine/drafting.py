"""Collects the draft tokens that a pass verifies.

Drafters are asked in turn, the cheapest first and each for all requests at once. Of their drafts a
request takes the one that promises more tokens, and the probabilities of all requests' drafts
decide how much of each is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from specops.engine.pass_budget import PassBudget
from specops.engine.request_state import RequestState
from specops.engine.scheduled import Scheduled
from specops.engine.slots import SlotManager
from specops.request import Step
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.manager import KvCache
from specops.speculation.controller import Attempt, Controller, Proposal
from specops.speculation.drafters.base import MIN_REACH, NO_DRAFT, DraftContext, Drafter, better
from specops.speculation.safeguard import Safeguard

# A pass takes longer by each forced token, and other requests wait for it.
_MAX_FORCED = 16
_NEVER = float("inf")


_Asking = tuple[Scheduled, Proposal]


class Drafting:
    """Asks the requests' drafters. Used by the engine's thread.

    Args:
        cache: the target's.
        slots: the requests that hold a slot.
        drafters: the drafters behind each name in a request, in the order in which they are asked.
        controller: chooses drafters and draft lengths; may be replaced.
        budget: of the passes.
        safeguard: calls the drafters.
        clock: seconds.
    """

    def __init__(
        self,
        cache: KvCache,
        slots: SlotManager,
        drafters: Mapping[str, Sequence[Drafter]],
        controller: Controller,
        *,
        budget: PassBudget,
        safeguard: Safeguard,
        clock: Callable[[], float],
    ) -> None:
        self.controller = controller
        self._cache, self._slots, self._budget = cache, slots, budget
        self._drafters = dict.fromkeys(one for chain in drafters.values() for one in chain)
        self._call, self._clock = safeguard.call, clock
        self._learning = 0.0  # seconds that the controller took to learn from the latest asking
        self._proposing = 0.0  # seconds that drafters took in this step
        # The requests that decoded when all of them rested, until when, and their drafters.
        self._resting, self._rest_ends = list[RequestState](), 0.0
        self._declined: Sequence[str] = ()

    def propose(
        self, step: Step, decoding: list[RequestState], prompt_tokens: int
    ) -> list[Scheduled]:
        """Collect the draft tokens that a pass verifies.

        Args:
            step: gets the seconds that asking drafters took.
            decoding: the requests that decode in the pass.
            prompt_tokens: number of prompt tokens that will be in the pass, too.

        Returns:
            What to compute of each request.
        """
        scheduled = [Scheduled.decoding(state) for state in decoding]
        self._follow_load(len(decoding))
        now = self.controller.now
        if now < self._rest_ends and decoding == self._resting:
            step.declined_drafters = self._declined
            return scheduled
        drafting = [item for item in scheduled if item.state.drafters]
        if awake := self._awake(drafting, prompt_tokens):
            self._draft(step, scheduled, awake, prompt_tokens)
        declined = [item for item in drafting if not awake or item.state.speculation.due > now]
        step.declined_drafters = [item.state.request.drafter for item in declined]
        if awake:
            return [item for item in scheduled if not item.state.finish]
        self._rest_ends = min([item.state.speculation.due for item in drafting], default=_NEVER)
        self._resting, self._declined = decoding, step.declined_drafters
        return scheduled

    def _awake(self, drafting: list[Scheduled], prompt_tokens: int) -> list[Scheduled]:
        """Those of the requests with drafters that do not rest; none in a step that is compared."""
        now = self.controller.now
        awake = [item for item in drafting if item.state.may_draft(now)]
        if self.controller.compares and not prompt_tokens:
            # Fixed lengths are always verified, and forced tokens make the pass wider.
            requests = [item.state.request for item in awake]
            if all(one.adaptive and one.sampling.grammar is None for one in requests):
                return []
        return [item for item in awake if not self._rests(item.state)]

    def _rests(self, state: RequestState) -> bool:
        """Whether no drafter may be asked for a request, and no grammar forces its tokens."""
        names = [drafter.name for drafter in state.chain]
        rests = self.controller.rests(state.speculation, names)
        return rests and state.request.sampling.grammar is None

    def _draft(
        self, step: Step, scheduled: list[Scheduled], awake: list[Scheduled], prompt_tokens: int
    ) -> None:
        """Ask for requests that do not rest, and put what pays into the pass; see `propose`."""
        count = len(scheduled)
        if not prompt_tokens:
            step.draft_seconds += self._read_ahead([item.state for item in awake], count)
        asking = [
            (item, proposal)
            for item in awake
            if (proposal := self._plan(item, count, prompt_tokens)) is not None
        ]
        begun = self._clock()
        asks = self._ask_all(asking, count, prompt_tokens) if asking else 0
        if any(proposal.draft.tokens for _, proposal in asking) or any(
            item.forced for item in awake
        ):
            self._fill(scheduled, prompt_tokens)
        if asks:
            seconds = self._clock() - begun
            step.draft_seconds += seconds
            each = (seconds - self._proposing + self._learning) / asks
            for _, proposal in asking:  # the time for asking itself, and for choosing
                proposal.asking_seconds = each

    def learn(self, step: Step, proposals: Sequence[Proposal], work: float) -> float:
        """Learn from a step, and tell it who had no draft tokens; see `Controller.stepped`.

        Returns:
            The seconds that count as a part of what asking takes.
        """
        begun = self._clock()
        if self.controller.stepped(proposals, step.decoding, work, step.prompt_tokens):
            self._wake()
        if not proposals:
            return 0.0
        asked = 0.0
        if any(item.attempts for item in proposals):
            asked = self._learning = self._clock() - begun
        step.missed_drafters = [item.missed for item in proposals if item.missed]
        declined = [item.declined for item in proposals if item.declined]
        step.declined_drafters = [*step.declined_drafters, *declined]
        return asked

    def _follow_load(self, requests: int) -> None:
        """Let all requests ask again if the load has another level."""
        if requests and self.controller.load(requests):
            self._wake()

    def _wake(self) -> None:
        for state in self._slots:
            state.speculation.due = self._rest_ends = 0.0

    def count_reading(self) -> float:
        """Seconds that drafters have read states since the last step; the controller learns it."""
        whole = 0.0
        for drafter in self._drafters:
            if seconds := drafter.take_reading():
                whole += seconds
                self._note_reading(drafter, seconds, self._slots)
        return whole

    def _read_ahead(self, states: Sequence[RequestState], decoding: int) -> float:
        """Let a drafter read a piece of one text, if it lags too far to be asked for drafts.

        Returns the seconds that this took.
        """
        for state in states:
            if min(state.request.k_draft, state.remaining - 1) < 1:
                continue
            for drafter in state.chain:
                if (
                    drafter.lags
                    and self.controller.asks(state.speculation, drafter.name)
                    and not self._call(drafter, True, drafter.is_synced, state.slot, state.tokens)
                    and self.controller.reads(drafter.name, state.speculation)
                ):
                    room = self._budget.draft_model_tokens(decoding, state.num_computed)
                    begun, work = self._clock(), (state.slot, state.tokens, room)
                    if self._call(drafter, 0, drafter.read, *work):
                        seconds = self._clock() - begun
                        self._note_reading(drafter, seconds, [state])
                        return seconds
        return 0.0

    def read_seconds(self, state: RequestState) -> float:
        """Seconds that the request's drafters compute for each of its prompt's tokens."""
        return sum([drafter.read_seconds(state.slot) for drafter in state.chain])

    def _note_reading(
        self, drafter: Drafter, seconds: float, states: Sequence[RequestState] | SlotManager
    ) -> None:
        if any(state.request.adaptive for state in states):
            self.controller.read(drafter.name, seconds)

    def _plan(self, item: Scheduled, requests: int, prompt_tokens: int) -> Proposal | None:
        """Put a request's forced tokens into the pass, and determine how long its draft may be.

        Returns:
            None where it gets no draft.
        """
        state, request, text = item.state, item.state.request, item.state.tokens
        own, rows = state.speculation, self._budget.most_rows // requests - 1
        if request.sampling.grammar is not None:
            # Forced tokens leave the half of a pass to prompts that wait.
            room = self._budget.most_tokens
            room -= min(prompt_tokens, room // 2)
            most = min(_MAX_FORCED, state.remaining - 1, room // requests - 1 - request.k_draft)
            if request.logprobs is not None:
                most = min(most, rows)
            item.forced = state.guarded(self._forced, state, max(0, most)) or ()
            text = [*text, *item.forced]
        # The target adds one token to the accepted ones: the last is never drafted.
        forced = len(item.forced)
        rows -= forced if request.logprobs is not None else 0
        most = min(request.k_draft, state.remaining - 1 - forced, rows)
        if most < 1 or state.finish:
            return None
        if own.due > self.controller.now:  # its grammar alone kept it awake
            return None
        most = self._reserve(state, forced + most) - forced
        if most < 1:
            return None
        item.proposal = Proposal(own, item.start, text, most)
        return item.proposal

    def _forced(self, state: RequestState, most: int) -> tuple[int, ...]:
        matcher = state.matcher
        return () if matcher is None else matcher.forced(self._reserve(state, most))

    def _reserve(self, state: RequestState, tokens: int) -> int:
        """Take blocks of the cache for tokens after the next one; preempts no request for them.

        So no draft is made that has no room: a drafter takes what it was asked for as the text.

        Returns:
            The number of tokens that there is room for, at most `tokens`.
        """
        length = state.num_computed + 1  # the next token has its place
        if self._cache.reserve(state.slot, length + tokens):
            return tokens
        return min(tokens, -length % BLOCK_TOKENS)  # the rest of its block

    def _ask_all(self, asking: Sequence[_Asking], requests: int, prompt_tokens: int) -> int:
        """Ask all drafters; returns how often one was asked for a request."""
        reaches, asks = self.controller.reaches(requests, prompt_tokens), 0
        token_seconds = self.controller.token_seconds(requests)
        self._proposing = 0.0
        chains = {item.state.chain for item, _ in asking}
        # The longest chain has most of them, in their order.
        first = max(chains, key=len)
        for drafter in dict.fromkeys([*first, *chain.from_iterable(chains - {first})]):
            asks += self._ask(drafter, asking, token_seconds, reaches)
        for item, proposal in asking:
            if item.state.request.sampling.grammar is not None and proposal.draft.tokens:
                item.state.guarded(_keep_allowed, item, proposal)
        return asks

    def _ask(
        self,
        drafter: Drafter,
        asking: Sequence[_Asking],
        token_seconds: float,
        reaches: Sequence[float],
    ) -> int:
        """Ask one drafter for all requests for which that seems to pay.

        Each request keeps the better one of what it has. Returns the number of requests.
        """
        asked, contexts = list[tuple[Proposal, Drafter]](), list[DraftContext]()
        for item, proposal in asking:
            state, own, draft = item.state, proposal.speculation, proposal.draft
            if (
                drafter in state.chain
                and self.controller.asks(own, drafter.name, draft, token_seconds)
                and (
                    not drafter.lags
                    or self._call(drafter, False, drafter.is_synced, item.slot, proposal.text)
                )
            ):
                asked.append((proposal, state.chain[0]))
                contexts.append(
                    DraftContext(
                        item.slot, proposal.text, proposal.most, state.rng, state.request.sampling,
                        state.noise, own.adaptive, reaches[0] if own.adaptive else MIN_REACH,
                        reaches, token_seconds, draft,
                    )
                )  # fmt: skip
        if not asked:
            return 0
        begun = self._clock()
        drafts = self._call(drafter, [NO_DRAFT] * len(asked), drafter.propose, contexts)
        self._proposing += (seconds := self._clock() - begun)
        for (proposal, first), found in zip(asked, drafts, strict=True):
            if drafter is not first:  # its promises decide whether it is asked after others
                self.controller.asked(drafter.name, found)
            if proposal.speculation.adaptive:
                attempt = Attempt(drafter.name, proposal.draft, seconds / len(asked))
                proposal.attempts = [*proposal.attempts, attempt]
            if found.tokens:
                draft = found if len(found.tokens) <= proposal.most else found.cut(proposal.most)
                draft.drafter = drafter.name
                proposal.draft = better(proposal.draft, draft) if proposal.draft.tokens else draft
            proposal.missed = proposal.missed or drafter.name
        return len(asked)

    def _fill(self, scheduled: Sequence[Scheduled], prompt_tokens: int) -> None:
        """Put the draft tokens that pay into the pass, and those that are forced."""
        proposals = [
            item.proposal or Proposal(item.state.speculation, item.start) for item in scheduled
        ]
        certain = sum([len(item.forced) for item in scheduled])
        lengths = self.controller.choose(proposals, prompt_tokens + certain)
        for item, proposal, length in zip(scheduled, proposals, lengths, strict=True):
            item.proposal, draft = proposal, proposal.draft
            if draft.tokens:
                proposal.missed = None
                proposal.declined = None if length else draft.drafter
                if length < len(draft.tokens):
                    draft = proposal.draft = draft.cut(length) if length else NO_DRAFT
            if item.forced or draft.tokens:
                item.tokens = [*item.tokens, *item.forced, *draft.tokens]
                proposal.width = len(item.tokens)
                # A forced token's choice needs no logits, but its probability does.
                everything = item.state.request.logprobs is not None
                item.num_logits += len(draft.tokens) + everything * len(item.forced)


def _keep_allowed(item: Scheduled, proposal: Proposal) -> None:
    """Cut a draft to what the request's grammar allows."""
    matcher, draft = item.state.matcher, proposal.draft
    if matcher is None or not draft.tokens:
        return
    allowed = matcher.allows(item.forced + draft.tokens) - len(item.forced)
    # A drawn token has to be rejected by the rule, so that what replaces it is drawn from what the
    # target has more of. Leaving the token out would favour what the draft model draws.
    allowed += draft.probs is not None
    if allowed < len(draft.tokens):
        proposal.draft = draft.cut(allowed)
