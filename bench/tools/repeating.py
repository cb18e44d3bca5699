"""Calls a function again and again while something is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(look: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call a function every so many seconds, on a thread of its own, until the block ends."""
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
