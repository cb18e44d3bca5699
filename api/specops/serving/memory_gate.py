"""Refuses requests before the kernel kills: by tokens promised, by memory left, by time lost.

The KV cache and the passes have their place from the start (`memory_plan`), and a request that
finds no block waits, or is preempted and computed again: a full cache is no reason to
refuse. These are: more work promised than the cache turns over in a reasonable time; less left
below the cap than the plan spared, because something else in the container grew; and tasks that
mostly wait for memory, where a queue would only grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from specops.runtime.memory_plan import spare_bytes
from specops.system.memory import Pressure, page_cache_room, read_memory, read_pressure

CACHES_AHEAD = 8  # tokens that may be promised, in KV caches full
_LOW_SHARE = 0.5  # of what the plan spared: less than this is left only if something grew
_STALLED_SHARE = 0.5  # of the time, in which every task waited for memory
_ROOM_SECONDS = 0.1  # a look at memory takes 0.1 ms and holds for this long
_PRESSURE_SECONDS = 1.0  # over which stalls are averaged


class Shed(StrEnum):
    """Why a request is turned away."""

    KV_TOKENS = "kv_tokens"
    MEMORY = "memory"
    PRESSURE = "pressure"


class MemoryGate:
    """Decides whether one more request may come. Used on the event loop.

    An idle service refuses nothing: what is refused must get its chance when the others are done.

    Args:
        kv_tokens: what the KV cache holds, all requests together.
        slots: requests that run at the same time at most.
        room: bytes that can still be allocated below the cap.
        pressure: seconds lost to lack of memory; None where the kernel does not say.
        limit: the cap in bytes; None: this process's own.
        clock: seconds.
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
        """Why a request is refused; None where it may come.

        Args:
            promised_tokens: prompts and largest answers of the requests in flight.
            tokens: the request's own.
            in_flight: requests that run or wait.
        """
        if not in_flight:
            return None
        if promised_tokens + tokens > self._most_tokens:
            return Shed.KV_TOKENS
        self._look()
        if self._room < self._low:
            return Shed.MEMORY
        # All slots share a pass over the weights, so a free one is used even then.
        if self._stalled > _STALLED_SHARE and in_flight >= self._slots:
            return Shed.PRESSURE
        return None

    def _look(self) -> None:
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
