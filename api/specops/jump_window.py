"""What the last minute's steps brought, for gauges that tell of now without a Prometheus."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60


class JumpWindow:
    """Tokens, steps and guesses of the last minute, in one-second buckets, for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[list[int]] = deque()  # [second, decode tokens, steps, guesses]

    def add(self, tokens: int, steps: int, guesses: int) -> None:
        """Count one pass: tokens it emitted, sequences in it, tokens guessed for it."""
        second = int(self._clock())
        with self._lock:
            if not self._buckets or self._buckets[-1][0] != second:
                self._forget(second)
                self._buckets.append([second, 0, 0, 0])
            bucket = self._buckets[-1]
            bucket[1] += tokens
            bucket[2] += steps
            bucket[3] += guesses

    def average_jump(self) -> float:
        """Return decode tokens per sequence step; 0 with no step in the window."""
        tokens, steps, _ = self._sums()
        return tokens / steps if steps else 0.0

    def draft_length(self) -> float:
        """Return guesses per sequence step; 0 with no step in the window."""
        _, steps, guesses = self._sums()
        return guesses / steps if steps else 0.0

    def _sums(self) -> tuple[int, int, int]:
        with self._lock:
            self._forget(int(self._clock()))
            columns = zip(*self._buckets, strict=True) if self._buckets else ((0,),) * 4
            _, tokens, steps, guesses = (sum(column) for column in columns)
        return tokens, steps, guesses

    def _forget(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] <= second - WINDOW_SECONDS:
            self._buckets.popleft()
