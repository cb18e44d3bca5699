"""Whether a drafter is asked at all: looking guesses up takes time too, mostly for nothing.

What asking has gained is remembered per request, and over all requests for those to come; apart for
every number of requests in a round, since a shared plain pass gets cheaper with each. Where it has
cost more than it brought, it is still tried within a fixed share of everybody's time: texts turn.
"""

from __future__ import annotations

from specops.acceptance import Outlook

_SHARE = 0.005  # of the time, that may go into asking although it does not pay
_WEIGHT = 1 / 24  # of a step in a mean gain
_FIRST_GAIN = 0.25  # tokens a step, before a drafter was asked: a cold start is no verdict
_MOST_CREDIT = 2.0  # plain steps' worth of time that is saved up
_ONCE = 0.1  # plain steps: what asking takes beyond that is for the prompt, and not taken again
_HICCUP = 32.0  # plain steps: what took longer was waited for: a core, the interpreter's lock


class Asking:
    """Decides by gains and by a credit of time. Used by the engine's thread; seconds are of the
    cost curve, see `costs`.
    """

    def __init__(self) -> None:
        self._gains: dict[tuple[str, int], float] = {}  # by drafter and requests in a round
        self._credit = 0.0
        self._active = 1
        self._plain_step = 0.0

    def begin(self, active: int, plain_step: float) -> None:
        """A round of so many requests, each of whose steps would take so long without guesses."""
        self._active, self._plain_step = active, plain_step

    def pays(self, outlook: Outlook, drafter: str) -> bool:
        """Whether guesses are asked for in this step: they have paid, or it is time to try."""
        return self._gain(outlook, drafter) >= 0 or self._credit > 0

    def asked(self, outlook: Outlook, drafter: str, seconds: float) -> None:
        """Take in what it took to ask and to choose, guesses of a draft model apart."""
        cost = min(seconds, _HICCUP * self._plain_step)
        if self._gain(outlook, drafter) < 0:
            self._credit -= cost
        self.gained(outlook, drafter, -min(_ONCE, cost / self._plain_step))

    def gained(self, outlook: Outlook, drafter: str, tokens: float) -> None:
        """Take in how many tokens more than plain decoding a step with guesses has brought."""
        before = self._gain(outlook, drafter)
        outlook.gains[self._active] = before + _WEIGHT * (tokens - before)
        common = self._common(drafter)
        self._gains[drafter, self._active] = common + _WEIGHT * (tokens - common)

    def earned(self, seconds: float) -> None:
        """Take in the time of all steps of a round's requests that may be asked for."""
        self._credit = min(self._credit + _SHARE * seconds, _MOST_CREDIT * self._plain_step)

    def _gain(self, outlook: Outlook, drafter: str) -> float:
        gain = outlook.gains.get(self._active)
        if gain is None:
            gain = outlook.gains[self._active] = self._common(drafter)
        return gain

    def _common(self, drafter: str) -> float:
        """Of all requests; where so many were not seen, of fewer: those gain at least as much."""
        for active in range(self._active, 0, -1):
            if (gain := self._gains.get((drafter, active))) is not None:
                return gain
        return _FIRST_GAIN
