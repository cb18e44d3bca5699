"""Waiting for other processes and tasks."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from specops.system.folders import locked

POLL_SECONDS = 0.1
PATIENCE = 60.0  # seconds for one answer; the 5 s of httpx are too few on a busy machine


def wait(what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Poll until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s without success: {what}")
        time.sleep(POLL_SECONDS)


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Let other tasks run until `condition` holds; fail after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def printed(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """What a fresh interpreter prints that runs this code; an error fails the test."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@contextmanager
def started(
    command: Iterable[object],
    log: Path,
    ready: Callable[[], bool],
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    seconds: float = PATIENCE,
    whole: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program whose output goes to a file; the block begins once it is ready.

    At the end the program gets a SIGTERM, or with `whole` all its processes do.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=whole,
        )

    def runs() -> bool:
        assert process.poll() is None, log.read_text()
        return ready()

    try:
        wait("it is ready", runs, seconds)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM) if whole else process.terminate()
        process.wait(PATIENCE)


def answers(url: str, status: int = 200) -> bool:
    """Whether a GET gets this status; False while no server listens."""
    try:
        return httpx.get(url, timeout=10).status_code == status
    except httpx.TransportError:
        return False


def is_locked(folder: Path) -> bool:
    """Whether another process holds a folder's lock."""

    def refuse() -> None:
        raise BlockingIOError

    try:
        with locked(folder, refuse):
            return False
    except BlockingIOError:
        return True
