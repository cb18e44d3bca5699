"""Admission control: a request is admitted, or refused with 429 before any work is done.

The cost of a call does not grow with the queue, so a refusal is as fast with a long queue as with a
short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.serving.memory_gate import MemoryGate, Shed
from specops.serving.request_handle import QueuePosition

_SMOOTHING = 0.1  # weight of the newest request in the mean time that a request holds its slot
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
        slots: number of requests that run at the same time.
        queue_size: number of requests that may wait.
        gate: decides by memory.
        refused: called with the reason of each refusal.
    """

    def __init__(
        self, slots: int, queue_size: int, gate: MemoryGate, refused: Callable[[str], None]
    ) -> None:
        self._slots = slots
        self._capacity = slots + queue_size
        self._gate = gate
        self._refused = refused
        self._reserved = 0  # places for requests that are being parsed and encoded
        self._in_flight: dict[str, int] = {}  # request id -> tokens that the request may take
        self._tokens = 0  # their sum
        self._held_seconds = 0.0  # mean time in a slot; 0 before the first request ends

    def check(self, count: int, tokens: int = 0) -> None:
        """Refuse requests if there is no room for them.

        Args:
            count: number of requests that come together.
            tokens: tokens that they may take; 0 if not known yet.

        Raises:
            QueueFull: all slots and the whole queue are taken, or memory is short.
        """
        shed, in_flight = None, len(self._in_flight)
        full = in_flight + self._reserved + count > self._capacity
        if not full:
            shed = self._gate.refusal(
                promised_tokens=self._tokens, tokens=tokens, in_flight=in_flight
            )
        if full or shed is not None:
            # When half of the waiting requests have got a slot, there is room.
            refusal = QueueFull(max(1, math.ceil(self._wait() / 2)), shed)
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
        position = max(0, len(self._in_flight) + 1 - self._slots)
        wait = self._wait()
        for request in requests:
            self._in_flight[request.request_id] = request.tokens
            self._tokens += request.tokens
        return QueuePosition(position, wait)

    def leave(self, request_id: str, reason: FinishReason, stats: GenerationStats | None) -> None:
        """Remove a request that has ended. If it was completed, learn from its time in the slot."""
        self._tokens -= self._in_flight.pop(request_id)
        if stats is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            held = stats.prefill_seconds + stats.decode_seconds
            weight = _SMOOTHING if self._held_seconds else 1.0
            self._held_seconds += (held - self._held_seconds) * weight

    def _wait(self) -> float:
        """Seconds until a new request gets a slot, if the running requests are half done."""
        if len(self._in_flight) < self._slots:
            return 0.0
        return self._held_seconds * (len(self._in_flight) / self._slots - 0.5)
