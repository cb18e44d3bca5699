"""Memory that goes back when it is freed: one pool for all threads, large blocks apart.

glibc gives threads pools of their own. What is allocated on one thread and freed on another, as
requests and their tokens are, stays in the first one's pool, and the service's memory goes up and
down with which thread did what: 124 to 127 MB under an hour of mixed load (`python -m
tests.soak`), 106.5 to 108.8 with one pool. Bursts of eight requests are as fast with one.

A large block is mapped by itself and goes back when it is freed, until the first one is: from then
on glibc puts blocks of that size into the heap. There a small block that stays may land in the hole
of a large one, which then takes 1.8 MB elsewhere. By such steps memory grew by 6 MB in an hour, or
shrank. With a fixed limit the service takes 14 MB less. Answers are as fast.

Small blocks leave holes, and glibc gives back only what is free at the heap's end: the most that
requests ever took together stays. Under load it is needed again; at rest holes are given back.
"""

from __future__ import annotations

import ctypes
import logging
import os

# What malloc.h of glibc calls M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, by variables of
# the environment that say otherwise, as for any program. The last two are glibc's own first values.
_LIMITS = {
    "MALLOC_ARENA_MAX": (-8, 1),  # limit, value
    "MALLOC_MMAP_THRESHOLD_": (-3, 128 << 10),
    "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 10),
}
log = logging.getLogger(__name__)


def keep_memory_level() -> None:
    """Call it before threads start. Where the C library is not glibc nothing is done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for variable, (limit, value) in _LIMITS.items():
        if variable not in os.environ and not mallopt(limit, value):
            log.warning("memory may not go back when it is freed: mallopt refused limit %d", limit)


def give_back() -> None:
    """Return the pages of free memory to the system: 1.1 ms for a heap of 40 MB.

    Where the C library is not glibc nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
