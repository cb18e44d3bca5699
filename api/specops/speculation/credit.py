"""Measures a drafter's worth: the seconds that it saved minus the seconds that it took.

Accounts decide whether a drafter is asked. Each drafter has one account over all requests for each
level of load, and each request has one for every drafter that it has asked. While the balance
lasts, the drafter is asked. A request may overdraw its account by what the drafter's common one can
cover: one rejected draft proves nothing, and drafts pay best if all requests draft together.

Once a balance is used up, the drafter is tried again after a wait, in case the text has changed.
The wait depends on the last loss, and grows until asking takes only a small share of the time.
Meanwhile the request rests: its steps are those of a request without a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHARE = 0.0025  # of the time that a drafter may lose when it does not pay
_FIRST_SHARE = 0.16  # the same before the first loss; halved by each loss
_INHERITED = 4  # maximum number of other requests' losses that count for a new request


class Credit:
    """The balance of one drafter. Times are seconds by any clock that never goes back.

    Args:
        seconds: initial balance, not below 0.
    """

    __slots__ = ("_due", "_losses", "seconds")

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._due = 0.0  # when to ask again
        self._losses = 0  # how often the balance was used up since it was half full

    def of_request(self) -> Credit:
        """A new request's account.

        The drafter is asked again soon, however often it did not pay for others: it may pay for
        this text.
        """
        own = Credit()
        own._losses = min(self._losses, _INHERITED)
        return own

    def covers(self, most: float) -> float:
        """Seconds by which each request may overdraw its own account, at most half of `most`."""
        return min(self.seconds, most) / 2

    def due(self, covered: float = 0.0) -> float:
        """When the drafter may be tried again; 0 while it pays, or its loss is covered."""
        return 0.0 if self.seconds + covered > 0 else self._due

    def postpone(self, seconds: float) -> None:
        """Try the drafter that much later."""
        self._due += seconds

    def book(
        self, net: float, most: float, now: float, share: float = 1.0, covered: float = 0.0
    ) -> None:
        """Book the drafter's gain minus its cost.

        Args:
            net: seconds; below 0 if it took longer than it saved.
            most: maximum balance, and the maximum loss that waiting has to make up for.
            now: the current time.
            share: this account's part of the time that may be lost, of all accounts that wait.
            covered: seconds by which it may be overdrawn.
        """
        self.seconds = min(self.seconds + net, most)
        if self.seconds > most / 2:
            self._losses = 0
        if (lost := -self.seconds - covered) > 0:
            self._losses += 1
            part = share * max(SHARE, _FIRST_SHARE * 0.5**self._losses)
            self._due = min(max(self._due, now) + lost / part, now + most / (share * SHARE))
            self.seconds = -covered


@dataclass(slots=True)
class SpeculationState:
    """One request's gains from speculation so far. The controller writes it.

    Attributes:
        adaptive: whether the controller chooses the drafters and draft lengths.
        sampled: whether its tokens are drawn.
        since: when a drafter could first be asked; None: not yet.
        due: the request rests until this time: no drafter is asked.
        credits: its accounts, by name of each drafter that was asked.
        saved: seconds saved over plain decoding, by the cost models.
        adjusting: mean seconds to adjust the logits of one position: penalties, biases, forbidden
            words and grammars; 0 if the request has none.
    """

    adaptive: bool = True
    sampled: bool = False
    since: float | None = None
    due: float = 0.0
    credits: dict[str, Credit] = field(default_factory=dict)
    saved: float = 0.0
    adjusting: float = 0.0
