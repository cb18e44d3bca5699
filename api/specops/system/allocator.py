"""Returns freed memory to the system: all threads share one arena, and large blocks are mapped.

glibc gives each thread an arena to allocate from. Memory that one thread allocates and another
frees, as with requests and their tokens, stays in the first thread's arena. So the service's memory
depended on which thread did what: 124 to 127 MB during an hour of mixed load (`python -m
tests.soak`), 106.5 to 108.8 MB with one arena. Bursts of eight requests are as fast with one arena.

glibc maps each large block separately, and unmaps it when it is freed. But after the first such
free, it puts blocks of that size into the heap. There a small block may settle in the hole that a
large one left, and the next large one takes 1.8 MB elsewhere. In such steps memory grew, or shrank,
by 6 MB in an hour. With a fixed threshold the service takes 14 MB less, and answers are as fast.

Small blocks leave holes, and glibc returns only the free memory at the heap's end. So the heap
never shrinks. Under load the service needs it again; at rest `give_back` returns the holes.

Loading a vocabulary of 262,144 tokens leaves holes of 80 MB. Blocks of requests then spread over
them, and 200 requests occupied 70 MB that they did not need. So `close_holes` takes the holes out
of use, and blocks go to the heap's end.
"""

import ctypes
import logging
import os

# M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h, by the variables of the
# environment that override them in any program. The last two values are glibc's initial ones.
_LIMITS = {
    "MALLOC_ARENA_MAX": (-8, 1),  # limit, value
    "MALLOC_MMAP_THRESHOLD_": (-3, 128 << 10),
    "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 10),
}
_LARGEST_HOLE = 1 << 26
log = logging.getLogger(__name__)


def configure_malloc() -> None:
    """Set the limits; call this before threads start. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for variable, (limit, value) in _LIMITS.items():
        if variable not in os.environ and not mallopt(limit, value):
            log.warning("freed memory may not return to the system: mallopt refused %d", limit)


def give_back() -> None:
    """Return free memory to the system: 1.1 ms for a heap of 40 MB. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def close_holes() -> None:
    """Return free memory to the system, and take the heap's large holes out of use.

    Each hole stays allocated, but its pages are never touched. Does nothing without glibc.
    """
    give_back()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc))
    end = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t)(("sbrk", libc))(0) or 0
    size = _LARGEST_HOLE
    while size >= _LIMITS["MALLOC_MMAP_THRESHOLD_"][1]:  # smaller ones may lie at the end
        block = malloc(size)
        if block is None or block > end:  # no hole is that large: glibc mapped the block
            libc.free(ctypes.c_void_p(block))
            size //= 2
