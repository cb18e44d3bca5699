"""Predicts what a forward pass costs on this machine, from its tokens and its attention work.

    seconds = fixed * f(1) + marginal * (f(T) - f(1) + a * W)

T is the number of tokens in the pass. W is its attention work: the number of pairs of a token and
a token that it looks at. `calibration` measures f and a at the start. The machine's speed changes
from minute to minute, and not evenly: other work on the same cores takes half of the arithmetic
that many tokens need, and little of the memory's speed that one token waits for (demo pair, two
cores of an AMD EPYC: 20 tokens took 1.03 ms and a minute later 1.9, one token 0.20 and 0.21). So
every observed pass moves both factors, each by its part in the pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

_RATE = 0.1  # the factors take over this share of a pass's error
OUTLIER = 2.0  # a time that is off by a larger factor counts as off by this one: the pass waited
_SHOWN_PAIRS = 1_000_000  # the unit in which the table shows what attention costs


def mean_with(known: float, seconds: float, weight: float) -> float:
    """Add a time to a running mean; the time counts as `OUTLIER` times the mean at most.

    Args:
        known: the mean so far; 0 before the first time, which becomes the mean.
        seconds: the new time.
        weight: of the new time.
    """
    known = known or seconds
    return known + weight * (min(seconds, OUTLIER * known) - known)


class CostModel:
    """Costs of one model's passes. For the engine's thread; any thread may read `table`.

    Args:
        sizes: numbers of tokens in the measured passes, ascending from 1.
        seconds: measured time of each. Noise only adds time, so a pass that took longer than a
            wider one is taken to cost what the wider one did.
        pair_seconds: measured time for each pair of tokens in attention.

    Attributes:
        fixed: what the part of one token takes now, relative to the measured time.
        marginal: likewise for what further tokens add.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], pair_seconds: float = 0.0
    ) -> None:
        if not sizes or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes ascend from 1: {sizes}")
        if min(seconds) <= 0 or pair_seconds < 0:
            raise ValueError("costs are above 0")
        self.sizes = list(sizes)
        least = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        self.seconds = [float(item) for item in least]
        self.pair_seconds = pair_seconds
        self.fixed = self.marginal = 1.0
        # Seconds that the tokens behind the first add, on straight lines between measured sizes.
        added = np.interp(range(1, self.sizes[-1] + 1), self.sizes, self.seconds) - self.seconds[0]
        self._added = [0.0, *(float(item) for item in added)]

    def cost(self, tokens: int, work: float = 0.0) -> float:
        """Seconds that a pass takes now.

        Args:
            tokens: number of tokens; 0 costs nothing.
            work: pairs of tokens, see `Batch.attention_work`.
        """
        return sum(self._parts(tokens, work))

    def costs(self, tokens: int, more: int) -> list[float]:
        """Seconds that passes over `tokens`, `tokens` + 1, … `tokens` + `more` tokens take now."""
        fixed, marginal, last = self.fixed * self.seconds[0], self.marginal, tokens + more
        added = self._added[tokens : last + 1]  # ends at the widest measured pass
        added += map(self._added_by, range(tokens + len(added), last + 1))
        return [fixed + marginal * item for item in added]

    def pairs(self, count: float) -> float:
        """Seconds that `count` pairs of tokens add to a pass."""
        return self.marginal * self.pair_seconds * count

    def tokens_within(self, seconds: float, tokens: int, work: float, position: int) -> int:
        """Largest number of prompt tokens with which a pass still takes no longer than `seconds`.

        Args:
            seconds: allowed for the whole pass.
            tokens: number of tokens that the pass has already.
            work: attention work that the pass has already.
            position: of the first prompt token.
        """

        def duration(more: int) -> float:
            return self.cost(tokens + more, work + more * (position + more / 2))

        most = len(self._added)  # costs ascend, so bisection finds the number
        return max(0, bisect_right(range(most + 1), seconds, key=duration) - 1)

    def observe(self, tokens: int, work: float, seconds: float) -> None:
        """Learn from the time that a pass took."""
        fixed, marginal = self._parts(tokens, work)
        expected = fixed + marginal
        error = min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1
        # Normalized least mean squares (Nagumo and Noda 1967), relative to the expected time.
        step = _RATE * error * expected / (fixed * fixed + marginal * marginal)
        self.fixed *= 1 + step * fixed
        self.marginal *= 1 + step * marginal

    def table(self, kind: str = "tokens") -> Iterator[tuple[str, int, float]]:
        """Yield kind, size and current seconds: of passes by tokens, then of a million pairs.

        Any thread may call it: it does not matter which of two values of a factor the thread sees.
        """
        for size in self.sizes:
            yield kind, size, self.cost(size)
        if kind == "tokens":
            yield "attention", 1, self.pairs(_SHOWN_PAIRS)

    def _parts(self, tokens: int, work: float) -> tuple[float, float]:
        """Seconds that a pass over one token takes, and seconds that everything else adds."""
        if not tokens:
            return 0.0, 0.0
        return (
            self.fixed * self.seconds[0],
            self.marginal * (self._added_by(tokens) + self.pair_seconds * work),
        )

    def _added_by(self, tokens: int) -> float:
        """Seconds that the tokens behind the first added when the costs were measured.

        Beyond the widest measured pass each token costs its share of that pass.
        """
        widest = len(self._added) - 1
        if tokens <= widest:
            return self._added[tokens]
        return self.seconds[-1] * tokens / widest - self.seconds[0]
