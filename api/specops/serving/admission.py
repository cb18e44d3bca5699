"""Admission control: a request is admitted, or refused with 429 before the engine works for it.

Where the queue is full or memory is short, that is before its body is read. Only what its tokens
take of the KV cache is known later, once they are counted.

The memory plan reserves the KV cache and the memory of the passes at the start. A request that
finds no free block waits, or is preempted and computed again, so a full KV cache alone is no reason
to refuse. What is refused is what a longer queue would only make worse; `RefusalReason` lists it.

The cost of a call does not grow with the queue, so a refusal is as fast with a long queue as with a
short one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.runtime.memory_plan import spare_bytes
from specops.serving.request_handle import QueuePosition
from specops.system.memory import Pressure, page_cache_room, read_memory, read_pressure

CACHES_AHEAD = 8  # admitted requests may take this many times the tokens of the KV cache
_LOW_SHARE = 0.5  # of the memory that the plan spared; less is left only if something grew
_STALLED_SHARE = 0.5  # share of the time in which every task waited for memory
_ROOM_SECONDS = 0.1  # how long a reading of memory stays valid; a reading takes 0.1 ms
_PRESSURE_SECONDS = 1.0  # the share of stalled time is a mean over at least this time
_SMOOTHING = 0.1  # weight of the newest request in the mean time that a request holds its slot


class RefusalReason(StrEnum):
    """Why a request is refused."""

    QUEUE_FULL = "queue_full"
    KV_TOKENS = "kv_tokens"
    MEMORY = "memory"  # less is left than was planned: something else in the container grew
    PRESSURE = "pressure"


_MESSAGES = {
    RefusalReason.QUEUE_FULL: "the queue is full",
    RefusalReason.KV_TOKENS: "the requests before this one will fill the KV cache many times over",
    RefusalReason.MEMORY: "memory is running out",
    RefusalReason.PRESSURE: "the machine waits for memory most of the time",
}


class QueueFull(Exception):  # noqa: N818 - a state, not a fault
    """There is no room for the request. `retry_after` is the expected wait in seconds."""

    def __init__(self, retry_after: int, reason: RefusalReason = RefusalReason.QUEUE_FULL) -> None:
        super().__init__(f"{_MESSAGES[reason]}; try again in {retry_after} s")
        self.retry_after = retry_after
        self.reason = reason.value


class AdmissionController:
    """Admits requests or refuses them, by their number and by memory. Used on the event loop.

    Args:
        slots: number of requests that run at the same time.
        queue_size: number of requests that may wait.
        kv_tokens: tokens of the KV cache, all requests together.
        refused: called with the reason of each refusal.
        room: returns the bytes that can still be allocated below the memory limit.
        pressure: returns the seconds lost to lack of memory; None if the kernel keeps no figures.
        limit: the memory limit in bytes; None: this process's.
        clock: returns seconds.
    """

    def __init__(
        self,
        slots: int,
        queue_size: int,
        kv_tokens: int,
        refused: Callable[[str], None],
        *,
        room: Callable[[], int] = page_cache_room,
        pressure: Callable[[], Pressure | None] = read_pressure,
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._capacity = slots + queue_size
        self._most_tokens = CACHES_AHEAD * kv_tokens
        self._refused = refused
        self._requests = 0  # in flight
        self._tokens = 0  # that they may take, prompts and answers
        self._reserved = 0  # requests that are being read and encoded
        self._held_seconds = 0.0  # mean time in a slot; 0 before the first request ends
        self._least_room = _LOW_SHARE * spare_bytes(read_memory().limit if limit is None else limit)
        self._read_room, self._read_pressure, self._clock = room, pressure, clock
        self._room, self._room_at = room(), clock()
        self._stalls, self._stalls_at, self._stalled = self._stall_seconds(), clock(), 0.0

    def check(self, count: int, tokens: int = 0) -> None:
        """Refuse requests if there is no room for them.

        Args:
            count: number of requests that come together.
            tokens: tokens that they may take; 0 if not known yet.

        Raises:
            QueueFull: all slots and the whole queue are taken, or memory is short.
        """
        reason = self._refusal(count, tokens)
        if reason is not None:
            self._refused(reason.value)
            # When half of the waiting requests have got a slot, there is room.
            raise QueueFull(max(1, math.ceil(self._wait() / 2)), reason)

    def reserve(self, count: int = 1) -> Callable[[], None]:
        """Keep room for requests that have arrived but are not ready to enter.

        Returns:
            A function that releases it. Call it before `enter`, or when the requests are dropped; a
            second call does nothing.

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
        tokens = sum(request.tokens for request in requests)
        self.check(len(requests), tokens)
        position = QueuePosition(max(0, self._requests + 1 - self._slots), self._wait())
        self._requests += len(requests)
        self._tokens += tokens
        return position

    def leave(
        self, request: GenerationRequest, reason: FinishReason, stats: GenerationStats | None
    ) -> None:
        """Release an admitted request. If it was completed, learn from its time in the slot."""
        self._requests -= 1
        self._tokens -= request.tokens
        if stats is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            held = stats.prefill_seconds + stats.decode_seconds
            weight = _SMOOTHING if self._held_seconds else 1.0
            self._held_seconds += (held - self._held_seconds) * weight

    def _wait(self) -> float:
        """Mean seconds until a new request gets a slot, if the running requests are half done.

        The order of the queue moves waits between requests: their mean hardly becomes longer.
        """
        if self._requests < self._slots:
            return 0.0
        return self._held_seconds * (self._requests / self._slots - 0.5)

    def _refusal(self, count: int, tokens: int) -> RefusalReason | None:
        if self._requests + self._reserved + count > self._capacity:
            return RefusalReason.QUEUE_FULL
        if not self._requests:  # idle: a request that is refused now would never be served
            return None
        if self._tokens + tokens > self._most_tokens:
            return RefusalReason.KV_TOKENS
        self._read_memory()
        if self._room < self._least_room:
            return RefusalReason.MEMORY
        # All slots share a pass over the weights, so one more request in a free slot costs little.
        if self._stalled > _STALLED_SHARE and self._requests >= self._slots:
            return RefusalReason.PRESSURE
        return None

    def _read_memory(self) -> None:
        now = self._clock()
        if now - self._room_at >= _ROOM_SECONDS:
            self._room, self._room_at = self._read_room(), now
        passed = now - self._stalls_at
        if passed >= _PRESSURE_SECONDS:
            stalls = self._stall_seconds()
            self._stalled = (stalls - self._stalls) / passed
            self._stalls, self._stalls_at = stalls, now

    def _stall_seconds(self) -> float:
        pressure = self._read_pressure()
        return 0.0 if pressure is None else pressure.full
