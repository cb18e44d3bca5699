"""Threads share one pool of memory, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from specops.system import allocator

# Threads allocate beyond what Python hands out itself; then glibc tells how many pools it has.
COUNT = """
import ctypes, sys, threading
from specops.system.allocator import share_one_pool
if sys.argv[1] == "shared":
    share_one_pool()
held = []
threads = [threading.Thread(target=lambda: held.append(bytearray(50_000))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="only glibc has such pools"
)


def pools(way: str, **variables: str) -> int:
    """How many pools of memory a process with four threads has."""
    plain = {name: text for name, text in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    told = subprocess.run(
        [sys.executable, "-c", COUNT, way],
        env=plain | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.count("<heap nr=")


@needs_glibc
def test_threads_share_one_pool() -> None:
    assert pools("apart") > 1
    assert pools("shared") == 1


@needs_glibc
def test_the_environment_may_say_otherwise() -> None:
    assert pools("shared", MALLOC_ARENA_MAX="3") > 1


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    allocator.share_one_pool()
