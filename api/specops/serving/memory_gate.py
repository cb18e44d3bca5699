"""Refuses requests for lack of memory, before the kernel kills the service.

The memory plan reserves the KV cache and the memory of the passes at the start. A request that
finds no free block waits, or is preempted and computed again, so a full KV cache is no reason to
refuse. There are three reasons: the admitted requests may take many times the tokens of the KV
cache; less memory is left than the plan spared, because something else in the container grew; the
tasks of the machine mostly wait for memory, so a queue would only grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from specops.runtime.memory_plan import spare_bytes
from specops.system.memory import Pressure, page_cache_room, read_memory, read_pressure

CACHES_AHEAD = 8  # admitted requests may take this many times the tokens of the KV cache
_LOW_SHARE = 0.5  # of the memory that the plan spared; less is left only if something grew
_STALLED_SHARE = 0.5  # share of the time in which every task waited for memory
_ROOM_SECONDS = 0.1  # how long a reading of memory stays valid; a reading takes 0.1 ms
_PRESSURE_SECONDS = 1.0  # the share of stalled time is a mean over at least this time


class Shed(StrEnum):
    """Why a request is refused."""

    KV_TOKENS = "kv_tokens"
    MEMORY = "memory"
    PRESSURE = "pressure"


class MemoryGate:
    """Decides whether there is memory for one more request. Used on the event loop.

    An idle service refuses no request: otherwise a refused request would never get its chance.

    Args:
        kv_tokens: tokens of the KV cache, all requests together.
        slots: number of requests that run at the same time.
        room: returns the bytes that can still be allocated below the cap.
        pressure: returns the seconds lost to lack of memory; None if the kernel keeps no figures.
        limit: the cap in bytes; None: the cap of this process.
        clock: returns seconds.
    """

    def __init__(
        self,
        kv_tokens: int,
        slots: int,
        *,
        room: Callable[[], int] = page_cache_room,
        pressure: Callable[[], Pressure | None] = read_pressure,
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_tokens = CACHES_AHEAD * kv_tokens
        self._slots = slots
        self._low = _LOW_SHARE * spare_bytes(read_memory().limit if limit is None else limit)
        self._read_room, self._read_pressure, self._clock = room, pressure, clock
        self._room, self._room_at = room(), clock()
        self._stalls, self._stalls_at, self._stalled = self._stall_seconds(), clock(), 0.0

    def refusal(self, *, promised_tokens: int, tokens: int, in_flight: int) -> Shed | None:
        """Return why the gate refuses a request, or None if the request may enter.

        Args:
            promised_tokens: tokens that the requests in flight may take (prompts and answers).
            tokens: tokens that this request may take.
            in_flight: number of requests that run or wait.
        """
        if not in_flight:
            return None
        if promised_tokens + tokens > self._most_tokens:
            return Shed.KV_TOKENS
        self._read()
        if self._room < self._low:
            return Shed.MEMORY
        # All slots share a pass over the weights, so one more request in a free slot costs little.
        if self._stalled > _STALLED_SHARE and in_flight >= self._slots:
            return Shed.PRESSURE
        return None

    def _read(self) -> None:
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
