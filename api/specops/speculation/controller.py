"""Decides when drafting pays: which drafters to ask, and how many draft tokens to verify.

Two rules decide, and both count seconds.

`Controller.asks` and `Controller.follows` keep an account for each drafter: what asking it saves
beyond the drafters before it, less the time for asking and for reading texts. Where that was
negative lately, the drafter is asked, and reads, only within a small share of the time, to notice
when it pays again.

`Controller.choose` says how much of the drafts is verified. A pass over a few tokens costs little
more than a pass over one, and all requests share it. So each place in a pass, a position of a
request's draft, is worth the probability that it is reached: that its token and all draft tokens
before it are accepted. The controller sorts all places by this probability and admits the likeliest
as long as the step brings more tokens per second with them. Plain decoding is one of the choices.
(SmartSpec, Liu et al. 2024, https://arxiv.org/abs/2406.14066, chooses one length for all requests
by the same goodput.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul, truediv

from specops.runtime.cost_model import CostModel, mean_with
from specops.runtime.kvcache.prefix_cache import common_prefix
from specops.speculation.acceptance import Acceptance, SpeculationState
from specops.speculation.drafters.base import LEAST_REACH, Draft, DraftRequest
from specops.speculation.overhead import Overhead

_WEIGHT = 1 / 48  # weight of the newest value in a running mean
_PROBING = 0.005  # share of the time that each drafter may lose where it does not pay
_LEAST_PROBE = 0.05  # least cost of a probe, as a share of a pass over one token
_BOUND_STEPS = 64  # steps for which figures of passes alone stay as they were computed
# The mean starts with the fastest of this many: one that waited for a core would keep it high.
_FIRST_ASKS = 8
# A drafter that reads texts starts with a credit of this many passes and stops when it is used up:
# a prompt is read at once, and the gain follows later.
_PATIENCE = 16
_HOPE = 0.25  # of a pass over one token: what asking a drafter is believed to save at first


@dataclass(slots=True)
class _Account:
    """What asking one drafter costs and saves, over all requests."""

    acceptance: Acceptance  # of a drafter that does not estimate it
    gain: float  # mean net seconds that asking it for a request saves; at first a guess
    asking: float = 0.0  # mean seconds that it takes to ask for a request, without a model's passes
    asks: int = 0  # number of steps in which it was asked
    spare: float = 0.0  # seconds that asking and reading may lose
    expected: float = 1.0  # mean number of tokens that its drafts promise
    balance: float | None = None  # see `Controller.follows`; None: it reads no texts


class Controller:
    """Chooses drafters and draft lengths. Used by the engine's thread.

    Args:
        target: costs of the target's passes.
        draft: costs of the passes of a draft model or head; None where there are none.
        positions: length of the longest draft.

    Attributes:
        overhead: what steps take beside their passes.
    """

    def __init__(self, target: CostModel, draft: CostModel | None, positions: int) -> None:
        self.overhead = Overhead()
        self._target = target
        self._draft = draft
        self._positions = positions
        self._accounts: dict[str, _Account] = {}  # by drafter
        self._patience = _PATIENCE * target.cost(1)
        self._drawing = 0.0  # mean seconds to draw one token
        self._bounds: dict[tuple[int, int], float] = {}
        self._shares: dict[int, list[float]] = {}
        self._steps = 0
        self._seconds = self._plain_seconds = 0.0  # means of a step and of as much plain decoding
        self._probes = 0

    @property
    def estimated_speedup(self) -> float:
        """Tokens per second of the latest steps over plain decoding's; 1 at first. Any thread."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    # -- which drafter to ask --------------------------------------------------------------------

    def asks(self, request: DraftRequest, drafter: str) -> bool:
        """Whether it is worth its time in this step to ask a drafter for a request.

        A lookup takes about ten microseconds, and so does deciding about a draft model: nothing
        beside a pass of 20 ms, but a fifth of a token's time where eight requests share a pass of
        0.4 ms. Where that does not pay, drafters are still asked within a fixed share of the time,
        for all requests in the same steps, so that the other steps spend no time on it. Each
        drafter is asked at least once for a new request, which begins with the mean gain over all
        requests.
        """
        if not request.adaptive:
            return True
        account, gain = self._accounts.get(drafter), request.speculation.gains.get(drafter)
        return gain is None or gain >= 0 or account is None or account.spare >= 0

    def promises_more(self, request: DraftRequest, drafter: str) -> bool:
        """Whether a lookup's drafts usually promise more tokens than the request's draft."""
        account = self._accounts.get(drafter)
        return account is None or not 0 < account.expected <= request.draft.expected

    def prefers(
        self, request: DraftRequest, model: str, most: int, uncomputed: int, requests: int
    ) -> bool:
        """Whether a draft model would bring a request more tokens per second than its draft.

        Each with the best number of draft tokens, as if all requests drafted so. Each request tries
        the model once. Where its draft is not worth a place in a pass, the model may be probed.

        Args:
            request: with the draft that was looked up, maybe none.
            model: name of the draft model.
            most: largest number of its draft tokens.
            uncomputed: tokens that it has to compute before the first one.
            requests: number of requests that decode in the pass.
        """
        draft = request.draft
        if not draft.tokens or model not in request.speculation.acceptance:
            return True
        found = draft.accept_probs or self._acceptance_of(request, draft.drafter).rates()
        rates = self._acceptance_of(request, model).rates()
        verifying = costs = self._costs_of(requests)
        if self._draft is not None:
            first = self._draft.cost(uncomputed) - self._draft.cost(1)
            each = self._draft.cost(requests) / requests
            making = [first + count * each for count in range(1, len(verifying))]
            costs = list(map(add, verifying, [0.0, *making]))
        best = _tokens_per_second(found[: len(draft.tokens)], verifying)
        return best <= 1 / verifying[0] or best < _tokens_per_second(rates[:most], costs)

    def follows(self, drafter: str) -> bool:
        """Whether it pays that a drafter reads a new request's text, so that it can be asked.

        A head reads the prompt and all tokens that follow, asked or not. Beside a lookup that finds
        most tokens it may add nothing, however good it is.
        """
        account = self._accounts.get(drafter)
        if account is None or account.balance is None:
            return True
        return account.balance >= 0 or account.spare >= 0

    def min_reach(self, requests: int, prompt_tokens: int = 0) -> float:
        """The least probability to be reached with which `choose` can admit a place.

        Args:
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        if (bound := self._bounds.get((requests, prompt_tokens))) is None:
            first = requests + prompt_tokens
            begin, *wider = self._target.costs(first, requests * self._positions)
            added = min((cost - begin) / count for count, cost in enumerate(wider, 1))
            # What a token takes outside passes it takes with draft tokens and without.
            saved = self._plain(requests) / requests - self.overhead.token
            bound = max(LEAST_REACH, (added + self.overhead.draft_token) / saved)
            self._bounds[requests, prompt_tokens] = bound
        return bound

    def token_seconds(self, requests: int) -> float:
        """Seconds per token lately, where this many requests decode together."""
        return self._plain(requests) / requests / self.estimated_speedup

    def _plain(self, requests: int) -> float:
        """Seconds of a step in which so many requests get a token each, without drafts."""
        return self._target.cost(requests, spans=requests) + self.overhead.seconds(requests)

    # -- how many draft tokens to verify ---------------------------------------------------------

    def choose(self, requests: Sequence[DraftRequest], prompt_tokens: int = 0) -> list[int]:
        """The number of draft tokens to verify of each request.

        Args:
            requests: all that decode in the pass.
            prompt_tokens: number of prompt tokens in the pass. They make it wide, and each draft
                token makes it wider.
        """
        lengths = [0 if item.adaptive else item.max_draft for item in requests]
        places = []
        for index, item in enumerate(requests):
            if not item.adaptive or not item.max_draft:
                continue
            reach = 1.0
            drafter = item.draft.drafter
            rates = item.draft.accept_probs or self._acceptance_of(item, drafter).rates()
            for position, rate in enumerate(rates[: item.max_draft]):
                reach *= rate
                if reach < LEAST_REACH:
                    break
                places.append((-reach, index, position))
        if places:
            places.sort()
            for _, index, position in places[: self._admitted(requests, places, prompt_tokens)]:
                lengths[index] = position + 1
        self._probe(requests, lengths, prompt_tokens)
        return lengths

    def _admitted(
        self,
        requests: Sequence[DraftRequest],
        places: Sequence[tuple[float, int, int]],
        prompt_tokens: int,
    ) -> int:
        """How many of the places, the likeliest first, give the most tokens per second.

        Beside a prompt a pass costs only what it adds to the prompt's pass, and is worth its tokens
        less those that the same time would give in a pass without a prompt.
        """
        pair = self._target.attention_seconds(1)
        per_token = [item.start * pair + item.speculation.adjusting for item in requests]
        row = self.overhead.draft_token
        tokens = len(requests) + sum(item.max_draft for item in requests if not item.adaptive)
        # What each token that comes takes: drawn or not, it becomes text.
        drawing = [self._drawing_of(item) + self.overhead.token for item in requests]
        outside = self.overhead.seconds(len(requests), tokens=0)
        outside += self._target.state_seconds(len(requests))
        expected, extra = float(len(requests)), sum(per_token) + sum(drawing) + outside
        expected_tokens, extra_seconds = [expected], [extra]
        # Tokens and costs of the draft model's passes.
        widths, model_costs = [0] * self._positions, [0.0] * self._positions
        for missed, index, position in places:
            expected -= missed
            # drawn where it is reached
            extra += row + per_token[index] - missed * drawing[index]
            if (uncomputed := requests[index].num_uncomputed) and self._draft is not None:
                widths[position] += 1 if position else uncomputed
                cost = self._draft.cost(widths[position])
                extra += cost - model_costs[position]
                model_costs[position] = cost
            expected_tokens.append(expected)
            extra_seconds.append(extra)
        costs = map(add, self._target.costs(tokens, len(places)), extra_seconds)
        worth = list(map(truediv, expected_tokens, costs))
        if prompt_tokens:
            rate = max(worth)
            costs = map(add, self._target.costs(tokens + prompt_tokens, len(places)), extra_seconds)
            worth = [
                value - rate * cost for value, cost in zip(expected_tokens, costs, strict=True)
            ]
        return worth.index(max(worth))

    def _probe(
        self, requests: Sequence[DraftRequest], lengths: list[int], prompt_tokens: int
    ) -> None:
        """Have one draft token verified that does not seem to pay, within the drafter's share.

        A drafter that estimates its tokens needs no probe: it learns from every token that follows.
        """
        waiting = [
            index
            for index, item in enumerate(requests)
            if item.max_draft and not lengths[index] and not item.draft.accept_probs
        ]
        if not waiting:
            return
        index = waiting[self._probes % len(waiting)]  # all in turn: each text may change
        tokens, most = len(requests) + prompt_tokens, self._target.cost(1)
        cost = self._target.cost(tokens + 1) - self._target.cost(tokens)
        cost = max(cost, _LEAST_PROBE * most)
        if (uncomputed := requests[index].num_uncomputed) and self._draft is not None:
            cost += self._draft.cost(uncomputed)
        account = self._account(requests[index].draft.drafter)
        if account.spare >= 0 and cost <= most:
            account.spare -= cost
            self._probes += 1
            lengths[index] = 1

    # -- learning from the outcome ---------------------------------------------------------------

    def found(self, drafter: str, draft: Draft) -> None:
        """Learn what a drafter that was asked has proposed."""
        account = self._account(drafter)
        account.expected += _WEIGHT * (draft.expected - account.expected)

    def read(self, drafter: str, seconds: float) -> None:
        """Learn how long a drafter has read texts, beside what it took to ask it."""
        account = self._account(drafter)
        if account.balance is None:
            account.balance = self._patience
        if account.balance < 0:
            account.spare -= seconds
        self._book(account, -seconds)

    def drawn(self, tokens: int, seconds: float) -> None:
        """Learn how long it took to draw so many tokens from logits that were adjusted before."""
        self._drawing = mean_with(self._drawing, seconds / tokens, _WEIGHT)

    def adjusted(self, speculation: SpeculationState, positions: int, seconds: float) -> None:
        """Learn how long it took to adjust a request's logits at so many positions."""
        speculation.adjusting = mean_with(speculation.adjusting, seconds / positions, _WEIGHT)

    def verified(self, request: DraftRequest, accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""
        if not request.draft.accept_probs:
            drafted = len(request.draft.tokens)
            self._acceptance_of(request, request.draft.drafter).observe(drafted, accepted)
            self._account(request.draft.drafter).acceptance.observe(drafted, accepted)

    def stepped(self, requests: Sequence[DraftRequest], draft_seconds: float) -> None:
        """Learn from a step.

        Args:
            requests: all that decoded.
            draft_seconds: measured time to get the draft tokens.
        """
        count, width = len(requests), sum([len(item.tokens) for item in requests])
        alone = self._plain(count)
        token, seconds, plain_seconds = alone / count, alone + draft_seconds, alone
        if width > count or any(item.asked for item in requests):
            seconds, plain_seconds = self._drafted(requests, alone, width, draft_seconds)
        else:
            for item in requests:
                item.speculation.seconds += token
                item.speculation.plain_seconds += token
        for account in self._accounts.values():
            account.spare = min(account.spare + _PROBING * seconds, self._target.cost(1))
        if not self._steps % _BOUND_STEPS:
            self._bounds.clear()
            self._shares.clear()
        self._steps += 1
        self._seconds += _WEIGHT * (seconds - self._seconds)
        self._plain_seconds += _WEIGHT * (plain_seconds - self._plain_seconds)

    def _drafted(
        self, requests: Sequence[DraftRequest], alone: float, width: int, draft_seconds: float
    ) -> tuple[float, float]:
        """Learn what a step in which drafters were asked gained for each request.

        Returns:
            The seconds that it took, and those of plain decoding for the same tokens.
        """
        count, each = len(requests), self.overhead.token
        together, token = alone, alone / count
        if width > count:
            wider = self._target.cost(width, spans=count) - self._target.cost(count, spans=count)
            together += wider + self.overhead.draft_token * (width - count)
        added = (together - alone) / max(1, width - count)
        seconds, plain_seconds, drafting = together + draft_seconds, 0.0, draft_seconds / width
        least = added / self.token_seconds(count)
        asked: dict[str, list[tuple[DraftRequest, float]]] = {}  # with what was saved
        for item in requests:
            speculation, own, got = item.speculation, len(item.tokens), item.emitted
            drawing, adjusting = self._drawing_of(item), speculation.adjusting
            choosing = got * drawing + own * adjusting + (got - 1) * each
            speculation.seconds += token + (own - 1) * added + choosing + drafting * own
            plain = got * (token + drawing + adjusting)
            speculation.plain_seconds += plain
            seconds += choosing
            plain_seconds += plain
            worth = token + adjusting - each
            saved = _saved(item.draft, item.came, worth, added + adjusting)
            for name, one in reversed(item.asked.items()):
                without, before = saved, one.before
                if item.draft.tokens and before.drafter != item.draft.drafter:
                    before = before.likely(len(before.tokens), least)  # what would have paid
                    without = _saved(before, item.came, worth, added + adjusting)
                asked.setdefault(name, []).append((item, saved - without))
                saved = without
        for name, items in asked.items():
            self._settle(name, items)
        return seconds, plain_seconds

    def _settle(self, drafter: str, items: Sequence[tuple[DraftRequest, float]]) -> None:
        """Book what asking a drafter has saved for each request, and what it cost."""
        account = self._account(drafter)
        seconds = sum(item.asked[drafter].seconds for item, _ in items) / len(items)
        account.asks += 1
        if account.asks > _FIRST_ASKS:
            account.asking = mean_with(account.asking, seconds, _WEIGHT)
        elif account.asks > 1:  # the first time touches everything for the first time
            account.asking = min(account.asking or seconds, seconds)
        net = costs = total = 0.0  # the first two: where it did not seem to pay
        for item, saved in items:
            gains, asking = item.speculation.gains, account.asking
            if item.draft.drafter == drafter:
                asking += item.draft_seconds
            gain = saved - asking
            if (expected := gains.get(drafter)) is None:
                expected = account.gain
            if expected < 0:
                net, costs = net + gain, costs + max(asking, -expected)
            gains[drafter] = expected + _WEIGHT * (gain - expected)
            total += gain
        # By step: eight requests at once would forget all but the last six steps.
        account.gain += _WEIGHT * (total / len(items) - account.gain)
        # A single wrong draft counts no more than the usual loss, a right one all that it saved, so
        # that asking soon resumes where a text can be drafted again.
        account.spare += max(net, -costs)
        if account.balance is not None:
            self._book(account, total)

    def _book(self, account: _Account, seconds: float) -> None:
        """Add to the balance of a drafter that reads texts."""
        most, balance = self._patience, (account.balance or 0.0) + seconds
        account.balance = min(max(balance, -most), most)

    def _drawing_of(self, request: DraftRequest) -> float:
        """Seconds to draw a token: far longer than to find the likeliest."""
        return self._drawing if request.sampling.temperature > 0 else 0.0

    def _account(self, drafter: str) -> _Account:
        if (account := self._accounts.get(drafter)) is None:
            account = _Account(Acceptance(self._positions), _HOPE * self._target.cost(1))
            self._accounts[drafter] = account
        return account

    def _costs_of(self, requests: int) -> list[float]:
        """A request's share of a pass's seconds, by the number of draft tokens of each request."""
        if (costs := self._shares.get(requests)) is None:
            passes = self._target.costs(requests, requests * self._positions)[::requests]
            outside = self.overhead.seconds(requests)
            costs = self._shares[requests] = [(cost + outside) / requests for cost in passes]
        return costs

    def _acceptance_of(self, request: DraftRequest, drafter: str) -> Acceptance:
        own = request.speculation.acceptance
        if drafter not in own:
            own[drafter] = Acceptance(self._positions, self._account(drafter).acceptance)
        return own[drafter]


def _tokens_per_second(rates: Sequence[float], costs: Sequence[float]) -> float:
    """Tokens per second with the best number of draft tokens.

    Args:
        rates: [k], the probability that each is accepted, given that those before it are.
        costs: at least k + 1 seconds, by the number of draft tokens.
    """
    tokens = accumulate(accumulate(rates, mul), initial=1.0)
    best: float = max(map(truediv, tokens, costs))
    return best


def _saved(draft: Draft, came: Sequence[int], token: float, added: float) -> float:
    """Seconds that a draft has saved, or would have saved, given the tokens at its positions.

    Args:
        draft: the draft.
        came: the tokens.
        token: seconds of a token without drafts.
        added: seconds that each draft token adds.
    """
    return common_prefix(draft.tokens, came) * token - len(draft.tokens) * added
