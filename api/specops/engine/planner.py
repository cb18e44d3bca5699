"""Plans the next pass: one flat batch of spans, and the request of each span.

Requests that decode come first, each with its last token and the draft tokens to verify. Lookups
and draft heads are asked first, the cheapest first and each for all requests at once; of their
drafts a request takes the one that brings more tokens, and its probabilities decide how many are
verified. A draft model is asked only for as many tokens as pay, for all requests at once.

The rest of the pass goes to the prompts of admitted requests. Each prompt token makes the pass
longer for those that decode. So prompts get what these leave of the allowed inter-token latency, by
the cost model, less a margin that follows from its errors in the latest such passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from specops.engine.request_state import RequestState
from specops.engine.slots import MOST_RECOMPUTED, SlotManager
from specops.request import PRIORITY_SECONDS, Draft, Step, StepKind
from specops.runtime.batch import Batch
from specops.runtime.block_pool import ROLLBACK
from specops.runtime.cost_model import CostModel
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kv_cache import KvCache
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import (
    LEAST_REACH,
    NO_DRAFT,
    Asked,
    Chain,
    DraftModel,
    DraftRequest,
    LookupDrafter,
    better,
)

# Rows of logits of a pass. The memory plan counts nine for each slot, and a prompt that wants the
# logits of all its tokens takes no more than that.
_ROWS_PER_SLOT, _LEAST_ROWS = 8, 8
# A pass takes longer by each forced token, and other requests wait for it.
_MOST_FORCED = 16
_CATCH_UP = 32  # most tokens that a draft model computes together with its first draft token

# Of the budget for prompts.
_SCATTER = 1 / 8  # weight of the newest pass in the mean deviation
_MARGIN = 6.5  # with so many mean deviations of margin 1 pass in 100 is late
_UNKNOWN = 1 / 24  # mean deviation before a pass was seen
_MOST_ERROR = 1.0  # a pass that took more than twice the expected time counts as twice
_LONG = 0.5  # share of the aim from which on a pass tells something about long passes
_LEAST_SHARE = 1 / 3  # least time for prompts, as a share of the decoding tokens' own
_LEAST_TOKENS = 8  # the kernels compute about so many at once


@dataclass(slots=True, kw_only=True)
class Scheduled(DraftRequest):
    """What the next pass computes of a request, and what that brought; see `DraftRequest`, too.

    Attributes:
        state: the request.
        num_logits: number of its last tokens in the pass that need logits.
        forced: tokens that the grammar leaves no choice about; they come before the draft.
        missed: name of the drafter that was asked and had nothing.
        declined: name of the drafter whose draft tokens did not seem to pay.
        is_prompt: a piece of a prompt; otherwise the request decodes.
        ends_prompt: the prompt ends with this piece, whose last token brings the answer's first.
    """

    state: RequestState
    num_logits: int = 0
    forced: tuple[int, ...] = ()
    missed: str | None = None
    declined: str | None = None
    is_prompt: bool = False
    ends_prompt: bool = False

    @property
    def settled(self) -> int:
        """Number of the text's tokens that stay, whatever of the draft is rejected."""
        return self.start + 1 + len(self.forced)


class Planner:
    """Fills batches. Used by the engine's thread.

    Args:
        cache: the target's.
        slots: the requests that hold a slot.
        drafters: what each name in a request asks for draft tokens.
        controller: chooses drafters and draft lengths; may be exchanged.
        cost_model: of the target's passes.
        draft_cost_model: of the passes of a draft model or head; None where there are none.
        clock: seconds.
        max_batched_tokens: most tokens of a pass.
        max_inter_token_latency: longest pause in seconds that prompts may cause in a stream.
    """

    def __init__(
        self,
        cache: KvCache,
        slots: SlotManager,
        drafters: Mapping[str, Chain],
        controller: Controller,
        *,
        cost_model: CostModel,
        draft_cost_model: CostModel | None,
        clock: Callable[[], float],
        max_batched_tokens: int,
        max_inter_token_latency: float,
    ) -> None:
        self.controller = controller
        self._cache = cache
        self._slots = slots
        self._drafters = drafters
        lookups = [lookup for chain in drafters.values() for lookup in chain.lookups]
        self._lookups = dict.fromkeys(lookups)  # each once
        self._costs = cost_model
        self._draft_costs = draft_cost_model
        self._clock = clock
        self._most = max_batched_tokens
        self._longest_pause = max_inter_token_latency
        self._deviation = _UNKNOWN  # mean relative error of the cost model

    def plan(self, step: Step, started: float) -> tuple[Batch, list[Scheduled]]:
        """Choose the spans of the next pass, maybe none, and the request of each span.

        May preempt requests, and has draft models compute.

        Args:
            step: gets what is known before the pass.
            started: when the step began.
        """
        batch, decoding = Batch(), self._slots.schedule_decodes()
        waiting, begun, reading = 0, self._clock(), self._count_reading()
        prompts: list[RequestState] = []
        if len(decoding) < len(self._slots):
            prompts = [
                item for item in self._slots if item.num_uncomputed_tokens and not item.finish
            ]
        if prompts:
            uncomputed = sum(item.num_uncomputed_tokens for item in prompts)
            waiting = min(uncomputed, self.usual_chunk)
        elif self._draft_costs is not None:
            self._prefill_draft_model(decoding)
        scheduled = self.propose(decoding, waiting) if decoding else []
        step.draft_seconds = self._clock() - begun + reading
        for item in scheduled:
            batch.add(item.slot, item.start, item.tokens, item.num_logits, item.settled)
        step.decoding, decoded = len(scheduled), batch.num_tokens
        if prompts:
            self._add_prompts(step, batch, scheduled, prompts, started)
        step.prompt_tokens = batch.num_tokens - decoded
        step.kind = _kind(step, batch)
        return batch, scheduled

    def observe(self, batch: Batch, step_seconds: float) -> None:
        """Take in a step in which prompt tokens made other requests wait."""
        expected = self._costs.cost(batch.num_tokens, batch.attention_work, len(batch.spans))
        if expected >= _LONG * self._aim:
            error = min(abs(step_seconds / expected - 1), _MOST_ERROR)
            self._deviation += _SCATTER * (error - self._deviation)

    # -- requests that decode ----------------------------------------------------------------------

    def propose(self, decoding: list[RequestState], prompt_tokens: int) -> list[Scheduled]:
        """Collect the draft tokens that a pass verifies.

        Args:
            decoding: the requests that decode in the pass.
            prompt_tokens: number of prompt tokens that will be in the pass, too.

        Returns:
            The part of each request whose drafters do not fail.
        """
        scheduled, speculating = [], []
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
                tokens=[state.tokens[-1]],
                state=state,
                num_logits=1,
            )
            chain = self._drafters.get(request.drafter)
            if chain is not None and request.k_draft:
                try:
                    self._make_room(item, chain, len(decoding), prompt_tokens)
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

    def _count_reading(self) -> float:
        """Seconds that lookups have read texts since the last pass; the controller learns of it."""
        whole = 0.0
        for lookup in self._lookups:
            if seconds := lookup.take_reading():
                whole += seconds
                if any(state.request.adaptive for state in self._slots):
                    self.controller.read(lookup.name, seconds)
        return whole

    def _prefill_draft_model(self, decoding: list[RequestState]) -> None:
        """Let a draft model compute a piece of one text that it cannot propose for yet.

        It does not read ahead while its draft tokens do not pay. If it is asked later, it catches
        up then.
        """
        for state in decoding:
            chain = self._drafters.get(state.request.drafter)
            if chain is None or chain.model is None:
                continue
            try:
                if not self._lags(chain.model, state):
                    continue
                room = self.draft_model_tokens(len(decoding), state.num_computed)
                begun = self._clock()
                if chain.model.prefill(state.slot, state.tokens, room):
                    if state.request.adaptive:
                        self.controller.read(chain.model.name, self._clock() - begun)
                    return
            except Exception as error:
                state.fail(error)

    def _make_room(self, item: Scheduled, chain: Chain, requests: int, prompt_tokens: int) -> None:
        """Put a request's forced tokens into the pass, and find out how long its draft may be.

        Args:
            item: gets both.
            chain: the request's drafters.
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        state, request = item.state, item.state.request
        if state.matcher is not None:
            # Forced tokens leave the half of a pass to prompts that wait.
            room = self._most - min(prompt_tokens, self._most // 2)
            most = min(_MOST_FORCED, state.remaining - 1, room // requests - 1 - request.k_draft)
            item.forced = state.matcher.forced(self._reserve(state, max(0, most)))
            item.text = [*state.tokens, *item.forced]
        # The target adds a token of its own to the accepted ones: the last is never drafted.
        forced = len(item.forced)
        most = min(request.k_draft, state.remaining - 1 - forced)
        if most < 1:
            return
        if any(self.controller.asks(item, drafter.name) for drafter in chain.drafters):
            item.max_draft = max(0, self._reserve(state, forced + most) - forced)
        else:
            item.declined = request.drafter

    def _look_up(self, items: list[Scheduled], requests: int, prompt_tokens: int) -> None:
        """Have drafts looked up, or find out how many tokens a draft model could make.

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
        chains = [self._drafters[item.state.request.drafter] for item in asking]
        chains.sort(key=lambda chain: -len(chain.lookups))
        for lookup in dict.fromkeys([one for chain in chains for one in chain.lookups]):
            asked = [item for item in asking if self._asks(item, lookup)]
            if asked:
                self._ask(lookup, asked, requests)
        for item in asking:
            try:
                if not item.state.finish:
                    self._take_draft(item)
            except Exception as error:
                item.state.fail(error)
            if item.state.finish:
                item.max_draft = 0

    def _asks(self, item: Scheduled, lookup: LookupDrafter) -> bool:
        """Whether a request asks this drafter, and it has something to say."""
        if lookup not in self._drafters[item.state.request.drafter].lookups:
            return False
        return self.controller.asks(item, lookup.name) and lookup.follows(item.slot, item.text)

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

    def _take_draft(self, item: Scheduled) -> None:
        """Cut a request's draft to what its grammar allows; without one, turn to a draft model."""
        _keep_allowed(item)
        state, most = item.state, item.max_draft
        item.max_draft = len(item.draft.tokens)
        model = self._drafters[state.request.drafter].model
        if item.max_draft:
            item.missed = None
        elif model and self.controller.asks(item, model.name) and not self._lags(model, state):
            if item.adaptive:
                item.asked[model.name] = Asked()
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
        """Have draft tokens made for several requests."""
        drafts = list[tuple[Scheduled, Draft]]()
        _together(lambda part: drafts.extend([*zip(part, model.propose(part), strict=True)]), items)
        for item, draft in drafts:
            item.draft = Draft(draft.tokens, draft.probs, model.name, draft.accept_probs)
            _keep_allowed(item)
            if not item.draft.tokens:
                item.missed = model.name

    def _lags(self, model: DraftModel, state: RequestState) -> bool:
        """Whether a draft model should read more of a text before it proposes."""
        request = state.request
        if request.adaptive and not self.controller.follows(model.name):
            return False
        if min(request.k_draft, state.remaining - 1) < 1:
            return False
        return model.num_uncomputed(state.slot, len(state.tokens)) > _CATCH_UP

    # -- prompts -----------------------------------------------------------------------------------

    def _add_prompts(
        self,
        step: Step,
        batch: Batch,
        scheduled: list[Scheduled],
        prompts: list[RequestState],
        started: float,
    ) -> None:
        """Fill the pass with the prompts' next tokens, as far as the budget goes."""
        # A text to be embedded may be far longer than any prompt, so it gets what is left.
        prompts.sort(key=lambda state: (state.request.embed, state.turn))
        others = [item.state.request for item in scheduled]
        urgent = min(request.priority for request in (*others, prompts[0].request))
        # Nobody waits for prompts that are computed ahead, but a request that comes meanwhile waits
        # for the end of the pass.
        watched = urgent > 0 or any(request.stream or request.priority < 0 for request in others)
        after = sum(item.state.choosing_seconds for item in scheduled)
        seconds = self.pass_seconds(batch, watched=watched, spent=self._clock() - started + after)
        least = self._least_seconds(batch)
        decoding = batch.num_tokens
        for state in prompts:
            if state.slot < 0:  # preempted for one before it
                continue
            held = self._take_prefix(step, state)
            if state.turn > self._clock() + PRIORITY_SECONDS * urgent:  # it can wait
                seconds = min(seconds, least)
            each = state.reader.seconds if state.reader and not state.generated else 0.0
            followed = self._followed_seconds(state)
            room = self.prompt_tokens(
                batch, held, seconds, first=batch.num_tokens == decoding, each=each + followed
            )
            step.budget_tokens = max(step.budget_tokens, batch.num_tokens - decoding + room)
            if room < 1:
                return
            if (chunk := self._next_chunk(batch, state, room)) is not None:
                # Later texts often part shortly before a prompt's end, which opens the answer: the
                # snapshot there then serves them, too, wherever the prompt's pieces end. And for a
                # draft head the last tokens before any snapshot may have to be computed again.
                sure = chunk.start + len(chunk.tokens) - (MOST_RECOMPUTED if followed else 0)
                sure = min(sure, len(state.tokens) - ROLLBACK)
                batch.add(chunk.slot, chunk.start, chunk.tokens, chunk.num_logits, sure)
                batch.hidden |= state.request.embed
                scheduled.append(chunk)
                seconds -= chunk.num_logits * each + len(chunk.tokens) * followed

    def _followed_seconds(self, state: RequestState) -> float:
        """Seconds that the request's drafters compute for each of its prompt's tokens."""
        chain = None if state.request.embed else self._drafters.get(state.request.drafter)
        if chain is None or not state.request.k_draft:
            return 0.0
        return sum([lookup.read_seconds(state.slot) for lookup in chain.lookups])

    def _next_chunk(self, batch: Batch, state: RequestState, room: int) -> Scheduled | None:
        """A prompt's next tokens, at most `room`; None where there is nothing to compute or no KV
        block for it."""
        held, count = state.num_computed, min(room, state.num_uncomputed_tokens)
        if not count:  # another request has computed all that this one had given up
            return None
        reads = state.reader is not None and not state.generated
        if reads:
            count = min(
                count, max(_LEAST_ROWS, _ROWS_PER_SLOT * self._cache.num_slots - batch.num_logits)
            )
        if (border := self._cache.next_snapshot(state.slot)) is not None:
            count = min(count, border - held)
        if not self._slots.reserve(state, held + count, batch):
            return None
        state.was_scheduled = True
        ends = count == state.num_uncomputed_tokens and not state.generated
        return Scheduled(
            state.slot,
            state.tokens,
            sampling=state.request.sampling,
            start=held,
            tokens=state.tokens[held : held + count],
            state=state,
            num_logits=count if reads else int(ends),
            rng=state.rng,
            speculation=state.speculation,
            is_prompt=True,
            ends_prompt=ends,
        )

    def _take_prefix(self, step: Step, state: RequestState) -> int:
        """Skip what other requests have computed of the beginning; returns the computed tokens."""
        before = state.num_computed if state.was_scheduled else state.num_cached_tokens
        held = self._slots.share_prefix(state)
        if held > before and not state.preemptions:
            step.prefix_hits += not state.num_cached_tokens
            step.cached_tokens += held - before
            state.num_cached_tokens += held - before
        return held

    # -- how many tokens a pass has room for -------------------------------------------------------

    def pass_seconds(self, decoding: Batch, *, watched: bool, spent: float = 0.0) -> float:
        """Seconds that a pass may take with all prompts that join it.

        Args:
            decoding: the batch before the first prompt joins.
            watched: somebody waits for the end of the pass.
            spent: seconds of the step before the pass.
        """
        if not watched:
            return float("inf")
        return max(self._aim - spent, self._least_seconds(decoding))

    def _least_seconds(self, decoding: Batch) -> float:
        own = self._costs.cost(decoding.num_tokens, decoding.attention_work, len(decoding.spans))
        return own * (1 + _LEAST_SHARE)

    def prompt_tokens(
        self, batch: Batch, position: int, seconds: float, *, first: bool, each: float = 0.0
    ) -> int:
        """Largest number of a prompt's tokens that may join a pass.

        Args:
            batch: the pass so far.
            position: position of the prompt's first token.
            seconds: time that the pass may take.
            first: no other prompt is in the pass. This one then gets a few tokens in any case.
            each: seconds that each of its tokens takes after the pass.
        """
        room = self._most - batch.num_tokens
        if seconds == float("inf"):
            return room
        work, allowed = batch.attention_work, seconds
        allowed -= self._costs.state_seconds(len(batch.spans) + 1)
        fitting = self._costs.tokens_within(allowed, batch.num_tokens, work, position, each)
        return min(room, max(fitting, _LEAST_TOKENS) if first else fitting)

    @property
    def usual_chunk(self) -> int:
        """Number of prompt tokens that join a pass where enough of them wait."""
        fitting = self._costs.tokens_within(self._aim, 0, 0.0, 0)
        return min(self._most, max(fitting, _LEAST_TOKENS))

    def draft_model_tokens(self, decoding: int, position: int) -> int:
        """Largest number of tokens that a draft model may compute before a pass.

        Args:
            decoding: number of requests that wait for the pass.
            position: position of the first token.
        """
        if self._draft_costs is None:
            return 0
        own = self._costs.cost(decoding, spans=decoding)
        allowed = max(self._aim - own, own * _LEAST_SHARE)
        fitting = self._draft_costs.tokens_within(allowed, 0, 0.0, position)
        return min(self._most, max(fitting, _LEAST_TOKENS))

    @property
    def _aim(self) -> float:
        """Planned seconds of a step, so that hardly any step takes too long.

        A margin by mean deviations, as TCP sets its timeouts (Jacobson, Congestion Avoidance and
        Control, SIGCOMM 1988).
        """
        return self._longest_pause / (1 + _MARGIN * self._deviation)


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


def _kind(step: Step, batch: Batch) -> StepKind | None:
    if step.prompt_tokens:
        return StepKind.MIXED if step.decoding else StepKind.PREFILL
    if not step.decoding:
        return None
    return StepKind.VERIFY if batch.num_tokens > step.decoding else StepKind.DECODE
