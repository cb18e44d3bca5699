"""Collects the draft tokens that a pass verifies.

Lookups and draft heads are asked first, the cheapest first and each for all requests at once; of
their drafts a request takes the one that promises more tokens, and its probabilities decide how
many are verified. A draft model is asked only for as many tokens as pay, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specops.engine.pass_budget import PassBudget
from specops.engine.request_state import RequestState
from specops.engine.scheduled import Scheduled
from specops.engine.slots import SlotManager
from specops.request import Draft
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.manager import KvCache
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import (
    LEAST_REACH,
    NO_DRAFT,
    Asked,
    Chain,
    DraftModel,
    LookupDrafter,
    better,
)

# A pass takes longer by each forced token, and other requests wait for it.
_MOST_FORCED = 16
_CATCH_UP = 32  # most tokens that a draft model computes together with its first draft token


class Drafting:
    """Asks the requests' drafters. Used by the engine's thread.

    Args:
        cache: the target's.
        slots: the requests that hold a slot.
        drafters: the drafters behind each name in a request.
        controller: chooses drafters and draft lengths; may be replaced.
        budget: of the passes.
        clock: seconds.
    """

    def __init__(
        self,
        cache: KvCache,
        slots: SlotManager,
        drafters: Mapping[str, Chain],
        controller: Controller,
        budget: PassBudget,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.controller = controller
        self._cache, self._slots = cache, slots
        lookups = [lookup for chain in drafters.values() for lookup in chain.lookups]
        self._lookups = dict.fromkeys(lookups)  # each once
        self._budget = budget
        self._clock = clock

    def propose(self, decoding: list[RequestState], prompt_tokens: int) -> list[Scheduled]:
        """Collect the draft tokens that a pass verifies.

        Args:
            decoding: the requests that decode in the pass.
            prompt_tokens: number of prompt tokens that will be in the pass, too.

        Returns:
            What to compute of each request; those whose drafters failed are left out.
        """
        scheduled, speculating = [], []
        for state in decoding:
            if state.finish:
                continue
            item = Scheduled.of(state, tokens=[state.tokens[-1]], num_logits=1)
            if state.chain.drafters:
                try:
                    self._make_room(item, len(decoding), prompt_tokens)
                except Exception as error:
                    state.fail(error)
                    continue
                speculating.append(item)
            scheduled.append(item)
        if speculating:
            self._look_up(speculating, len(decoding), prompt_tokens)
        if any(item.max_draft for item in speculating):
            self._choose_lengths(scheduled, prompt_tokens)
            scheduled = [item for item in scheduled if not item.state.finish]
        for item in speculating:
            if item.forced or item.draft.tokens:
                item.tokens = [*item.tokens, *item.forced, *item.draft.tokens]
                # A forced token's choice needs no logits, but its probability does.
                everything = item.state.request.logprobs is not None
                item.num_logits += len(item.draft.tokens) + everything * len(item.forced)
        return scheduled

    def count_reading(self) -> float:
        """Seconds that lookups have read texts since the last pass; the controller learns of it."""
        whole = 0.0
        for lookup in self._lookups:
            if seconds := lookup.take_reading():
                whole += seconds
                if any(state.request.adaptive for state in self._slots):
                    self.controller.read(lookup.name, seconds)
        return whole

    def prefill_draft_model(self, decoding: list[RequestState]) -> None:
        """Let a draft model compute a piece of one text that it cannot draft for yet.

        It does not read ahead while its draft tokens do not pay; it catches up once it is asked.
        """
        for state in decoding:
            if (model := state.chain.model) is None:
                continue
            try:
                if not self._lags(model, state):
                    continue
                room = self._budget.draft_model_tokens(len(decoding), state.num_computed)
                begun = self._clock()
                if model.prefill(state.slot, state.tokens, room):
                    if state.request.adaptive:
                        self.controller.read(model.name, self._clock() - begun)
                    return
            except Exception as error:
                state.fail(error)

    def _make_room(self, item: Scheduled, requests: int, prompt_tokens: int) -> None:
        """Put a request's forced tokens into the pass, and determine how long its draft may be.

        Args:
            item: gets both.
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        state, request = item.state, item.state.request
        rows = self._budget.most_rows // requests - 1
        if state.matcher is not None:
            # Forced tokens leave the half of a pass to prompts that wait.
            room = self._budget.most_tokens
            room -= min(prompt_tokens, room // 2)
            most = min(_MOST_FORCED, state.remaining - 1, room // requests - 1 - request.k_draft)
            if request.logprobs is not None:
                most = min(most, rows)
            item.forced = state.matcher.forced(self._reserve(state, max(0, most)))
            item.text = [*state.tokens, *item.forced]
        # The target adds a token of its own to the accepted ones: the last is never drafted.
        forced = len(item.forced)
        rows -= forced if request.logprobs is not None else 0
        most = min(request.k_draft, state.remaining - 1 - forced, rows)
        if most < 1:
            return
        if any(self.controller.asks(item, drafter.name) for drafter in state.chain.drafters):
            item.max_draft = max(0, self._reserve(state, forced + most) - forced)
        else:
            item.declined = request.drafter

    def _look_up(self, items: list[Scheduled], requests: int, prompt_tokens: int) -> None:
        """Look drafts up, or determine how many tokens a draft model may make.

        Args:
            items: each with the length that its draft may have.
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        asking = [item for item in items if item.max_draft]
        least = self.controller.min_reach(requests, prompt_tokens)
        for item in asking:
            item.min_reach = least if item.adaptive else LEAST_REACH
        # The longest chain has them all, in their order.
        chains = [item.state.chain for item in asking]
        chains.sort(key=lambda chain: -len(chain.lookups))
        for lookup in dict.fromkeys([one for chain in chains for one in chain.lookups]):
            asked = [item for item in asking if self._asks(item, lookup)]
            if asked:
                self._ask(lookup, asked, requests)
        for item in asking:
            try:
                if not item.state.finish:
                    self._take_draft(item, requests)
            except Exception as error:
                item.state.fail(error)
            if item.state.finish:
                item.max_draft = 0

    def _asks(self, item: Scheduled, lookup: LookupDrafter) -> bool:
        """Whether to ask this drafter for a request, which it must have read."""
        name, controller = lookup.name, self.controller
        if lookup not in item.state.chain.lookups or not controller.promises_more(item, name):
            return False
        return controller.asks(item, name) and lookup.follows(item.slot, item.text)

    def _ask(self, lookup: LookupDrafter, items: list[Scheduled], requests: int) -> None:
        """Have one drafter look up drafts; each request keeps the better one of what it has."""
        begun = self._clock()
        seconds = self.controller.token_seconds(requests)
        _together(lambda part: lookup.prepare(part, seconds), items)
        for item in items:
            if item.state.finish:
                continue
            try:
                found = lookup.look_up(item.slot, item.text, item.max_draft, item.min_reach)
            except Exception as error:
                item.state.fail(error)
                continue
            item.missed = item.missed or lookup.name
            self.controller.found(lookup.name, found)
            if item.adaptive:
                item.asked[lookup.name] = Asked(before=item.draft)
            if found.tokens:  # a copy: the drafter may keep its own, the engine notes on this
                found = found.cut(item.max_draft)
                found.drafter = lookup.name
                item.draft = better(item.draft, found)
        seconds = (self._clock() - begun) / len(items)
        for item in items:
            if lookup.name in item.asked:
                item.asked[lookup.name].seconds = seconds

    def _take_draft(self, item: Scheduled, requests: int) -> None:
        """Cut a request's draft to what its grammar allows, or turn to a draft model."""
        _keep_allowed(item)
        state, most = item.state, item.max_draft
        item.max_draft = len(item.draft.tokens)
        if item.max_draft:
            item.missed = None
        model = state.chain.model
        if model is None or not self.controller.asks(item, model.name) or self._lags(model, state):
            return
        uncomputed = model.num_uncomputed(item.slot, len(item.text))
        if self.controller.prefers(item, model.name, most, uncomputed, requests):
            if item.adaptive:
                item.asked[model.name] = Asked(before=item.draft)
            item.missed, item.max_draft, item.draft = None, most, Draft(drafter=model.name)
            item.num_uncomputed = uncomputed

    def _reserve(self, state: RequestState, tokens: int) -> int:
        """Take blocks of the cache for tokens behind the next one; preempts no request for them.

        So no draft is made that has no room: a drafter takes what it was asked for as the text.

        Returns:
            The number of tokens that there is room for, at most `tokens`.
        """
        length = state.num_computed + 1  # the next token has its place
        if self._cache.reserve(state.slot, length + tokens):
            return tokens
        return min(tokens, -length % BLOCK_TOKENS)  # the rest of its block

    def _choose_lengths(self, scheduled: list[Scheduled], prompt_tokens: int) -> None:
        """Leave the draft tokens that pay, and have draft models make those that pay."""
        begun = self._clock()
        certain = sum(len(item.forced) for item in scheduled)
        lengths = self.controller.choose(scheduled, prompt_tokens + certain)
        weighed = [item for item in scheduled if item.max_draft and item.asked]
        seconds = (self._clock() - begun) / max(1, len(weighed))
        for item in weighed:
            item.asked[item.draft.drafter].seconds += seconds
        for item, length in zip(scheduled, lengths, strict=True):
            if length < 1 and item.max_draft:
                item.declined = (
                    item.draft.drafter if item.draft.tokens else item.state.request.drafter
                )
                item.draft = NO_DRAFT
            elif length < item.max_draft:
                item.draft = item.draft.cut(length)
            item.max_draft = length
        self._ask_model([item for item in scheduled if item.num_uncomputed and item.max_draft])

    def _ask_model(self, items: list[Scheduled]) -> None:
        """Have the draft model make the draft tokens of all requests that ask it."""
        if not items or (model := items[0].state.chain.model) is None:
            return
        begun, drafts = self._clock(), list[tuple[Scheduled, Draft]]()
        _together(lambda part: drafts.extend([*zip(part, model.propose(part), strict=True)]), items)
        for item, draft in drafts:
            item.draft = Draft(draft.tokens, draft.probs, model.name, draft.accept_probs)
            _keep_allowed(item)
            if not item.draft.tokens:
                item.missed = model.name
        seconds = (self._clock() - begun) / len(items)
        for item in items:
            item.draft_seconds = seconds

    def _lags(self, model: DraftModel, state: RequestState) -> bool:
        """Whether a draft model should read more of a text before it proposes."""
        request = state.request
        if request.adaptive and not self.controller.follows(model.name):
            return False
        if min(request.k_draft, state.remaining - 1) < 1:
            return False
        return model.num_uncomputed(state.slot, len(state.tokens)) > _CATCH_UP

    def read_seconds(self, state: RequestState) -> float:
        """Seconds that the request's drafters compute for each of its prompt's tokens."""
        return sum([lookup.read_seconds(state.slot) for lookup in state.chain.lookups])


def _together(work: Callable[[list[Scheduled]], None], items: list[Scheduled]) -> None:
    """Do work for several requests at once; where that fails, again for each alone."""
    try:
        work(items)
    except Exception as error:
        if len(items) == 1:
            items[0].state.fail(error)
            return
        for item in items:
            _together(work, [item])


def _keep_allowed(item: Scheduled) -> None:
    """Cut a draft to what the request's grammar allows."""
    matcher, draft = item.state.matcher, item.draft
    if matcher is None or not draft.tokens:
        return
    allowed = matcher.allows(item.forced + draft.tokens) - len(item.forced)
    # A drawn token has to be rejected by the rule, so that what replaces it is drawn from what the
    # target has more of. Leaving the token out would favour what the draft model draws.
    allowed += draft.probs is not None
    if allowed < len(draft.tokens):
        item.draft = draft.cut(allowed)
