"""Collects the draft tokens of a step: from every request's drafters, as far as they pay.

A lookup costs little, so it comes first, and its probabilities decide how many tokens are verified.
A draft model is asked only for as many tokens as pay, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from specops.engine.request_state import RequestState
from specops.engine.scheduled import Scheduled
from specops.request import Draft
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kv_cache import KvCache
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Chain, DraftModel

# A pass takes longer by each forced token, and other requests wait for it.
_MOST_FORCED = 16
_CATCH_UP = 32  # most tokens that a draft model computes together with its first draft token


class Proposer:
    """Asks drafters. Used by the engine's thread.

    Args:
        cache: the target's; draft tokens take its free blocks before they are asked for.
        drafters: what each name in a request asks.
        controller: chooses drafters and draft lengths; may be exchanged.
        clock: seconds.
        max_tokens: largest number of tokens in a pass.
    """

    def __init__(
        self,
        cache: KvCache,
        drafters: Mapping[str, Chain],
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

    def propose(self, decoding: list[RequestState], prompt_tokens: int) -> list[Scheduled]:
        """Collect the draft tokens that a pass verifies.

        Args:
            decoding: the requests that decode in the pass.
            prompt_tokens: number of prompt tokens that will be in the pass, too.

        Returns:
            The part of each request whose drafters do not fail.
        """
        scheduled = []
        for state in decoding:
            if state.finish:
                continue
            request = state.request
            item = Scheduled(
                state.slot,
                state.tokens,
                0,
                request.sampling,
                state.rng,
                state.speculation,
                state.num_computed,
                request.adaptive,
                state=state,
            )
            chain = self._drafters.get(request.drafter)
            if chain is not None and request.k_draft:
                try:
                    self._look_up(item, chain, len(decoding), prompt_tokens)
                except Exception as error:
                    state.fail(error)
                    continue
            scheduled.append(item)
        if any(item.max_draft for item in scheduled):
            self._choose_lengths(scheduled, prompt_tokens)
            scheduled = [item for item in scheduled if not item.state.finish]
        for item in scheduled:
            state, drafted = item.state, item.draft.tokens
            item.tokens = [state.tokens[-1], *item.forced, *drafted]
            # A forced token's choice needs no logits, but its probability does.
            everything = state.request.logprobs is not None
            item.num_logits = len(item.tokens) if everything else 1 + len(drafted)
        return scheduled

    def prefill_draft_model(self, decoding: list[RequestState], room: Callable[[int], int]) -> None:
        """Let a draft model compute a piece of one text that it cannot propose for yet.

        It does not read ahead while its draft tokens do not pay. If it is asked later, it catches
        up then.

        Args:
            decoding: the requests that decode.
            room: how many tokens it may compute, by how many the target has computed.
        """
        for state in decoding:
            chain = self._drafters.get(state.request.drafter)
            if chain is None or chain.model is None:
                continue
            try:
                if self._lags(chain.model, state) and chain.model.prefill(
                    state.slot, state.tokens, room(state.num_computed)
                ):
                    return
            except Exception as error:
                state.fail(error)

    def _look_up(self, item: Scheduled, chain: Chain, requests: int, prompt_tokens: int) -> None:
        """Have draft tokens looked up, or find out how many a draft model could make.

        Args:
            item: without a draft yet.
            chain: the request's drafters.
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        state, request = item.state, item.state.request
        if state.matcher is not None:
            # Forced tokens leave the half of a pass to prompts that wait.
            room = self._max_tokens - min(prompt_tokens, self._max_tokens // 2)
            most = min(_MOST_FORCED, state.remaining - 1, room // requests - 1 - request.k_draft)
            item.forced = state.matcher.forced(self._reserve(state, max(0, most)))
            item.text = [*state.tokens, *item.forced]
        # The target adds a token of its own to the accepted ones: the last is never drafted.
        forced = len(item.forced)
        most = min(request.k_draft, state.remaining - 1 - forced)
        if most < 1:
            return
        controller, adaptive = self.controller, request.adaptive
        if not any(controller.asks(item, drafter.name) for drafter in chain.drafters):
            item.declined = request.drafter
            return
        most = self._reserve(state, forced + most) - forced
        if most < 1:
            return
        min_reach = controller.min_reach(requests, prompt_tokens) if adaptive else LEAST_REACH
        for lookup in chain.lookups:
            if not controller.asks(item, lookup.name):
                continue
            begun, likelier = self._clock(), max((min_reach, *item.draft.accept_probs[:1]))
            found = lookup.look_up(item.slot, item.text, most, likelier)
            if adaptive:
                item.asked[lookup.name] = self._clock() - begun
            item.missed = item.missed or lookup.name
            if found.tokens:  # a copy: the drafter may keep its own, and the engine notes on this
                item.draft = found.cut(most)
                item.draft.drafter = lookup.name
        _keep_allowed(item)
        item.max_draft = len(item.draft.tokens)
        model = chain.model
        if item.max_draft:
            item.missed = None
        elif model and controller.asks(item, model.name) and not self._lags(model, state):
            if adaptive:
                item.asked[model.name] = 0.0
            item.missed, item.max_draft, item.draft = None, most, Draft(drafter=model.name)
            item.num_uncomputed = model.num_uncomputed(item.slot, len(item.text))

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
            item.asked[item.draft.drafter] += seconds
        for item, length in zip(scheduled, lengths, strict=True):
            if length < 1 and item.max_draft:
                item.declined = (
                    item.draft.drafter if item.draft.tokens else item.state.request.drafter
                )
                item.draft = NO_DRAFT
            elif length < item.max_draft:
                item.draft = item.draft.cut(length)
            item.max_draft = length
        self._ask_models(item for item in scheduled if item.num_uncomputed and item.max_draft)

    def _ask_models(self, requests: Iterable[Scheduled]) -> None:
        """Have each draft model make the draft tokens of all requests that ask it."""
        asked: dict[DraftModel, list[Scheduled]] = {}
        for item in requests:
            model = self._drafters[item.state.request.drafter].model
            if model is not None:
                asked.setdefault(model, []).append(item)
        for model, items in asked.items():
            begun = self._clock()
            self._ask_model(model, items)
            seconds = (self._clock() - begun) / len(items)
            for item in items:
                item.draft_seconds = seconds

    def _ask_model(self, model: DraftModel, items: list[Scheduled]) -> None:
        """Have draft tokens made for several requests: again for each alone where that fails."""
        try:
            drafts = list(zip(items, model.propose(items), strict=True))
        except Exception as error:
            if len(items) == 1:
                items[0].state.fail(error)
                return
            for item in items:
                self._ask_model(model, [item])
            return
        for item, draft in drafts:
            item.draft = Draft(draft.tokens, draft.probs, model.name, draft.accept_probs)
            _keep_allowed(item)
            if not item.draft.tokens:
                item.missed = model.name

    def _lags(self, model: DraftModel, state: RequestState) -> bool:
        """Whether a draft model should read more of a text before it proposes."""
        request = state.request
        if request.adaptive and not self.controller.reading_pays(model.name):
            return False
        if min(request.k_draft, state.remaining - 1) < 1:
            return False
        return model.num_uncomputed(state.slot, len(state.tokens)) > _CATCH_UP


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
