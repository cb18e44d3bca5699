"""Admission control: a request is let in, or refused with 429 before any work is done.

`queue_tracker` counts the requests that are in and estimates waits, `memory_gate` watches memory. A
refusal says when to come back.
"""

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
    """The queue is full, or memory is. `retry_after` is the expected wait, in seconds."""

    def __init__(self, retry_after: int, shed: Shed | None = None) -> None:
        super().__init__(f"{_FULL[shed]}; try again in {retry_after} s")
        self.retry_after = retry_after
        self.reason = "queue_full" if shed is None else shed.value


class AdmissionController:
    """Lets requests in, and out again. Used on the event loop.

    Args:
        tracker: the requests that run or wait.
        gate: what memory says.
        refused: told the reason of each refusal.
    """

    def __init__(
        self, tracker: QueueTracker, gate: MemoryGate, refused: Callable[[str], None]
    ) -> None:
        self._tracker = tracker
        self._gate = gate
        self._refused = refused
        self._reserved = 0  # for requests that are being parsed and encoded

    def check(self, count: int, tokens: int = 0) -> None:
        """Refuse requests that there is no room for.

        Args:
            count: requests that come together.
            tokens: that they may take; 0 where that is not known yet.

        Raises:
            QueueFull: all slots and the whole queue are taken, or memory is.
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
        """Keep room for requests that have come but are not ready to enter.

        Args:
            count: requests that came together.

        Returns:
            Gives the room up, for good or to be taken by `enter`; idempotent.

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
        """Let requests in, all or none.

        Returns:
            The queue position of the first.

        Raises:
            QueueFull: see `check`.
        """
        self.check(len(requests), sum(request.tokens for request in requests))
        return self._tracker.enter(requests)

    def leave(self, request_id: str, reason: FinishReason, stats: GenerationStats | None) -> None:
        """Take a request out, and learn from what it took how long the others will wait."""
        self._tracker.leave(request_id)
        if stats is not None:
            self._tracker.learn(reason, stats)
