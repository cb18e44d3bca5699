"""Limits how often a long task reports how far it is."""

import time
from collections.abc import Callable


def every(seconds: float, *, at_once: bool = False) -> Callable[[], bool]:
    """Return a function that is true at most once in `seconds`; at first too if `at_once`."""
    last = float("-inf") if at_once else time.monotonic()

    def due() -> bool:
        nonlocal last
        now = time.monotonic()
        if now - last < seconds:
            return False
        last = now
        return True

    return due
