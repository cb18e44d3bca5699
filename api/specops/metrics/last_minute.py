"""Means over the steps of the last minute, for readers of `/metrics` without a Prometheus."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60


class LastMinute:
    """Tokens, steps and draft tokens of the last minute, in buckets of a second. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[list[int]] = deque()  # [second, tokens, steps, draft tokens]

    def add(self, tokens: int, steps: int, draft_tokens: int) -> None:
        """Count a pass: decoded tokens, requests that decoded, verified draft tokens."""
        second = int(self._clock())
        with self._lock:
            if not self._buckets or self._buckets[-1][0] != second:
                self._forget(second)
                self._buckets.append([second, 0, 0, 0])
            bucket = self._buckets[-1]
            bucket[1] += tokens
            bucket[2] += steps
            bucket[3] += draft_tokens

    def tokens_per_pass(self) -> float:
        """Return decoded tokens per sequence step; NaN without a step in the window."""
        return self._per_step(1)

    def draft_length(self) -> float:
        """Return draft tokens per sequence step; NaN without a step in the window."""
        return self._per_step(3)

    def _per_step(self, column: int) -> float:
        with self._lock:
            self._forget(int(self._clock()))
            steps = sum(bucket[2] for bucket in self._buckets)
            return sum(bucket[column] for bucket in self._buckets) / steps if steps else math.nan

    def _forget(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] <= second - WINDOW_SECONDS:
            self._buckets.popleft()
