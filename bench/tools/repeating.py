"""Calls a function periodically during a measurement."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(look: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call a function every `seconds` seconds, in a separate thread, until the block ends."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(seconds):
            look()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
