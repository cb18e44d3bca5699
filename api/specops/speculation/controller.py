"""Decides when drafting pays: which drafters to ask, and how many draft tokens to verify.

Both decisions count the seconds of whole steps: the passes, the time to ask drafters, and the
remaining overhead, which `Overhead` learns. What drafts save is compared with plain decoding as
`Baseline` measures it.

`Controller.asks` and `Controller.reads` go by credits: the time that a drafter saved beyond the
drafters before it, minus the time to ask it and to read texts (`credit`). Each drafter has one
credit per level of load: what pays for a single request may not pay for eight, whose passes wait
for arithmetic.

`Controller.choose` decides how many draft tokens to verify. A pass over a few tokens costs little
more than a pass over one, and all requests share it. So `kernels/lengths.h` admits the most likely
places of all drafts as long as they raise the step's tokens per second. Plain decoding is one of
the choices. (SmartSpec, Liu et al. 2024, https://arxiv.org/abs/2406.14066, chooses one length for
all requests by the same goodput.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specops.runtime.cost_model import CostModel, mean_with
from specops.runtime.kernels import StepCosts, library
from specops.runtime.kvcache.prefix_cache import common_prefix
from specops.speculation.baseline import Baseline
from specops.speculation.credit import SHARE, Credit, SpeculationState
from specops.speculation.drafters.base import MIN_REACH, NO_DRAFT, Draft
from specops.speculation.overhead import Overhead

_WEIGHT = 1 / 48  # weight of the newest value in a running mean
_BOUND_STEPS = 64  # steps for which cached costs of passes stay valid
# The mean time to ask starts with the fastest of these asks: one that waited for a core would keep
# the mean high. While the drafter's credit lasts, no request pays for them.
_FIRST_ASKS = 8
# Loss after which a drafter is asked less often, in passes over one token: it reads a prompt at
# once, and the gain follows later. Where drafts gain a few percent, less would often end by chance.
_PATIENCE = 24
_NEVER = float("inf")
_OWN_PATIENCE = 8  # the same loss for one request: one rejected draft proves nothing


class Attempt(NamedTuple):
    """A drafter that was asked for an adaptive request.

    Attributes:
        drafter: its name.
        before: the request's draft without it.
        seconds: the request's share of the time to ask it.
    """

    drafter: str
    before: Draft
    seconds: float


@dataclass(slots=True)
class Proposal:
    """One request's part in a decoding step: its draft, the drafters asked, and the outcome.

    Attributes:
        speculation: the request's state.
        start: number of tokens that its next token attends to.
        text: all its tokens, including those that its grammar forces.
        most: maximum number of draft tokens after them.
        draft: the draft tokens, possibly none.
        attempts: the drafters that were asked, in this order.
        asking_seconds: engine's time per ask, in addition to the drafter's own time.
        missed: name of the first drafter asked, if none proposed anything.
        declined: name of the drafter whose draft tokens did not seem to pay, or of the chain.
        width: number of the request's tokens in the pass.
        came: the tokens at the draft's positions: the accepted ones and the next one.
        emitted: number of new tokens from the pass, including forced ones.
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
    """One drafter's costs and promises over all requests, at one level of load."""

    credit: Credit
    asking: float = 0.0  # mean seconds per request asked for
    asks: int = 0  # number of steps in which it was asked
    drafts: int = 0  # number of drafts that it proposed, including empty ones
    expected: float = 0.0  # mean number of tokens that its drafts promise; the first one sets it
    again: float = 0.0  # from then on it is asked even if others promise more
    reads: bool = False  # it must read a text before it can be asked


class Controller:
    """Chooses drafters and draft lengths. Used by the engine's thread.

    Args:
        target: costs of the target's passes.
        positions: maximum length of a draft.

    Attributes:
        overhead: time of steps outside their passes.
        now: total seconds of all steps so far; the clock of credits.
    """

    def __init__(self, target: CostModel, positions: int) -> None:
        self.overhead = Overhead()
        self._target = target
        self._positions = positions
        self._accounts: dict[str, _Account] = {}  # of the current level, by drafter
        self._level = 0  # the base-2 logarithm of the number of requests, rounded up
        self._baseline = Baseline()  # of the current level
        # Both of the other levels, and the time when each was left.
        self._levels: dict[int, tuple[dict[str, _Account], Baseline, float]] = {}
        self._pass = target.cost(1)  # seconds of a pass over one token, as measured at the start
        self._drawing = 0.0  # mean seconds to draw one token
        self._bounds: dict[tuple[int, int], Sequence[float]] = {}
        self._costs = array("d")
        self._steps = 0
        self.now = 0.0
        # Mean seconds of a step, and of plain decoding for the same tokens.
        self._seconds = self._plain_seconds = 0.0
        self._decoding = 1  # number of requests that decode

    @property
    def estimated_speedup(self) -> float:
        """Recent tokens per second relative to plain decoding; 1 at first. Any thread."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    # -- which drafter to ask --------------------------------------------------------------------

    def load(self, requests: int) -> bool:
        """Set the number of requests that decode in the next step, before asking for any.

        Returns:
            Whether the level of load has changed: what did not pay may do so now.
        """
        self._decoding = requests
        if (level := (requests - 1).bit_length()) == self._level:
            return False
        self._levels[self._level], self._level = (self._accounts, self._baseline, self.now), level
        self._accounts, self._baseline, left = self._levels.get(level, ({}, Baseline(), self.now))
        for account in self._accounts.values():  # its clock stood still meanwhile
            account.again += self.now - left
            account.credit.postpone(self.now - left)
        return True

    def asks(
        self,
        speculation: SpeculationState,
        drafter: str,
        draft: Draft = NO_DRAFT,
        token_seconds: float = 0.0,
    ) -> bool:
        """Whether asking a drafter for a request is worth the time.

        A lookup takes ten microseconds or more: negligible next to a pass of 20 ms, but a lot when
        eight requests share a pass of 0.4 ms.

        Args:
            speculation: the request's state.
            drafter: name of the drafter.
            draft: the request's draft so far.
            token_seconds: see `token_seconds`.
        """
        if (account := self._accounts.get(drafter)) is None:
            return True
        adaptive = speculation.adaptive
        if draft.tokens and account.drafts > _FIRST_ASKS:
            more = (account.expected - draft.expected) * token_seconds
            if more <= account.asking * adaptive and self.now < account.again:
                return False
        return not adaptive or self._due(drafter, speculation) <= self.now

    @property
    def compares(self) -> bool:
        """Whether the next step should ask no drafter, to measure plain decoding."""
        return self._baseline.due

    def rests(self, speculation: SpeculationState, drafters: Iterable[str]) -> bool:
        """Whether none of a request's drafters may be asked now.

        If so, the request rests until one may be asked, or until `load` or `stepped` reports that
        one may pay now.
        """
        if not speculation.adaptive:
            return False
        speculation.due = min([self._due(name, speculation) for name in drafters], default=_NEVER)
        return speculation.due > self.now

    def reads(self, drafter: str, speculation: SpeculationState) -> bool:
        """Whether it pays for a drafter to read a request's text; if so, it may be asked later.

        A head reads the prompt and all later tokens, asked or not. When a lookup already finds most
        tokens, even a good head may add nothing.
        """
        if not self.asks(speculation, drafter):
            return False
        if drafter not in speculation.credits:
            account = self._account(drafter)
            own = speculation.credits[drafter] = account.credit.of_request()
            if account.reads:  # reading uses up all that the others have left
                own.seconds = self._target.cost(1)
        return True

    def _due(self, drafter: str, speculation: SpeculationState) -> float:
        """The time from which a drafter may be asked for a request.

        Where the drafter does not pay, a request that has not asked it yet waits until the common
        account allows it, or until asking once takes only the allowed share of the request's time:
        with short answers, asking at once for each would lose many times that share.
        """
        if (account := self._accounts.get(drafter)) is None:
            return 0.0
        if (own := speculation.credits.get(drafter)) is None:
            if speculation.since is None:
                speculation.since = self.now
            little = speculation.since + account.asking * self._decoding / SHARE
            common = account.credit.due()
            return common if account.reads else min(common, little)
        return own.due(account.credit.covers(_OWN_PATIENCE * self._pass))

    def reaches(self, requests: int, prompt_tokens: int = 0) -> Sequence[float]:
        """For each place of a draft, the lowest probability of being reached at which it can pay.

        The first one is the lowest at which `choose` can admit any place. The others assume that
        all requests draft equally far: the first places of a pass may be free, and the next not.

        Args:
            requests: number of decoding requests in the pass.
            prompt_tokens: number of prompt tokens in the pass.
        """
        if (found := self._bounds.get((requests, prompt_tokens))) is None:
            first, more = requests + prompt_tokens, requests * self._positions
            costs = self._costs_up_to(first + more)
            # A token's time outside passes is the same with and without draft tokens.
            saved = self._plain(requests) / requests - self.overhead.token

            def bound(at: int, step: int, fixed: float = 0.0) -> float:
                widths = range(at + step, first + more + 1, step)
                added = min((costs[width] - costs[at] + fixed) / (width - at) for width in widths)
                return max(MIN_REACH, (added + self.overhead.draft_token) / saved)

            later = range(first + requests, first + more, requests)
            found = [
                bound(first, 1, self.overhead.drafting),
                *(bound(at, requests) for at in later),
            ]
            self._bounds[requests, prompt_tokens] = found
        return found

    def token_seconds(self, requests: int) -> float:
        """Recent seconds per token when this many requests decode together."""
        plain = self._baseline.factor * self._plain(requests)
        return plain / requests / self.estimated_speedup

    # -- how many draft tokens to verify ---------------------------------------------------------

    def choose(self, proposals: Sequence[Proposal], prompt_tokens: int = 0) -> list[int]:
        """The number of draft tokens to verify for each request.

        Args:
            proposals: one for each decoding request in the pass.
            prompt_tokens: number of prompt tokens in the pass. They widen it, and each draft token
                widens it further.
        """
        pair, row = self._target.attention_seconds(1), self.overhead.draft_token
        count, fixed, seconds = len(proposals), 0, 0.0
        # All drafts' probabilities; for each request where its draft ends there, and the seconds of
        # a place and of a token outside passes.
        probs, offsets = array("d"), array("q", (0,))
        places, tokens = array("d"), array("d")
        for item in proposals:
            speculation, draft = item.speculation, item.draft
            if speculation.adaptive:
                probs.extend(draft.accept_probs)
            else:
                fixed += len(draft.tokens)
            offsets.append(len(probs))
            place = item.start * pair + speculation.adjusting
            token = self._token_of(speculation)
            places.append(row + place)
            tokens.append(token)
            seconds += place + token
            if item.attempts:
                seconds += self._asking_of(item)
        lengths = array("q", bytes(count * offsets.itemsize))
        if probs:
            seconds += self._target.state_seconds(count) + self.overhead.seconds(count, fixed, 0)
            first = count + fixed
            costs = self._costs_up_to(first + len(probs) + prompt_tokens)
            address, size = costs.buffer_info()[0], costs.itemsize
            step = StepCosts(
                count,
                seconds,
                0.0 if fixed else self.overhead.drafting,
                places.buffer_info()[0],
                tokens.buffer_info()[0],
                address + first * size,
                address + (first + prompt_tokens) * size if prompt_tokens else None,
                self.reaches(count, prompt_tokens)[0],
            )
            library.specops_choose_lengths(
                step, *(values.buffer_info()[0] for values in (offsets, probs, lengths))
            )
        return [
            length if item.speculation.adaptive else len(item.draft.tokens)
            for item, length in zip(proposals, lengths, strict=True)
        ]

    # -- learning from the outcome ---------------------------------------------------------------

    def asked(self, drafter: str, draft: Draft) -> None:
        """Learn from a drafter's proposal."""
        account = self._account(drafter)
        account.drafts += 1
        weight = max(_WEIGHT, 1 / account.drafts)
        account.expected += weight * (draft.expected - account.expected)
        account.again = self.now + (account.asking or self._pass) / SHARE

    def read(self, drafter: str, seconds: float) -> None:
        """Learn how long a drafter read texts, excluding the time to ask it."""
        account = self._account(drafter)
        account.reads = True
        account.credit.book(-seconds, _PATIENCE * self._pass, self.now)

    def drawn(self, tokens: int, seconds: float) -> None:
        """Learn how many seconds it took to draw a number of tokens from adjusted logits."""
        self._drawing = mean_with(self._drawing, seconds / tokens, _WEIGHT)

    def adjusted(self, speculation: SpeculationState, positions: int, seconds: float) -> None:
        """Learn how many seconds it took to adjust a request's logits at a number of positions.

        Args:
            speculation: the request's state.
            positions: number of positions.
            seconds: time for all of them.
        """
        speculation.adjusting = mean_with(speculation.adjusting, seconds / positions, _WEIGHT)

    def stepped(
        self, proposals: Sequence[Proposal], count: int, work: float, prompt_tokens: int = 0
    ) -> bool:
        """Learn from a step.

        Args:
            proposals: of requests that may have asked a drafter; of all decoding requests if the
                step verified anything.
            count: number of decoding requests.
            work: total number of tokens that the tokens without drafts attend to.
            prompt_tokens: number of prompt tokens in the pass: draft tokens come on top of them.

        Returns:
            Whether a drafter that did not pay has started to.
        """
        outside = self.overhead.seconds(count)
        alone = self._target.cost(count, work, count) + outside
        if not proposals:
            self._baseline.rested()
            self._learn(alone, alone)
            return False
        self._baseline.asked(count, alone, outside, self.estimated_speedup)
        token, plain_token = alone / count, self._baseline.factor * alone / count
        drafted = sum([item.width for item in proposals]) - len(proposals)
        added = 0.0
        if drafted:
            width = count + prompt_tokens
            costs = self._costs_up_to(width + drafted)
            more = costs[width + drafted] - costs[width] + self.overhead.drafting
            added = more / drafted + self.overhead.draft_token
        resting = count - len(proposals)
        seconds, plain_seconds = token * resting, plain_token * resting
        pair, each = self._target.attention_seconds(1), self.overhead.token
        slower = 0.0  # seconds that asking makes the step longer by itself, for each ask
        if token > plain_token and (asks := sum([len(item.attempts) for item in proposals])):
            slower = (token - plain_token) * count / asks
        gains: dict[str, list[tuple[SpeculationState, float, float]]] = {}
        for proposal in proposals:
            speculation, own, got = proposal.speculation, proposal.width, proposal.emitted
            adjusting, drawing = speculation.adjusting, self._token_of(speculation) - each
            per_place = added + proposal.start * pair + adjusting
            took = token + (own - 1) * per_place + got * (each + drawing) - each + adjusting
            plain = got * (plain_token + drawing + adjusting)
            if proposal.attempts:
                took += self._asking_of(proposal)
                worth = plain_token - each + adjusting
                for name, asking, gain in _gains(proposal, worth, per_place):
                    gains.setdefault(name, []).append((speculation, asking, gain - slower))
            speculation.saved += plain - took
            seconds, plain_seconds = seconds + took, plain_seconds + plain
        pays = [self._settle(name, items, count) for name, items in gains.items()]
        self._learn(seconds, plain_seconds)
        return any(pays)

    def observe(
        self, requests: int, draft_tokens: int, tokens: int, pass_seconds: float, outside: float
    ) -> None:
        """Learn from the time that the latest step took, if it only decoded.

        Args:
            requests: number of decoding requests.
            draft_tokens: number of verified draft tokens.
            tokens: number of new tokens.
            pass_seconds: seconds of its pass.
            outside: the other seconds, without those to ask drafters.
        """
        self.overhead.observe(requests, draft_tokens, tokens, outside)
        self._baseline.observe(requests, pass_seconds + outside)

    def _learn(self, seconds: float, plain_seconds: float) -> None:
        """Record the seconds of a step, and those of plain decoding for the same tokens."""
        self.now += seconds
        if not self._steps % _BOUND_STEPS:
            self._bounds.clear()
            self._costs = array("d")
        self._steps += 1
        self._seconds += _WEIGHT * (seconds - self._seconds)
        self._plain_seconds += _WEIGHT * (plain_seconds - self._plain_seconds)

    def _settle(
        self, drafter: str, items: Sequence[tuple[SpeculationState, float, float]], count: int
    ) -> bool:
        """Book the time that a drafter saved each request, and the time to ask it.

        Args:
            drafter: its name.
            items: for each request: its state, the seconds to ask, and the seconds saved.
            count: number of decoding requests.

        Returns:
            Whether the drafter has started to pay.
        """
        account = self._account(drafter)
        used_up = account.credit.seconds <= 0
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
        covered = account.credit.covers(most)
        for speculation, _, gain in items:
            if (credit := speculation.credits.get(drafter)) is None:
                credit = speculation.credits[drafter] = account.credit.of_request()
            credit.book(gain - own, most, self.now, 1 / count, covered)
        return used_up and account.credit.seconds > 0

    def _plain(self, requests: int, work: float = 0.0) -> float:
        """Seconds of a step without drafts: each of the requests gets one token."""
        return self._target.cost(requests, work, requests) + self.overhead.seconds(requests)

    def _costs_up_to(self, tokens: int) -> array[float]:
        """Recent seconds of passes by number of tokens, at least up to this number."""
        if tokens >= len(self._costs):
            self._costs = array("d", (0.0, *self._target.costs(1, 2 * tokens)))
        return self._costs

    def _token_of(self, speculation: SpeculationState) -> float:
        """Seconds outside passes per token of a request; drawing takes longer than the argmax."""
        return self.overhead.token + (self._drawing if speculation.sampled else 0.0)

    def _asking_of(self, proposal: Proposal) -> float:
        """Usual seconds to ask the drafters that were asked for a request."""
        return sum([self._account(one.drafter).asking for one in proposal.attempts])

    def _account(self, drafter: str) -> _Account:
        if (account := self._accounts.get(drafter)) is None:
            account = self._accounts[drafter] = _Account(Credit(_PATIENCE * self._pass / 2))
        return account


def _gains(proposal: Proposal, token: float, place: float) -> list[tuple[str, float, float]]:
    """The seconds that each drafter saved beyond the ones asked before it.

    Args:
        proposal: the verified draft and its outcome.
        token: seconds that an accepted token saves.
        place: seconds that each draft token adds.

    Returns:
        For each drafter its name, the seconds to ask it, and the seconds saved.
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
