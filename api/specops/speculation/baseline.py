"""Measures plain decoding, to which all gains are compared.

The models of costs learn from the steps that are there. Where a pass takes a tenth of a millisecond
these say little about plain decoding: the work on drafts leaves the processor's caches without the
model, so passes with drafts take a fifth longer than they would alone, and a step without drafts
between them takes a tenth longer. Plain decoding would seem that slow, and drafts would seem to
pay. So now and then a few steps in a row ask no drafter, and all but the first are measured.

More often a single step asks none. `CostModel` compares its pass with those before and after it, so
that it learns what draft tokens add. Otherwise passes with drafts could be the only ones for long,
and nothing would say what plain ones take. If drafts gain little, such steps lose next to nothing.
"""

from __future__ import annotations

from specops.runtime.cost_model import mean_with

_STEPS = 8  # in a row
_COLD = 2  # number of them that are not measured
# Number of steps that ask drafters before a plain one: at first, and then twice as many each time.
# From the last number on, what plain steps lose decides, and several in a row may come.
_FIRST, _BETWEEN = 16, 128
_LEAST = 32  # the least number, whatever they seem to lose
_SHARE = 0.002  # of the time that single plain steps may lose, and several in a row
# The work on drafts slows plain steps down by at most this multiple of their time outside passes.
_MOST_SLOWER = 2.0
_WEIGHT = 1 / 32  # of the newest step in the mean
_PRIOR = 8  # number of steps that the first mean counts as


class Baseline:
    """Compares plain steps with what the models of costs expect. For one level of load.

    Attributes:
        factor: seconds of plain decoding, relative to the expected ones.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        # Steps that asked drafters since the last plain one, and since several in a row; at most so
        # many come before a plain one at first.
        self._asked, self._since, self._between = 0, 0, _FIRST
        self._left = self._plain = 0  # plain steps to come, and those so far in a row
        # Of the steps that are compared; 0 seconds are expected where none are.
        self._requests, self._expected, self._least = 0, 0.0, 1.0
        self._seen = False  # one of them was observed
        self._ratio, self._measured = 1.0, _PRIOR  # mean of measured by expected seconds

    @property
    def due(self) -> bool:
        """Whether the next step should ask no drafter."""
        return self._left > 0

    def rested(self) -> None:
        """Count a step in which no drafter was asked."""
        self._plain += 1
        self._left = max(0, self._left - 1)

    def asked(self, requests: int, expected: float, outside: float, speedup: float) -> None:
        """Count a step in which a drafter was asked; the next ones may have to be plain.

        Args:
            requests: number of decoding requests.
            expected: seconds that a plain step takes by the models.
            outside: the part of them that is outside the pass.
            speedup: recent tokens per second, relative to plain decoding.
        """
        self._plain = 0
        if self._left:
            return
        if self._seen:
            self._seen, self._between = False, min(2 * self._between, _BETWEEN)
        self._expected = 0.0
        self._asked += 1
        self._since += 1
        lost = (1 - 1 / speedup) / _SHARE  # steps that make up for a plain one
        steps = _STEPS if self._since >= max(_BETWEEN, (_STEPS - 1) * lost) else 1
        before = max(_LEAST, lost)
        if self._between < _BETWEEN:
            before = min(before, self._between)
        if steps > 1 or self._asked >= before:
            self._left, self._requests, self._expected = steps, requests, expected
            self._asked, self._least = 0, 1 - _MOST_SLOWER * outside / expected
            if steps > 1:
                self._since = 0

    def observe(self, requests: int, seconds: float) -> None:
        """Learn from the latest step if it is one of those to compare.

        Args:
            requests: number of decoding requests.
            seconds: whole time of the step.
        """
        if not self._expected or not self._plain:
            return
        self._seen = True
        if requests == self._requests and _COLD < self._plain <= _STEPS:
            self._measured += 1
            weight = max(_WEIGHT, 1 / self._measured)
            self._ratio = mean_with(self._ratio, seconds / self._expected, weight)
            self.factor = max(self._least, min(self._ratio, 1.0))
