"""Counts the requests that run or wait, and estimates how long a new request will wait.

The cost of a call does not grow with the queue, so a refusal is as fast with a long queue as with a
short one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specops.request import FinishReason, GenerationRequest, GenerationStats

_SMOOTHING = 0.1  # weight of the newest request in the mean


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Place of a request in the queue at its admission.

    Attributes:
        position: 0 if a slot is free; 1 for the request that gets the next slot.
        wait_seconds: expected wait for the slot.
    """

    position: int
    wait_seconds: float


class QueueTracker:
    """Counts the requests in flight and their tokens. Used by one thread.

    Args:
        slots: number of requests that run at the same time.
        queue_size: number of requests that may wait.

    Attributes:
        tokens: sum of the tokens that the requests in flight may take.
    """

    def __init__(self, *, slots: int, queue_size: int) -> None:
        self.slots = slots
        self.capacity = slots + queue_size
        self.tokens = 0
        self._in_flight: dict[str, int] = {}  # request id -> tokens that it may take
        self._seconds = 0.0  # mean time that a request holds its slot; 0 before the first one ends

    @property
    def in_flight(self) -> int:
        """Number of requests that run or wait."""
        return len(self._in_flight)

    @property
    def retry_after(self) -> int:
        """Seconds until half of the waiting requests have got a slot: then there is room."""
        return max(1, math.ceil(self._wait() / 2))

    def enter(self, requests: Sequence[GenerationRequest]) -> QueuePosition:
        """Add requests; return the queue position of the first."""
        position = QueuePosition(max(0, self.in_flight + 1 - self.slots), self._wait())
        for request in requests:
            self._in_flight[request.request_id] = request.tokens
            self.tokens += request.tokens
        return position

    def leave(self, request_id: str) -> None:
        """Remove a request."""
        self.tokens -= self._in_flight.pop(request_id)

    def learn(self, finish: FinishReason, stats: GenerationStats) -> None:
        """Update the mean time in a slot; only requests that were completed count."""
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            held = stats.prefill_seconds + stats.decode_seconds
            self._seconds += (held - self._seconds) * (_SMOOTHING if self._seconds else 1.0)

    def _wait(self) -> float:
        """Seconds until a new request gets a slot, if the running requests are half done."""
        if self.in_flight < self.slots:
            return 0.0
        return self._seconds * (self.in_flight / self.slots - 0.5)
