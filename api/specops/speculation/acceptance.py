"""How often draft tokens are accepted: by their position, and by what their drafter promised.

The chance that draft token i is accepted, given that those before it were, is estimated from counts
that fade, so that a text that changes is followed. A position that was rarely tried leans on the
one before it: long drafts are neither believed nor ruled out before they were seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_MEMORY = 0.98  # weight of a draft after each newer one: about the last 50 count
_LEAN = 2.0  # drafts' worth of belief in the position before
_FIRST_RATE = 0.6  # belief before anything was seen
TENTHS = 10
_LONG_MEMORY = 0.998  # weight of a promise after each newer one of its tenth: the last 500 count
_TRUST = 20.0  # promises' worth of belief that a drafter is right about itself
_INHERITED = 6.0  # most drafts' worth of belief that a request takes over from those before it


class Acceptance:
    """Estimates from one source's drafts.

    Attributes:
        rates: per position the chance that a draft token is accepted, given that those before it
            were.
        drafts: how many were taken in; those of the estimate that it comes from do not count.
    """

    __slots__ = ("_accepted", "_tried", "drafts", "rates")

    def __init__(self, positions: int) -> None:
        self._tried = [0.0] * positions
        self._accepted = [0.0] * positions
        self.rates = [_FIRST_RATE] * positions
        self.drafts = 0

    def observe(self, draft_tokens: int, accepted: int) -> None:
        """Take in one draft: how many of its tokens were verified, how many were accepted."""
        tried, hits, rates = self._tried, self._accepted, self.rates
        self.drafts += 1
        # What comes after the first rejected token was not tried: its context was wrong.
        reached = min(draft_tokens, accepted + 1)
        before = _FIRST_RATE
        for position in range(len(rates)):
            count, hit = tried[position] * _MEMORY, hits[position] * _MEMORY
            if position < reached:
                count += 1.0
                hit += position < accepted
            tried[position], hits[position] = count, hit
            before = rates[position] = (hit + _LEAN * before) / (count + _LEAN)

    def heir(self) -> Acceptance:
        """A copy that believes the same, less firmly: what a new request starts with."""
        copy = Acceptance(len(self.rates))
        for position, count in enumerate(self._tried):
            share = min(1.0, _INHERITED / count) if count else 0.0
            copy._tried[position] = count * share
            copy._accepted[position] = self._accepted[position] * share
        copy.rates = list(self.rates)
        return copy


class Promises:
    """How a drafter's promises are kept: what its probabilities really come to, in tenths."""

    __slots__ = ("_accepted", "_off", "_promised", "_tried")

    def __init__(self) -> None:
        self._tried = [0.0] * TENTHS
        self._promised = [0.0] * TENTHS
        self._accepted = [0.0] * TENTHS
        self._off = [0.0] * TENTHS  # by how much a promise was too low, in the mean

    def kept(self, promised: Iterable[float]) -> list[float]:
        """What to expect of promised probabilities: each moved as its tenth was off so far."""
        off = self._off
        moved = [value + off[tenth(value)] for value in promised]
        return [0.0 if value < 0.0 else 1.0 if value > 1.0 else value for value in moved]

    def observe(self, promised: Sequence[float], accepted: int) -> None:
        """Take in the promises [k] of a draft whose tokens were all verified."""
        for position, value in enumerate(promised[: accepted + 1]):
            at = tenth(value)
            tried = self._tried[at] = self._tried[at] * _LONG_MEMORY + 1
            told = self._promised[at] = self._promised[at] * _LONG_MEMORY + value
            hits = self._accepted[at] = self._accepted[at] * _LONG_MEMORY + (position < accepted)
            self._off[at] = (hits - told) / (tried + _TRUST)


def tenth(probability: float) -> int:
    """Which tenth a probability belongs to, 0 to 9."""
    return int(probability * TENTHS) if probability < 1 else TENTHS - 1


@dataclass(slots=True)
class SpeculationState:
    """What one request's drafts have been worth so far. Written by the controller.

    Times are in seconds, by the cost model.
    """

    seen: dict[str, Acceptance] = field(default_factory=dict)  # by the drafts' source
    seconds: float = 0.0  # that its steps cost
    plain_seconds: float = 0.0  # that plain decoding would have cost for as many tokens
    look_up_gain: float | None = None  # mean seconds that a look-up saves, less what it takes

    @property
    def speedup(self) -> float:
        """Estimated speed over plain decoding so far; 1 before anything was decoded."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0
