"""Decides when drafting pays: which drafters to ask, and how many draft tokens to verify.

Both count the seconds of whole steps: passes, asking, and the rest, which `Overhead` learns.

`Controller.asks` and `Controller.reads` go by credits: what asking a drafter saved beyond the
drafters before it, less the time for asking it and for reading texts (`credit`).

`Controller.choose` says how much of the drafts is verified. A pass over a few tokens costs little
more than a pass over one, and all requests share it. So each place in a pass, a position of a
request's draft, is worth the probability that it is reached: that its token and all draft tokens
before it are accepted. The controller sorts all places by this probability and admits the likeliest
as long as the step brings more tokens per second with them. Plain decoding is one of the choices.
(SmartSpec, Liu et al. 2024, https://arxiv.org/abs/2406.14066, chooses one length for all requests
by the same goodput.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from specops.runtime.cost_model import CostModel, mean_with
from specops.runtime.kvcache.prefix_cache import common_prefix
from specops.speculation.credit import SHARE, Credit, SpeculationState
from specops.speculation.drafters.base import MIN_REACH, NO_DRAFT, Draft
from specops.speculation.overhead import Overhead

_WEIGHT = 1 / 48  # weight of the newest value in a running mean
_BOUND_STEPS = 64  # steps for which figures of passes alone stay as they were computed
# The mean time to ask starts with the fastest of these: one that waited for a core would keep it
# high. While the drafter's credit lasts, no request pays for them.
_FIRST_ASKS = 8
# What a drafter may lose before it is asked less, in passes over one token: a prompt is read at
# once, and the gain follows later.
_PATIENCE = 16
_NEVER = float("inf")
_SHORT_ANSWER = 64  # tokens, of whose time the first ask may take a share wherever others stand
_OWN_PATIENCE = 8  # what it may lose in one request, likewise: one rejected draft is no verdict
# Most steps with draft tokens before one without. Only the comparison shows what
# draft tokens cost outside the pass. Sooner at first.
_FIRST_PLAIN, _PLAIN_STEPS = 16, 128


class Attempt(NamedTuple):
    """A drafter that was asked for an adaptive request.

    Attributes:
        drafter: its name.
        before: the draft that the request had without it.
        seconds: the request's share of the time that it took.
    """

    drafter: str
    before: Draft
    seconds: float


@dataclass(slots=True)
class Proposal:
    """What a step verifies for a request that decodes, whom that took, and what came of it.

    Attributes:
        speculation: of the request.
        start: number of tokens that its next token looks back at.
        text: all its tokens, with those that its grammar forces.
        most: most draft tokens after them.
        draft: the draft tokens, maybe none.
        attempts: the drafters that were asked, in their order.
        asking_seconds: of each, without the drafter's own time.
        missed: name of the first drafter that was asked, where none proposed anything.
        declined: name of the drafter whose draft tokens, or of the chain that, did not seem to pay.
        width: number of the request's tokens in the pass.
        came: the tokens at the places of the draft: the accepted ones and the next one.
        emitted: number of new tokens from the pass, forced ones included.
    """

    speculation: SpeculationState
    start: int = 0
    text: Sequence[int] = ()
    most: int = 0
    draft: Draft = field(default_factory=lambda: NO_DRAFT)
    attempts: Sequence[Attempt] = ()
    asking_seconds: float = 0.0
    missed: str | None = None
    declined: str | None = None
    width: int = 1
    came: Sequence[int] = ()
    emitted: int = 0


@dataclass(slots=True)
class _Account:
    """What one drafter costs and promises, over all requests."""

    credit: Credit
    asking: float = 0.0  # mean seconds that it takes to ask for a request
    asks: int = 0  # number of steps in which it was asked
    drafts: int = 0  # number of drafts that it proposed, empty ones included
    expected: float = 1.0  # mean number of tokens that they promise
    reads: bool = False  # a text takes time before it can be asked


class Controller:
    """Chooses drafters and draft lengths. Used by the engine's thread.

    Args:
        target: costs of the target's passes.
        positions: length of the longest draft.

    Attributes:
        overhead: what steps take outside their passes.
        now: seconds of all steps so far.
    """

    def __init__(self, target: CostModel, positions: int) -> None:
        self.overhead = Overhead()
        self._target = target
        self._positions = positions
        self._accounts: dict[str, _Account] = {}  # by drafter
        self._pass = target.cost(1)  # seconds of a pass over one token, as measured at the start
        self._drawing = 0.0  # mean seconds to draw one token
        self._bounds: dict[tuple[int, int], float] = {}
        self._costs: list[float] = []
        self._steps = self._drafted = 0  # all steps, and the latest ones with draft tokens
        self.now = 0.0
        self._seconds = self._plain_seconds = 0.0  # means of a step and of as much plain decoding
        self._token = 0.0  # seconds for each token of the latest step, without drafts

    @property
    def estimated_speedup(self) -> float:
        """Tokens per second of the latest steps over plain decoding's; 1 at first. Any thread."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    # -- which drafter to ask --------------------------------------------------------------------

    def asks(
        self,
        speculation: SpeculationState,
        drafter: str,
        draft: Draft = NO_DRAFT,
        token_seconds: float = 0.0,
    ) -> bool:
        """Whether it is worth its time to ask a drafter for a request.

        A lookup takes ten microseconds and more: nothing next to a pass of 20 ms, but much where
        eight requests share a pass of 0.4 ms.

        Args:
            speculation: of the request.
            drafter: name of the drafter.
            draft: what the request has without it.
            token_seconds: see `token_seconds`.
        """
        if (account := self._accounts.get(drafter)) is None:
            return True
        adaptive = speculation.adaptive
        if draft.tokens and account.drafts > _FIRST_ASKS:
            more = (account.expected - draft.expected) * token_seconds
            if more <= account.asking * adaptive:
                return False
        return not adaptive or self._due(drafter, speculation) <= self.now

    def rests(self, speculation: SpeculationState, drafters: Iterable[str]) -> bool:
        """Whether none of its drafters may be asked for a request now.

        If so, it rests until one may be, or until `stepped` says that one has begun to pay.
        """
        if not speculation.adaptive:
            return False
        speculation.due = min([self._due(name, speculation) for name in drafters], default=_NEVER)
        return speculation.due > self.now

    def reads(self, drafter: str, speculation: SpeculationState) -> bool:
        """Whether it pays that a drafter reads a request's text; if so, it may be asked then.

        A head reads the prompt and all tokens that follow, asked or not. Beside a lookup that finds
        most tokens it may add nothing, however good it is.
        """
        if not self.asks(speculation, drafter):
            return False
        if drafter not in speculation.credits:  # reading uses up all that the others have left
            speculation.credits[drafter] = Credit(self._target.cost(1))
        return True

    def _due(self, drafter: str, speculation: SpeculationState) -> float:
        """When a drafter may be asked for a request.

        A request that the drafter has brought nothing yet waits for its turn among all of them,
        where asking takes long: each new one that asked at once would take many times the share of
        the time that may be lost, if answers are short.
        """
        if (account := self._accounts.get(drafter)) is None:
            return 0.0
        if (own := speculation.credits.get(drafter)) is None:
            little = account.asking < SHARE * _SHORT_ANSWER * self._token
            return 0.0 if little and not account.reads else account.credit.due
        return own.due

    def min_reach(self, requests: int, prompt_tokens: int = 0) -> float:
        """The least probability to be reached with which `choose` can admit a place.

        Args:
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        if (bound := self._bounds.get((requests, prompt_tokens))) is None:
            first, more = requests + prompt_tokens, requests * self._positions
            costs = self._costs_up_to(first + more)
            fixed = self.overhead.drafting - costs[first]
            added = min((costs[first + n] + fixed) / n for n in range(1, more + 1))
            # What a token takes outside passes it takes with draft tokens and without.
            saved = self._plain(requests) / requests - self.overhead.token
            bound = max(MIN_REACH, (added + self.overhead.draft_token) / saved)
            self._bounds[requests, prompt_tokens] = bound
        return bound

    def token_seconds(self, requests: int) -> float:
        """Seconds per token lately, where this many requests decode together."""
        return self._plain(requests) / requests / self.estimated_speedup

    # -- how many draft tokens to verify ---------------------------------------------------------

    def choose(self, proposals: Sequence[Proposal], prompt_tokens: int = 0) -> list[int]:
        """The number of draft tokens to verify of each request.

        Args:
            proposals: of all requests that decode in the pass.
            prompt_tokens: number of prompt tokens in the pass. They make it wide, and each draft
                token makes it wider.
        """
        lengths, places = [0] * len(proposals), list[tuple[float, int, int]]()
        for index, item in enumerate(proposals):
            if not item.speculation.adaptive:
                lengths[index] = len(item.draft.tokens)
                continue
            reached = enumerate(accumulate(item.draft.accept_probs, mul))
            places += [(-reach, index, place) for place, reach in reached if reach >= MIN_REACH]
        if places and self._drafted < min(_PLAIN_STEPS, _FIRST_PLAIN + self._steps // 2):
            places.sort()
            admitted = self._admitted(proposals, places, sum(lengths), prompt_tokens)
            for _, index, position in places[:admitted]:
                lengths[index] = position + 1
        return lengths

    def _admitted(
        self,
        proposals: Sequence[Proposal],
        places: Sequence[tuple[float, int, int]],
        fixed: int,
        prompt_tokens: int,
    ) -> int:
        """How many of the places, the likeliest first, give the most tokens per second.

        Beside a prompt a pass costs only what it adds to the prompt's pass, and is worth its tokens
        less those that the same time would give in a pass without a prompt.
        """
        pair, row = self._target.attention_seconds(1), self.overhead.draft_token
        per_place = [item.start * pair + item.speculation.adjusting for item in proposals]
        per_token = [self._token_of(item.speculation) for item in proposals]
        count = len(proposals)
        extra = sum(per_place) + sum(per_token) + self._target.state_seconds(count)
        extra += self.overhead.seconds(count, fixed, 0) + sum(map(self._asking_of, proposals))
        first, last = count + fixed, count + fixed + len(places)
        costs = self._costs_up_to(last + prompt_tokens)
        # By number of places: the expected tokens, and the seconds beside the pass.
        tokens = [*accumulate([-missed for missed, *_ in places], initial=count)]
        adds = [  # what a place costs, and what its token costs if it is reached
            row + per_place[index] - missed * per_token[index] for missed, index, _ in places
        ]
        adds[0] += 0.0 if fixed else self.overhead.drafting
        seconds = [*accumulate(adds, initial=extra)]
        steps = zip(tokens, seconds, costs[first : last + 1], strict=True)
        worth = [came / (cost + more) for came, more, cost in steps]
        if prompt_tokens:
            rate, costs = max(worth), costs[first + prompt_tokens : last + prompt_tokens + 1]
            steps = zip(tokens, seconds, costs, strict=True)
            worth = [came - rate * (cost + more) for came, more, cost in steps]
        return worth.index(max(worth))

    # -- learning from the outcome ---------------------------------------------------------------

    def asked(self, drafter: str, draft: Draft) -> None:
        """Learn from a drafter's proposal."""
        account = self._account(drafter)
        account.drafts += 1
        account.expected += _WEIGHT * (draft.expected - account.expected)

    def read(self, drafter: str, seconds: float) -> None:
        """Learn how long a drafter has read texts, not counting the time to ask it."""
        account = self._account(drafter)
        account.reads = True
        account.credit.book(-seconds, _PATIENCE * self._pass, self.now)

    def drawn(self, tokens: int, seconds: float) -> None:
        """Learn how long it took to draw a number of tokens from adjusted logits."""
        self._drawing = mean_with(self._drawing, seconds / tokens, _WEIGHT)

    def adjusted(self, speculation: SpeculationState, positions: int, seconds: float) -> None:
        """Learn how long it took to adjust a request's logits at a number of positions."""
        speculation.adjusting = mean_with(speculation.adjusting, seconds / positions, _WEIGHT)

    def stepped(self, proposals: Sequence[Proposal], count: int, work: float) -> bool:
        """Learn from a step.

        Args:
            proposals: of requests that may have asked a drafter; of all that decoded, if the step
                verified anything.
            count: number of requests that decoded.
            work: what the tokens without drafts look back at, all together.

        Returns:
            Whether a drafter that did not pay has begun to.
        """
        alone = self._plain(count, work)
        self._token = token = alone / count
        if not proposals:
            self._drafted = 0
            self._learn(alone, alone)
            return False
        width = sum([item.width for item in proposals]) + count - len(proposals)
        added = 0.0
        if width > count:
            costs = self._costs_up_to(width)
            more = costs[width] - costs[count] + self.overhead.drafting
            added = more / (width - count) + self.overhead.draft_token
        seconds = plain_seconds = token * (count - len(proposals))
        pair, each = self._target.attention_seconds(1), self.overhead.token
        gains: dict[str, list[tuple[SpeculationState, float, float]]] = {}
        for proposal in proposals:
            speculation, own, got = proposal.speculation, proposal.width, proposal.emitted
            adjusting, drawing = speculation.adjusting, self._token_of(speculation) - each
            per_place = added + proposal.start * pair + adjusting
            took = token + (own - 1) * per_place + got * (each + drawing) - each + adjusting
            plain = got * (token + drawing + adjusting)
            if proposal.attempts:
                took += self._asking_of(proposal)
                worth = token - each + adjusting
                for name, asking, gain in _gains(proposal, worth, per_place):
                    gains.setdefault(name, []).append((speculation, asking, gain))
            speculation.saved += plain - took
            seconds, plain_seconds = seconds + took, plain_seconds + plain
        pays = [self._settle(name, items, count) for name, items in gains.items()]
        self._drafted = self._drafted + 1 if width > count else 0
        self._learn(seconds, plain_seconds)
        return any(pays)

    def _learn(self, seconds: float, plain_seconds: float) -> None:
        """Note the time of a step, and that of plain decoding for the same tokens."""
        self.now += seconds
        if not self._steps % _BOUND_STEPS:
            self._bounds.clear()
            self._costs = []
        self._steps += 1
        self._seconds += _WEIGHT * (seconds - self._seconds)
        self._plain_seconds += _WEIGHT * (plain_seconds - self._plain_seconds)

    def _settle(
        self, drafter: str, items: Sequence[tuple[SpeculationState, float, float]], count: int
    ) -> bool:
        """Book the time that asking a drafter saved each request, and its cost.

        Args:
            drafter: its name.
            items: by request, its state, the seconds that asking took, and those that it saved.
            count: number of requests that decoded.

        Returns:
            Whether it has begun to pay.
        """
        account = self._account(drafter)
        used_up = not account.credit.seconds
        seconds = sum([asking for _, asking, _ in items]) / len(items)
        account.asks += 1
        if learned := account.asks > _FIRST_ASKS:  # it may have waited for a core
            seconds = min(seconds, account.asking + self._pass)
            account.asking += _WEIGHT * (seconds - account.asking)
        else:
            account.asking = min(account.asking or seconds, seconds)
            seconds = min(account.asking, self._pass)
        total = sum([gain for _, _, gain in items]) - len(items) * seconds
        account.credit.book(total, _PATIENCE * self._pass, self.now)
        own = seconds if learned or not account.credit.seconds else 0.0
        most = _OWN_PATIENCE * self._pass
        for speculation, _, gain in items:
            if (credit := speculation.credits.get(drafter)) is None:
                credit = speculation.credits[drafter] = account.credit.share(most / count)
            credit.book(gain - own, most, self.now, 1 / count)
        return used_up and account.credit.seconds > 0

    def _plain(self, requests: int, work: float = 0.0) -> float:
        """Seconds of a step in which a number of requests get a token each, without drafts."""
        return self._target.cost(requests, work, requests) + self.overhead.seconds(requests)

    def _costs_up_to(self, tokens: int) -> list[float]:
        """Recent seconds of passes, by number of tokens, up to this number at least."""
        if tokens >= len(self._costs):
            self._costs = [0.0, *self._target.costs(1, 2 * tokens)]
        return self._costs

    def _token_of(self, speculation: SpeculationState) -> float:
        """Seconds that each of a request's tokens takes; to draw it takes longer than to find the
        likeliest."""
        return self.overhead.token + (self._drawing if speculation.sampled else 0.0)

    def _asking_of(self, proposal: Proposal) -> float:
        """Seconds that it took to ask drafters for a request, as usual."""
        return sum([self._account(one.drafter).asking for one in proposal.attempts])

    def _account(self, drafter: str) -> _Account:
        if (account := self._accounts.get(drafter)) is None:
            account = self._accounts[drafter] = _Account(Credit(_PATIENCE * self._pass / 2))
        return account


def _gains(proposal: Proposal, token: float, place: float) -> list[tuple[str, float, float]]:
    """The seconds that each asked drafter saved beyond the ones before it.

    Args:
        proposal: what was verified, and what came of it.
        token: seconds that an accepted token saves.
        place: seconds that each draft token adds.

    Returns:
        Names, the seconds that asking took, and the seconds saved.
    """
    found, draft, came = list[tuple[str, float, float]](), proposal.draft, proposal.came
    now = max(0, len(came) - 1) * token - len(draft.tokens) * place
    for name, before, seconds in reversed(proposal.attempts):
        without = now
        if draft.tokens and before.drafter != draft.drafter:
            without = 0.0
            if before.tokens:
                paying = before.likely(len(before.tokens), place / token).tokens  # of it
                without = common_prefix(paying, came) * token - len(paying) * place
        found.append((name, seconds + proposal.asking_seconds, now - without))
        now = without
    return found
