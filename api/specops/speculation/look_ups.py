"""Whether looking a text up is worth its time.

A look-up takes some ten microseconds, which nobody notices beside a pass of 20 milliseconds. Beside
one of half a millisecond that eight requests share it is a tenth of what a token takes, and a text
that never repeats itself gives nothing for it. So where look-ups bring less than they take only
some are made: enough to notice that the text has turned.
"""

from __future__ import annotations

from collections.abc import Iterable

from specops.runtime.cost_model import mean_with
from specops.speculation.acceptance import SpeculationState

_WEIGHT = 1 / 32  # of a look-up in a mean
_EVERY = 4  # steps a look-up, where they do not pay


class LookUps:
    """What look-ups bring and take. Used by the engine's thread."""

    def __init__(self) -> None:
        self._gain: float | None = None  # seconds that one saves, less what it takes: all requests'
        self._seconds = 0.0  # that one takes
        self._step = 0

    def due(self, state: SpeculationState) -> bool:
        """Whether a request's text is to be looked up in this step: all those that do not pay are
        in the same one, so that the others take no time for it.
        """
        if not self._step:
            return True
        if state.look_up_gain is None:
            state.look_up_gain = self._gain  # a new request believes what others have learned
        return state.look_up_gain is None or state.look_up_gain >= 0

    def stepped(self) -> None:
        """A step is over."""
        self._step = (self._step + 1) % _EVERY

    def observe(
        self, saved: Iterable[tuple[SpeculationState, float]], seconds: float, token: float
    ) -> None:
        """Take in the look-ups of a step.

        Args:
            saved: for each, seconds that its draft tokens have saved; below 0: that they cost.
            seconds: that one took.
            token: seconds of a token without speculation, which the first ones are hoped to save.
        """
        self._seconds = mean_with(self._seconds, seconds, _WEIGHT)
        for state, worth in saved:
            gain = worth - self._seconds
            self._gain = _moved(token if self._gain is None else self._gain, gain)
            before = state.look_up_gain
            state.look_up_gain = _moved(self._gain if before is None else before, gain)


def _moved(mean: float, value: float) -> float:
    return mean + _WEIGHT * (value - mean)
