"""The requests that run or wait: how many there are, what they may take, how long a new one waits.

Nothing here grows with the queue, so a refusal is as fast in front of a long queue as of a short
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specops.request import FinishReason, GenerationRequest, GenerationStats

_SMOOTHING = 0.1  # weight of the newest request in the mean


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a request stands when it is let in.

    `position` is 0 where a slot is free and 1 for the request that gets the next one;
    `wait_seconds` is how long that is expected to take.
    """

    position: int
    wait_seconds: float


class QueueTracker:
    """Counts the requests in flight and what they take. Used by one thread.

    Args:
        slots: requests that run at the same time.
        queue_size: requests that may wait.
    """

    def __init__(self, *, slots: int, queue_size: int) -> None:
        self.slots = slots
        self.capacity = slots + queue_size
        self.tokens = 0
        self._in_flight: dict[str, int] = {}  # what each may take, tokens
        self._seconds = 0.0  # that a request holds its slot, once some have finished

    @property
    def in_flight(self) -> int:
        """Requests that run or wait; `tokens` is what all of them may take together."""
        return len(self._in_flight)

    @property
    def retry_after(self) -> int:
        """Seconds until half of the waiting requests are through: then there is room."""
        return max(1, math.ceil(self._wait() / 2))

    def enter(self, requests: Sequence[GenerationRequest]) -> QueuePosition:
        """Take in requests that follow each other.

        Returns:
            The queue position of the first.
        """
        position = QueuePosition(max(0, self.in_flight + 1 - self.slots), self._wait())
        for request in requests:
            self._in_flight[request.request_id] = request.tokens
            self.tokens += request.tokens
        return position

    def leave(self, request_id: str) -> None:
        """Take a request out."""
        self.tokens -= self._in_flight.pop(request_id)

    def learn(self, finish: FinishReason, stats: GenerationStats) -> None:
        """Take in how long a request held its slot; a cancelled one tells nothing."""
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            held = stats.prefill_seconds + stats.decode_seconds
            self._seconds += (held - self._seconds) * (_SMOOTHING if self._seconds else 1.0)

    def _wait(self) -> float:
        """Seconds until a new request gets a slot; the running ones count as half through."""
        if self.in_flight < self.slots:
            return 0.0
        return self._seconds * (self.in_flight / self.slots - 0.5)
