"""What the last minute's steps brought, for gauges that tell of now without a Prometheus."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60


class JumpWindow:
    """Tokens, steps and draft tokens of the last minute, in one-second buckets, for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[list[int]] = deque()  # [second, decoded, steps, drafted]

    def add(self, tokens: int, steps: int, draft_tokens: int) -> None:
        """Count one pass: tokens it decoded, requests that decoded, draft tokens it verified."""
        second = int(self._clock())
        with self._lock:
            if not self._buckets or self._buckets[-1][0] != second:
                self._forget(second)
                self._buckets.append([second, 0, 0, 0])
            bucket = self._buckets[-1]
            bucket[1] += tokens
            bucket[2] += steps
            bucket[3] += draft_tokens

    def average_jump(self) -> float:
        """Return decode tokens per sequence step; 0 with no step in the window."""
        tokens, steps, _ = self._sums()
        return tokens / steps if steps else 0.0

    def draft_length(self) -> float:
        """Return draft tokens per sequence step; 0 with no step in the window."""
        _, steps, draft_tokens = self._sums()
        return draft_tokens / steps if steps else 0.0

    def _sums(self) -> tuple[int, int, int]:
        with self._lock:
            self._forget(int(self._clock()))
            columns = zip(*self._buckets, strict=True) if self._buckets else ((0,),) * 4
            _, tokens, steps, draft_tokens = (sum(column) for column in columns)
        return tokens, steps, draft_tokens

    def _forget(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] <= second - WINDOW_SECONDS:
            self._buckets.popleft()
