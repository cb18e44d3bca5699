"""What a drafter is worth: the seconds that it brought, less the seconds that it took.

One account decides whether a drafter is asked: each drafter has one over all requests, and each
request one for each drafter that it has asked. While the balance lasts, the drafter is asked. Once
it is used up, the drafter is asked again after a while, to notice when a text changes. The while
follows from what the last time lost, and grows up to where asking takes a small share of the time.
Meanwhile the request rests: its steps are those of a request that has no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHARE = 0.005  # of the time, which a drafter may lose where it does not pay
_FIRST_SHARE = 0.16  # the same for the first time; half as much for each further one
_INHERITED = 4  # of these times, at most, count for a new request if they were other requests'


class Credit:
    """The balance of one drafter. Times are seconds by any clock that goes on.

    Args:
        seconds: the balance at first, not below 0.
    """

    __slots__ = ("_due", "_losses", "seconds")

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._due = 0.0  # when it is asked again; the balance is not below 0
        self._losses = 0  # how often it was used up since it was half full

    def share(self, most: float) -> Credit:
        """A new request's balance: half of this one, and of `most` at most.

        It is asked again soon, however often others were not worth it: its text may be one that is.
        """
        own = Credit(min(self.seconds, most) / 2)
        own._losses = min(self._losses, _INHERITED)
        return own

    @property
    def due(self) -> float:
        """When the drafter may be tried again; long ago where it is worth its time."""
        return 0.0 if self.seconds > 0 else self._due

    def book(self, net: float, most: float, now: float, share: float = 1.0) -> None:
        """Book the drafter's gain, less its cost.

        Args:
            net: seconds, below 0 where it took longer than it saved.
            most: largest balance; as much at most is made up for by waiting.
            now: the time.
            share: the part of the time that this account may use, of all that wait likewise.
        """
        self.seconds = min(self.seconds + net, most)
        if self.seconds > most / 2:
            self._losses = 0
        if self.seconds < 0:
            self._losses += 1
            part = share * max(SHARE, _FIRST_SHARE * 0.5**self._losses)
            due = max(self._due, now) - self.seconds / part
            self._due = min(due, now + most / (share * SHARE))
            self.seconds = 0.0


@dataclass(slots=True)
class SpeculationState:
    """What speculation has brought to one request so far. The controller writes it.

    Attributes:
        adaptive: the controller chooses what is asked and verified for it.
        sampled: its tokens are drawn.
        due: the request rests until this time: no drafter is asked.
        credits: by drafter that was asked.
        saved: seconds that plain decoding would have taken longer, by the models of costs.
        adjusting: mean seconds that it takes to adjust the logits of one position: penalties,
            biases, forbidden words and grammars; 0 where the request has none.
    """

    adaptive: bool = True
    sampled: bool = False
    due: float = 0.0
    credits: dict[str, Credit] = field(default_factory=dict)
    saved: float = 0.0
    adjusting: float = 0.0
