"""Predicts the cost of a forward pass on this machine from its tokens, logits and attention work.

A pass waits for memory or for arithmetic, whichever takes longer (the roofline model, Williams et
al. 2009, https://doi.org/10.1145/1498765.1498785):

    seconds = max(memory * m(T), memory * g(0) + arithmetic * (g(T) - g(0) - l * N))
              + arithmetic * a * W + memory * s * (S - 1)

T is the number of tokens in the pass. N of them need no logits, as all tokens of a prompt but its
last: in SmolLM2, logits are a quarter of a token's arithmetic. W is the attention work: the number
of pairs of a token and a token that it attends to. S is the number of spans. In models with
recurrent states, each span reads and writes its own state, and s is not 0. `calibration` measures
l, a, s and one curve at the start. m is the first part of that curve, where memory hides the
arithmetic, and g is the rest. `_split` tells them apart.

The machine's speed changes from minute to minute, and not evenly: its neighbours take a part of
the memory's speed in one hour and of the cores' arithmetic in the next. TinyLlama's shape took
14.0, 14.7 and 23.5 ms for 4, 8 and 16 tokens in an hour of slow memory, and 9.5, 14.5 and 25.1 in
another (two cores, AMD EPYC, Zen 5). So every observed pass moves the factor that it waited for.

Single points of the measured curve are up to a tenth off: the least time of ten tokens may be from
a better moment than that of eight. Whoever looks for the best size finds just those. So passes of
two similar sizes that follow each other are compared, and correct each other's point: at first by
much, then by less. A size has one correction for when it waits for memory, and one for arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

_RATE = 0.1  # the factors absorb this share of a pass's error
OUTLIER = 2.0  # larger errors are clipped to this factor: the pass was preempted
_POINTS = 64  # passes of more tokens have no correction of their own
# Of the difference between two passes' errors, to each one's correction: at first, at last.
_FIRST_RATE, _POINT_RATE = 1 / 8, 1 / 64
_MOST_DIFFERENT = 0.25  # larger differences are clipped: one of the passes was preempted
_MOST_CORRECTED = 1.5
# The time of shorter passes depends on what the step before has left in the processor's caches.
_LEAST_COMPARED = 1e-3
_SHOWN_PAIRS = 1_000_000  # the table's unit for the cost of attention
# Passes of this many tokens are assumed to wait for arithmetic. Most wider ones are prompts.
_WIDE = range(16, 65)


def mean_with(known: float, seconds: float, weight: float) -> float:
    """Update a running mean; a time above `OUTLIER` times the mean is clipped to that.

    Args:
        known: the mean so far, in seconds; 0 before the first time, which becomes the mean.
        seconds: the new time.
        weight: weight of the new time, 0 to 1.
    """
    known = known or seconds
    return known + weight * (min(seconds, OUTLIER * known) - known)


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Cost of long prompts, as measured at the start.

    Attributes:
        token_seconds: seconds per token.
        pair_seconds: seconds per pair of a token and a token that it attends to.
    """

    token_seconds: float
    pair_seconds: float = 0.0

    def seconds(self, tokens: int, position: int = 0) -> float:
        """Seconds for this many prompt tokens, starting at a position."""
        return tokens * (self.token_seconds + self.pair_seconds * (position + tokens / 2))

    def tokens(self, seconds: float, position: int) -> float:
        """Number of prompt tokens, starting at a position, that fit into a time; not rounded."""
        # seconds = n * each + pair_seconds * n^2 / 2, as a token attends to all before it
        each = self.token_seconds + self.pair_seconds * position
        return 2 * seconds / (each + sqrt(each * each + 2 * self.pair_seconds * seconds))


class _Pass(NamedTuple):
    """An observed pass; see `CostModel.cost`."""

    tokens: int
    work: float
    spans: int
    seconds: float


class CostModel:
    """Costs of one model's passes. For the engine's thread; any thread may read `table`.

    Args:
        sizes: numbers of tokens in the measured passes, ascending from 1.
        seconds: measured time of each, where all tokens need logits. Noise only adds time, so a
            pass that took longer than a wider one gets the wider one's cost.
        pair_seconds: measured time per pair of tokens in attention.
        span_seconds: measured time per span's recurrent state.
        logit_seconds: measured time that a token's logits add to a pass that waits for arithmetic.

    Attributes:
        memory: current time of a pass that waits for memory, relative to the measured time.
        arithmetic: the same for a pass that waits for arithmetic.

    Raises:
        ValueError: the sizes do not ascend from 1, or a time is not positive.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        pair_seconds: float = 0.0,
        span_seconds: float = 0.0,
        logit_seconds: float = 0.0,
    ) -> None:
        if not sizes or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes must ascend from 1: {sizes}")
        if min(seconds) <= 0 or min(pair_seconds, span_seconds, logit_seconds) < 0:
            raise ValueError("costs must be above 0")
        self.sizes = list(sizes)
        least = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        self.seconds = [float(item) for item in least]
        self.pair_seconds, self.span_seconds = pair_seconds, span_seconds
        self.logit_seconds = logit_seconds
        self._widest = sizes[-1]
        self._curves = _split(self.sizes, self.seconds)
        # As lists, too: reading a single number from an array takes longer.
        self._reading, self._added = (curve.tolist() for curve in self._curves[:2])
        self._least = self._curves[2]
        # By number of tokens, of a pass that waits for arithmetic and of one that waits for memory.
        # Those beyond `_POINTS` stay 1.
        self._corrections = [1.0] * (self._widest + 1), [1.0] * (self._widest + 1)
        self._compared: Counter[tuple[int, int]] = Counter()  # pairs of sizes
        self._last: _Pass | None = None  # the latest pass observed
        self.set_speed(1.0, 1.0)

    @property
    def reading(self) -> PrefillSpeed:
        """The speed of long prompts as measured, without later observations."""
        each = self.seconds[-1] / self._widest - self.logit_seconds
        return PrefillSpeed(each, self.pair_seconds)

    def set_speed(self, memory: float, arithmetic: float) -> None:
        """Set both factors; see the attributes of the class."""
        self.memory, self.arithmetic = memory, arithmetic

    def cost(
        self, tokens: int, work: float = 0.0, spans: int = 1, logits: int | None = None
    ) -> float:
        """Seconds that a pass takes now.

        Beyond the widest measured pass, each token costs an equal share of that pass.

        Args:
            tokens: number of tokens; 0 costs nothing.
            work: number of token pairs in attention; see `Batch.attention_work`.
            spans: number of sequences that the tokens belong to.
            logits: number of the tokens that need logits; None: all.
        """
        added = self.attention_seconds(work) + self.state_seconds(spans)
        if not tokens:
            return added
        if tokens > self._widest:
            share = self.seconds[-1] / self._widest
            others = 0 if logits is None else tokens - logits
            more = share * (tokens - self._widest) - self.logit_seconds * others
            return self.cost(self._widest) + self.arithmetic * more + added
        computing, reading = self._waits(tokens, 0 if logits is None else tokens - logits)
        return (reading if reading > computing else computing) + added

    def costs(self, tokens: int, more: int) -> list[float]:
        """Seconds that passes over `tokens`, `tokens` + 1, … `tokens` + `more` tokens take now.

        `tokens` is at least 1. All tokens need logits. Attention and recurrent states are not
        included.
        """
        last = tokens + more
        reading, added = (curve[tokens : last + 1] for curve in self._curves[:2])
        of_arithmetic, of_memory = (some[tokens : last + 1] for some in self._corrections)
        computing = (self.memory * self._least + self.arithmetic * added) * of_arithmetic
        measured = np.maximum(computing, self.memory * reading * of_memory)
        beyond = range(tokens + len(measured), last + 1)
        return [*measured.tolist(), *map(self.cost, beyond)]

    def attention_seconds(self, pairs: float) -> float:
        """Seconds that attention over a number of token pairs adds to a pass."""
        return self.arithmetic * self.pair_seconds * pairs

    def state_seconds(self, spans: int) -> float:
        """Seconds that the states of all spans but the first add to a pass."""
        return self.memory * self.span_seconds * max(0, spans - 1)

    def tokens_within(
        self,
        seconds: float,
        tokens: int = 0,
        work: float = 0.0,
        position: int = 0,
        *,
        each: float = 0.0,
        logits: int | None = None,
    ) -> int:
        """Maximum number of prompt tokens that a pass can add within `seconds`.

        Args:
            seconds: time limit of the whole pass.
            tokens: number of tokens already in the pass.
            work: attention work already in the pass.
            position: position of the first prompt token.
            each: seconds that each prompt token takes after the pass.
            logits: number of tokens in the pass that need logits; None: all already in it.
        """
        scored = tokens if logits is None else logits

        def duration(more: int) -> float:
            pairs = work + more * (position + more / 2)
            return self.cost(tokens + more, pairs, logits=scored) + more * each

        # Costs hardly ever fall as passes grow, so bisection works.
        return max(0, bisect_right(range(self._widest + 2), seconds, key=duration) - 1)

    def observe(
        self, tokens: int, work: float, seconds: float, spans: int = 1, logits: int | None = None
    ) -> None:
        """Learn from the time that a pass took.

        Args:
            tokens: number of tokens.
            work: attention work; see `cost`.
            seconds: the time.
            spans: number of sequences.
            logits: number of tokens that needed logits; None: all. A prompt's pass corrects no
                point: these are of passes in which all did.
        """
        others = 0 if logits is None else tokens - logits
        expected, states = self.cost(tokens, work, spans, logits), self.state_seconds(spans)
        # The part that scales with the speed of memory; the rest scales with that of arithmetic.
        size = min(tokens, self._widest)
        computing, memory = self._waits(size, others)
        if memory < computing or tokens > size:
            memory = self._corrections[False][size] * self.memory * self._least
        memory += states
        arithmetic = expected - memory
        error = _error(seconds, expected)
        # Normalized least mean squares (Nagumo and Noda 1967), relative to the expected time.
        step = _RATE * error * expected / (memory * memory + arithmetic * arithmetic)
        self.set_speed(self.memory * (1 + step * memory), self.arithmetic * (1 + step * arithmetic))
        last, self._last = self._last, None
        if not others and expected >= _LEAST_COMPARED:
            self._last = _Pass(tokens, work, spans, seconds)
            if last is not None and last.tokens != tokens:
                self._compare(last, self._last)

    def _compare(self, *passes: _Pass) -> None:
        """Correct the points of two passes that followed each other, so at the same speed.

        They must wait for the same, and one has at most twice the tokens of the other: otherwise
        the factors explain the difference. What both take longer than expected is the machine's
        speed, so the sum of all corrections never changes.
        """
        sizes = [item.tokens for item in passes]
        least, most = sorted(sizes)
        if most > min(_POINTS, self._widest, 2 * least):
            return
        reads = self._reads(least)
        if reads != self._reads(most):
            return
        first, then = (
            _error(item.seconds, self.cost(item.tokens, item.work, item.spans)) for item in passes
        )
        longer = min(max(then - first, -_MOST_DIFFERENT), _MOST_DIFFERENT)
        step = longer * max(_POINT_RATE, 1 / (1 / _FIRST_RATE + self._compared[least, most]))
        self._compared[least, most] += 1
        corrections = self._corrections[reads]
        for tokens, change in zip(sizes, (-step, step), strict=True):
            corrected = corrections[tokens] + change
            corrections[tokens] = min(max(corrected, 1 / _MOST_CORRECTED), _MOST_CORRECTED)

    def _waits(self, tokens: int, without_logits: int = 0) -> tuple[float, float]:
        """Seconds of a pass if it waited only for arithmetic, and only for memory."""
        added = self._added[tokens] - self.logit_seconds * without_logits
        computing: float = self.memory * self._least + self.arithmetic * added
        reading: float = self.memory * self._reading[tokens]
        of_arithmetic, of_memory = self._corrections
        return of_arithmetic[tokens] * computing, of_memory[tokens] * reading

    def _reads(self, tokens: int) -> bool:
        """Whether a pass waits for memory."""
        computing, reading = self._waits(tokens)
        return reading >= computing

    def table(self, kind: str = "tokens") -> Iterator[tuple[str, int, float]]:
        """Yield kind, size and current seconds: of passes by tokens, then of a million pairs.

        Any thread may call this: it does not matter whether it sees a factor before or after an
        update.
        """
        for size in self.sizes:
            yield kind, size, self.cost(size)
        if kind == "tokens":
            yield "attention", 1, self.attention_seconds(_SHOWN_PAIRS)


def _error(seconds: float, expected: float) -> float:
    """By how much of the expected seconds a pass took longer; a preempted one at most as long."""
    return min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1


def _split(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[Seconds, Seconds, float]:
    """Split a measured curve into time spent waiting for memory and for arithmetic.

    Wide passes wait for arithmetic, so they give its slope. A line with this slope continues below
    the curve, down to the time of a single token: left of that point passes wait for memory.
    Without two wide passes, every token but the first counts as arithmetic.

    Args:
        sizes: as in `CostModel`.
        seconds: ascending.

    Returns:
        By number of tokens, up to the widest pass: the seconds of memory, and the seconds that the
        tokens add to arithmetic. Then the seconds of arithmetic without any token.
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
    return curve[np.minimum(tokens, waits)], added, float(arithmetic[0])
