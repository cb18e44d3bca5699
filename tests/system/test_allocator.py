"""Threads share one pool of memory, large blocks are mapped apart, and holes are returned."""

import ctypes
import os
import re

import pytest

from specops.system import allocator
from tests.waiting import printed

# Threads allocate blocks that are too large for Python's own allocator, and a large block is freed
# before another is allocated. Then glibc writes how many pools and separate blocks it has.
TELL = """
import ctypes, sys, threading
from specops.system.allocator import configure_malloc
if sys.argv[1] == "level":
    configure_malloc()
held = []
threads = [threading.Thread(target=lambda: held.append(bytearray(50_000))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
bytearray(2_000_000)
held.append(bytearray(500_000))
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""

# A block stays after 20 MB that are freed, so that these are not the end of the heap.
HOLES = """
import re
from pathlib import Path
from specops.system.allocator import give_back, configure_malloc

def megabytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

configure_malloc()
held = [bytearray(b"x" * 2_000) for _ in range(10_000)]
last = bytearray(2_000)
held.clear()
before = megabytes()
give_back()
print(before - megabytes())
"""

# Blocks of 100 KB that lie in a hole of 20 MB, before the hole is closed and after it.
CLOSED = """
import ctypes
from specops.system.allocator import close_holes, configure_malloc

configure_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
*hole, last = (libc.malloc(100_000) for _ in range(200))
for block in hole:
    libc.free(ctypes.c_void_p(block))
for turn in range(2):
    blocks = [libc.malloc(100_000) for _ in range(150)]
    print(sum(hole[0] < block < last for block in blocks))
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
    close_holes()
"""

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="only glibc has such pools"
)


def pools_and_apart(way: str, **variables: str) -> tuple[int, int]:
    """Return the pools of a process with four threads, and its separately mapped blocks."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    told = printed(TELL, way, env=plain | variables)
    (apart,) = re.findall(r'<total type="mmap" count="(\d+)"', told)
    return told.count("<heap nr="), int(apart)


@needs_glibc
def test_threads_share_one_pool_and_large_blocks_lie_apart() -> None:
    before, after = pools_and_apart("plain"), pools_and_apart("level")
    assert before[0] > 1
    assert after[0] == 1
    assert after[1] == before[1] + 1


@needs_glibc
def test_the_environment_may_say_otherwise() -> None:
    assert pools_and_apart("level", MALLOC_ARENA_MAX="3")[0] > 1
    in_heap = pools_and_apart("level", MALLOC_MMAP_THRESHOLD_="4000000")
    assert in_heap[1] < pools_and_apart("level")[1]


@needs_glibc
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    (returned,) = map(int, printed(HOLES).split())
    assert returned >= 15


@needs_glibc
def test_nothing_comes_to_lie_in_a_closed_hole() -> None:
    before, after = map(int, printed(CLOSED).split())
    assert before > 100
    assert after <= 2  # what is left of it at its ends


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    allocator.configure_malloc()
    allocator.close_holes()
