"""A side that still spins is waited for; one that never stops is said to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.tools.quiet import settle

_SPIN_UNTIL_TOLD = """
import sys, threading
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
print("spinning", flush=True)
while not told.is_set():
    pass
print("idle", flush=True)
sys.stdin.readline()
"""


@contextmanager
def spinning() -> Iterator[subprocess.Popen[str]]:
    """A process that takes a whole core until it gets a line, then sleeps until the next."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _SPIN_UNTIL_TOLD]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "spinning\n"
            yield process
        finally:
            process.kill()


def test_a_process_that_never_stops_is_named() -> None:
    with spinning() as process, pytest.raises(TimeoutError, match=str(process.pid)):
        settle(process.pid, timeout=0.2, window=0.5)  # on a busy machine it seldom runs, too


def test_a_process_that_has_stopped_is_quiet() -> None:
    with spinning() as process:
        process.stdin.write("stop\n")
        process.stdin.flush()
        assert process.stdout.readline() == "idle\n"
        settle(process.pid)
        assert process.poll() is None
