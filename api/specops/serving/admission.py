"""Admission control: a request is admitted, or refused with 429 before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.serving.memory_gate import MemoryGate, Shed
from specops.serving.queue_tracker import QueuePosition, QueueTracker

_FULL = {
    None: "the queue is full",
    Shed.KV_TOKENS: "the requests before this one will fill the KV cache many times over",
    Shed.MEMORY: "memory is running out",
    Shed.PRESSURE: "the machine waits for memory most of the time",
}


class QueueFull(Exception):  # noqa: N818 - a state, not a fault
    """There is no room for the request. `retry_after` is the expected wait in seconds."""

    def __init__(self, retry_after: int, shed: Shed | None = None) -> None:
        super().__init__(f"{_FULL[shed]}; try again in {retry_after} s")
        self.retry_after = retry_after
        self.reason = "queue_full" if shed is None else shed.value


class AdmissionController:
    """Admits requests or refuses them, by their number and by memory. Used on the event loop.

    Args:
        tracker: counts the requests that run or wait.
        gate: decides by memory.
        refused: called with the reason of each refusal.
    """

    def __init__(
        self, tracker: QueueTracker, gate: MemoryGate, refused: Callable[[str], None]
    ) -> None:
        self._tracker = tracker
        self._gate = gate
        self._refused = refused
        self._reserved = 0  # places for requests that are being parsed and encoded

    def check(self, count: int, tokens: int = 0) -> None:
        """Refuse requests if there is no room for them.

        Args:
            count: number of requests that come together.
            tokens: tokens that they may take; 0 if not known yet.

        Raises:
            QueueFull: all slots and the whole queue are taken, or memory is short.
        """
        tracker, shed = self._tracker, None
        full = tracker.in_flight + self._reserved + count > tracker.capacity
        if not full:
            shed = self._gate.refusal(
                promised_tokens=tracker.tokens, tokens=tokens, in_flight=tracker.in_flight
            )
        if full or shed is not None:
            refusal = QueueFull(tracker.retry_after, shed)
            self._refused(refusal.reason)
            raise refusal

    def reserve(self, count: int = 1) -> Callable[[], None]:
        """Keep places for requests that have arrived but are not ready to enter.

        Returns:
            A function that releases the places. Call it before `enter`, or when the requests are
            dropped; a second call does nothing.

        Raises:
            QueueFull: see `check`.
        """
        self.check(count)
        kept = count
        self._reserved += count

        def release() -> None:
            nonlocal kept
            self._reserved -= kept
            kept = 0

        return release

    def enter(self, requests: Sequence[GenerationRequest]) -> QueuePosition:
        """Admit requests, all or none; return the queue position of the first.

        Raises:
            QueueFull: see `check`.
        """
        self.check(len(requests), sum(request.tokens for request in requests))
        return self._tracker.enter(requests)

    def leave(self, request_id: str, reason: FinishReason, stats: GenerationStats | None) -> None:
        """Remove a request that has ended, and learn from its times."""
        self._tracker.leave(request_id)
        if stats is not None:
            self._tracker.learn(reason, stats)
