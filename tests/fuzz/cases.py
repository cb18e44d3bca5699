"""What all fuzzers have in common: how many cases they try, and what a finding is."""

import itertools
import time
from collections.abc import Iterator

TRIES = 3  # of what took too long: processor time has what a hypervisor took, in a pause


class FindingError(AssertionError):
    """Something happened that must not; the message says with which seed."""


def seeds(cases: int, seconds: float, first: int) -> Iterator[int]:
    """Yield the seeds of so many cases; with 0, of as many as there is time for."""
    end = time.monotonic() + seconds
    for seed in itertools.count(first):
        if seed - first >= cases if cases else time.monotonic() >= end:
            return
        yield seed
