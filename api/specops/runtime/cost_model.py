"""Predicts what a forward pass costs on this machine, from its tokens and its attention work.

A pass waits for memory or for arithmetic, whichever takes longer (the roofline model, Williams et
al. 2009, https://doi.org/10.1145/1498765.1498785):

    seconds = max(memory * m(T), memory * g(0) + arithmetic * (g(T) - g(0)))
              + arithmetic * a * W

T is the number of tokens in the pass. W is its attention work: the number of pairs of a token and
a token that it looks at. `calibration` measures a, and one curve at the start: m is its beginning,
for as long as arithmetic hides behind memory, and g the rest. `_split` tells them apart.

The machine's speed changes from minute to minute, and not evenly: its neighbours take a part of
the memory's speed in one hour and of the cores' arithmetic in the next. TinyLlama's shape took
14.0, 14.7 and 23.5 ms for 4, 8 and 16 tokens in an hour of slow memory, and 9.5, 14.5 and 25.1 in
another (two cores, AMD EPYC, Zen 5). So every observed pass moves the factor that it waited for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

_RATE = 0.1  # the factors take over this share of a pass's error
OUTLIER = 2.0  # a time that is off by a larger factor counts as off by this one: the pass waited
_SHOWN_PAIRS = 1_000_000  # the unit in which the table shows what attention costs
# Passes of so many tokens are taken to wait for arithmetic. `calibration` measures wider ones with
# fewer logits.
_WIDE = range(16, 65)


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
        memory: what a pass that waits for memory takes now, relative to the measured time.
        arithmetic: likewise for what tokens add to a pass that waits for arithmetic.
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
        self.memory = self.arithmetic = 1.0
        # By number of tokens, seconds of memory, which end where they stay the same, and seconds
        # that tokens add to arithmetic.
        self._reading, self._added, self._least = _split(self.sizes, self.seconds)

    def cost(self, tokens: int, work: float = 0.0) -> float:
        """Seconds that a pass takes now.

        Args:
            tokens: number of tokens; 0 costs nothing.
            work: pairs of tokens, see `Batch.attention_work`.
        """
        return sum(self._parts(tokens, work))

    def costs(self, tokens: int, more: int) -> list[float]:
        """Seconds that passes over `tokens`, `tokens` + 1, … `tokens` + `more` tokens take now."""
        arithmetic, last = self.arithmetic, tokens + more
        added = self._added[tokens : last + 1]  # ends at the widest measured pass
        added += map(self._added_by, range(tokens + len(added), last + 1))
        least, most = self.memory * self._least, self._read_by(last)
        found = [least + arithmetic * item for item in added]
        for place, computing in enumerate(found):
            if computing >= most:  # wider passes wait for arithmetic, too
                break
            found[place] = max(computing, self._read_by(tokens + place))
        return found

    def pairs(self, count: float) -> float:
        """Seconds that `count` pairs of tokens add to a pass."""
        return self.arithmetic * self.pair_seconds * count

    def tokens_within(
        self, seconds: float, tokens: int, work: float, position: int, each: float = 0.0
    ) -> int:
        """Largest number of prompt tokens with which a pass still takes no longer than `seconds`.

        Args:
            seconds: allowed for the whole pass.
            tokens: number of tokens that the pass has already.
            work: attention work that the pass has already.
            position: of the first prompt token.
            each: seconds that each prompt token takes after the pass.
        """

        def duration(more: int) -> float:
            return self.cost(tokens + more, work + more * (position + more / 2)) + more * each

        most = len(self._added)  # costs ascend, so bisection finds the number
        return max(0, bisect_right(range(most + 1), seconds, key=duration) - 1)

    def observe(self, tokens: int, work: float, seconds: float) -> None:
        """Learn from the time that a pass took."""
        memory, arithmetic = self._parts(tokens, work)
        expected = memory + arithmetic
        error = min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1
        # Normalized least mean squares (Nagumo and Noda 1967), relative to the expected time.
        step = _RATE * error * expected / (memory * memory + arithmetic * arithmetic)
        self.memory *= 1 + step * memory
        self.arithmetic *= 1 + step * arithmetic

    def table(self, kind: str = "tokens") -> Iterator[tuple[str, int, float]]:
        """Yield kind, size and current seconds: of passes by tokens, then of a million pairs.

        Any thread may call it: it does not matter which of two values of a factor the thread sees.
        """
        for size in self.sizes:
            yield kind, size, self.cost(size)
        if kind == "tokens":
            yield "attention", 1, self.pairs(_SHOWN_PAIRS)

    def _parts(self, tokens: int, work: float) -> tuple[float, float]:
        """Seconds of a pass that go with the memory's speed, and those that go with arithmetic."""
        if not tokens:
            return 0.0, 0.0
        memory = self._read_by(tokens)
        least, added = self.memory * self._least, self.arithmetic * self._added_by(tokens)
        attention = self.pairs(work)
        return (memory, attention) if memory >= least + added else (least, added + attention)

    def _read_by(self, tokens: int) -> float:
        """Seconds that a pass waits for memory now, if it does."""
        return self.memory * self._reading[min(tokens, len(self._reading) - 1)]

    def _added_by(self, tokens: int) -> float:
        """Seconds that tokens added to arithmetic when the costs were measured.

        Beyond the widest measured pass each token costs its share of that pass.
        """
        widest = len(self._added) - 1
        if tokens <= widest:
            return self._added[tokens]
        return self.seconds[-1] * tokens / widest - self._least


def _split(
    sizes: Sequence[int], seconds: Sequence[float]
) -> tuple[list[float], list[float], float]:
    """Tell from a measured curve how long passes wait for memory, and how long for arithmetic.

    Wide passes wait for arithmetic, so their slope is that of arithmetic. A line with this slope
    goes on below the curve where passes wait for memory, which is up to where it reaches a single
    token's time. Without two wide passes, all tokens but the first add to arithmetic.

    Args:
        sizes: as in `CostModel`.
        seconds: ascending.

    Returns:
        By number of tokens, the seconds of memory, as far as they rise, and those that arithmetic
        adds; and the seconds of arithmetic without any token.
    """
    tokens = np.arange(sizes[-1] + 1)
    curve = np.interp(tokens, sizes, seconds)
    wide = [index for index, size in enumerate(sizes) if size in _WIDE]
    slope, waits = 0.0, 1
    if len(wide) > 1:
        first, last = wide[0], wide[-1]
        slope = (seconds[last] - seconds[first]) / (sizes[last] - sizes[first])
        line = seconds[first] - slope * (sizes[first] - tokens)
        waits = int(np.argmax(line[1:] >= seconds[0])) + 1
    hidden = np.clip(curve[waits] - slope * (waits - tokens), 0, curve)
    arithmetic = np.where(tokens < waits, hidden, curve)
    added = arithmetic - arithmetic[0]
    return curve[: waits + 1].tolist(), added.tolist(), float(arithmetic[0])
