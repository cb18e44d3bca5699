"""What a forward pass costs on this machine: by its tokens, and by what they look back at.

    seconds = fixed * f(1) + marginal * (f(T) - f(1) + a * W)

T is the tokens of the pass and W its attention work: the pairs of a token and one that it looks
back at. f and a are measured at the start (`calibration`). A machine is slower one minute than the
next, and not evenly: a neighbour on the same cores takes half of the arithmetic that many tokens
need and little of the memory's speed that one token waits for (demo pair, two cores of an AMD EPYC:
20 tokens took 1.03 ms and a minute later 1.9, one token 0.20 and 0.21). So every pass that is seen
moves both factors, each by its part in the pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

_RATE = 0.1  # of what a pass was off that the factors take over
OUTLIER = 2.0  # what takes so many times as long as expected, or more, counts as so much: it waited
_SHOWN_PAIRS = 1_000_000  # the unit in which people are told what attention costs


def mean_with(known: float, seconds: float, weight: float) -> float:
    """A running mean of times with one more, which counts as `OUTLIER` times the mean at most.

    Args:
        known: the mean so far; 0 before the first, which is taken as it is.
        seconds: the new one.
        weight: of it.
    """
    known = known or seconds
    return known + weight * (min(seconds, OUTLIER * known) - known)


class CostModel:
    """Costs of one model's passes. Used by the engine's thread; `table` by any.

    Args:
        sizes: tokens of the passes that were measured, ascending from 1.
        seconds: what each took. A narrower pass never costs more: since noise only adds time, where
            one seems to it is taken to cost what the wider one did.
        pair_seconds: what attention costs for each token that a token looks back at.

    Attributes:
        fixed: how many seconds one of the measured ones takes now, of a pass over one token.
        marginal: likewise, of what more tokens add.
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
        # What tokens add to a pass over one, on straight lines between the sizes that were
        # measured; beyond the widest each adds what the last ones did.
        added = np.interp(range(1, self.sizes[-1] + 1), self.sizes, self.seconds) - self.seconds[0]
        self._added = [0.0, *(float(item) for item in added)]

    def cost(self, tokens: int, work: float = 0.0) -> float:
        """Seconds that a pass takes now.

        Args:
            tokens: of the pass; 0 costs nothing.
            work: its pairs of tokens, see `Batch.attention_work`.
        """
        return sum(self._parts(tokens, work))

    def costs(self, tokens: int, more: int) -> list[float]:
        """Seconds that passes take now: over so many tokens, one more, and so on up to `more`."""
        fixed, marginal, last = self.fixed * self.seconds[0], self.marginal, tokens + more
        added = self._added[tokens : last + 1]  # what is beyond the widest is missing there
        added += map(self._added_by, range(tokens + len(added), last + 1))
        return [fixed + marginal * item for item in added]

    def pairs(self, count: float) -> float:
        """Seconds that so many pairs of tokens add to a pass."""
        return self.marginal * self.pair_seconds * count

    def tokens_within(self, seconds: float, tokens: int, work: float, position: int) -> int:
        """Most tokens of a prompt that a pass may take besides, so that it lasts no longer.

        Args:
            seconds: of the whole pass.
            tokens: that the pass has already.
            work: likewise.
            position: of the prompt's first token.
        """

        def lasts(more: int) -> float:
            return self.cost(tokens + more, work + more * (position + more / 2))

        most = len(self._added)  # costs ascend, so a search by halves finds the place
        return max(0, bisect_right(range(most + 1), seconds, key=lasts) - 1)

    def observe(self, tokens: int, work: float, seconds: float) -> None:
        """Take in what a pass took."""
        fixed, marginal = self._parts(tokens, work)
        expected = fixed + marginal
        off = min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1
        # Normalized least mean squares (Nagumo and Noda 1967), in shares of what was expected.
        step = _RATE * off * expected / (fixed * fixed + marginal * marginal)
        self.fixed *= 1 + step * fixed
        self.marginal *= 1 + step * marginal

    def table(self, kind: str = "tokens") -> Iterator[tuple[str, int, float]]:
        """Kind, size, and the seconds that it takes now: passes by tokens, then attention.

        Attention is told by a million pairs of tokens. For any thread: factors that move meanwhile
        are as true as those before.
        """
        for size in self.sizes:
            yield kind, size, self.cost(size)
        if kind == "tokens":
            yield "attention", 1, self.pairs(_SHOWN_PAIRS)

    def _parts(self, tokens: int, work: float) -> tuple[float, float]:
        """Seconds of a pass that one token takes, too, and seconds that the others add."""
        if not tokens:
            return 0.0, 0.0
        return (
            self.fixed * self.seconds[0],
            self.marginal * (self._added_by(tokens) + self.pair_seconds * work),
        )

    def _added_by(self, tokens: int) -> float:
        """Seconds that all tokens but the first added when the costs were measured."""
        widest = len(self._added) - 1
        if tokens <= widest:
            return self._added[tokens]
        return self.seconds[-1] * tokens / widest - self.seconds[0]
