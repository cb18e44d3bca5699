"""Runs strangers' programs in a separate process, and ends it when one takes too long.

Chat templates and grammars are such programs. `confined_worker` says what the process has no access
to. This module starts it, gives it one program at a time, and measures. A program that exceeds a
limit ends the process, and a new one takes over.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess  # nosec B404: runs only our own module
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from specops.text.confined_worker import EXCEEDED, HEADER, LENGTH, READY, REFUSED, TEXT

log = logging.getLogger(__name__)

_MAX_BYTES = 16 << 20  # of an answer; a request has at most 1 MiB, and programs add little to it
_START_SECONDS = 60.0  # it takes 0.05; more where the machine swaps
_USED_UP_SECONDS = 60.0  # of work: a new process takes over before the system's limit
_END_SECONDS = 0.5  # from the end of its socket to the end of the process
_MIN_WAIT_SECONDS = 0.001
_PIECE_BYTES = 1 << 20  # of an answer, at once
# -I ignores PYTHONPATH, which may be where this package is.
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = """\
import sys
parent, root, worker = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from importlib import import_module
import_module(worker).main(int(parent))
"""
_KEPT = ("TZ", "LD_LIBRARY_PATH")  # of the environment


class ProgramRefusal(Exception):  # noqa: N818 - the program's doing
    """The program is wrong, raises an error or fails; the message says why."""


class ProgramLimitExceeded(Exception):  # noqa: N818 - the program's doing
    """The program took too much time or memory, wrote too much or ended its process."""


class ProgramProcessError(Exception):
    """The process could not be started, or the system ended it."""


class _Ended(Exception):  # noqa: N818 - internal
    """The process ended, or sent something that it never sends."""


class ConfinedProcess:
    """Runs strangers' programs, one after the other. Thread-safe.

    Attributes:
        worker: the module whose `main` the process is.
        what: names the programs, for messages.
        seconds: processor time of one program. Where other threads have the cores, as much time of
            the clock would end honest ones.
        clock_seconds: the same by the clock, for a process that waits instead of computing.
        ended: how many processes were ended by a limit (`limit`) and by anything else (`crash`).
    """

    worker: str
    what: str
    seconds: float
    clock_seconds: float

    def __init__(self) -> None:
        # The system ends the process together with the thread that started it (PR_SET_PDEATHSIG).
        # So one thread starts all of them; it lives as long as this object.
        self._starter = ThreadPoolExecutor(1, self.what)
        self._lock = Lock()
        self._child: Future[_Child] | None = None
        self._busy: _Child | None = None
        self._stopping = Lock()
        self.ended = {"limit": 0, "crash": 0}

    def start(self) -> None:
        """Start the process, if there is none; do not wait for it.

        It gets the priority of the first thread that calls this.
        """
        with self._lock:
            self._current()

    def run(self, request: Mapping[str, Any]) -> str:
        """Return the answer of the process.

        Raises:
            ProgramRefusal: the program is wrong, or raises an error.
            ProgramLimitExceeded: the program takes too much.
            ProgramProcessError: there is no process to run it; another try may find one.
        """
        try:
            message = json.dumps(request).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise ProgramRefusal(str(error)) from error
        with self._lock:
            child = self._ready()
            self._busy = child
            try:
                kind, text = child.exchange(message, self.seconds, self.clock_seconds)
            except ProgramLimitExceeded:
                self.ended["limit"] += 1
                self._replace(child)
                raise
            except _Ended:
                raise self._crashed(child) from None
            finally:
                with self._stopping:
                    self._busy = None
            if child.seconds > _USED_UP_SECONDS:
                self._replace(child)
        if kind == REFUSED:
            raise ProgramRefusal(text)
        return text

    def stop(self) -> None:
        """End the program that runs, if one does: nobody waits for it any more."""
        with self._stopping:
            if self._busy is not None:
                self._busy.kill()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.cancel()  # if it has not begun to start
        self._starter.shutdown()  # after it has waited for those that were ended
        if child is not None and not child.cancelled() and child.exception() is None:
            child.result().close()

    # -- the process; all of this holds the lock ---------------------------------------------------

    def _current(self) -> Future[_Child]:
        """Return the process that is there or will be."""
        old = self._child
        if old is not None and old.done() and (old.exception() or not old.result().alive):
            if old.exception() is None:  # it ended while it had nothing to do
                self.ended["crash"] += 1
                old.result().close()
            self._child = None
        if self._child is None:
            self._child = self._starter.submit(_Child, self.worker, self.what)
        return self._child

    def _ready(self) -> _Child:
        try:
            return self._current().result()
        except OSError as error:
            raise ProgramProcessError(f"no process for {self.what}: {error}") from error

    def _replace(self, child: _Child) -> None:
        child.kill()
        self._child = None
        self._current()
        self._starter.submit(child.close)

    def _crashed(self, child: _Child) -> Exception:
        self.ended["crash"] += 1
        status = child.status()
        self._replace(child)
        if status == -signal.SIGKILL:
            return ProgramProcessError(f"the system ended the process for {self.what}")
        how = signal.Signals(-status).name if status is not None and status < 0 else "it ended"
        return ProgramLimitExceeded(f"it breaks the process that runs it ({how})")


class _Child:
    """One process. What it sends may be a stranger's doing.

    Attributes:
        seconds: time of all programs so far, by the clock.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, worker: str, what: str) -> None:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # Without TZ the C library would look at the time zone's file again and again.
        environment.setdefault("TZ", ":/etc/localtime")
        # The filter of system calls is for one thread.
        environment["OPENBLAS_NUM_THREADS"] = "1"
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: S603 # nosec B603: our own module
                [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), _ROOT, worker],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                cwd="/",
                env=environment,
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.seconds = 0.0
        self._clock = _Clock(_START_SECONDS, _START_SECONDS)
        try:
            kind, reason = self._receive()
        except (ProgramLimitExceeded, _Ended):
            kind, reason = b"", ""
        if kind != READY:
            self.close()
            raise OSError("it does not start: see its messages on standard error")
        if reason:
            _warn_unfiltered(what, reason)

    @property
    def alive(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def exchange(self, message: bytes, seconds: float, clock: float) -> tuple[bytes, str]:
        """Send a request; return the answer's kind and text.

        Raises:
            ProgramLimitExceeded: the program takes too much.
            _Ended: the process has ended.
        """
        self._clock = _Clock(clock, seconds, self._process.pid)
        self._send(LENGTH.pack(len(message)) + message)
        kind, text = self._receive()
        self.seconds += self._clock.passed()
        if kind == EXCEEDED:
            raise ProgramLimitExceeded("it takes too much memory")
        if kind not in (TEXT, REFUSED):
            raise _Ended
        return kind, text

    def _send(self, message: bytes) -> None:
        rest = memoryview(message)
        while rest:
            self._socket.settimeout(self._clock.left())
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                continue  # the clock decides: the process may be swapped out
            except OSError as error:
                raise _Ended from error

    def _receive(self) -> tuple[bytes, str]:
        kind, size = HEADER.unpack(self._read(HEADER.size))
        if size > _MAX_BYTES:
            raise ProgramLimitExceeded(f"it writes more than {_MAX_BYTES >> 20} MiB")
        text = self._read(size)
        try:
            return kind, text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise _Ended from error

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(self._clock.left())
            try:
                more = self._socket.recv(min(count - len(data), _PIECE_BYTES))
            except TimeoutError:
                continue  # the clock decides
            except OSError as error:
                raise _Ended from error
            if not more:
                raise _Ended
            data += more
        return bytes(data)

    def status(self) -> int | None:
        """Return how the process ended: its exit status, or a signal as a negative number."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_SECONDS)
        return None

    def kill(self) -> None:
        """End the process; do not wait for it."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait for it."""
        self.kill()
        self._process.wait()
        self._socket.close()


class _Clock:
    """Measures one program: by the clock, and the processor time of the process if there is one.

    Only Linux tells another process's time; elsewhere the clock's counts in its place.
    """

    def __init__(self, seconds: float, computing: float, process: int | None = None) -> None:
        self._start = time.monotonic()
        self._seconds, self._computing = seconds, computing
        self._too_slow = f"it takes longer than {computing:g} s"
        # As clock_getcpuclockid(3) makes it: the time of a whole process.
        self._process_clock = None if process is None else (~process << 3) | 2
        self._used_before = self._used()

    def passed(self) -> float:
        """Return the seconds since the start, by the clock."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return for how long to wait before asking again.

        Raises:
            ProgramLimitExceeded: the time is over.
        """
        left = self._seconds - self.passed()
        if self._process_clock is not None:
            left = min(left, self._computing - (self._used() - self._used_before))
        if left <= 0:
            raise ProgramLimitExceeded(self._too_slow)
        return max(left, _MIN_WAIT_SECONDS)

    def _used(self) -> float:
        if self._process_clock is not None and sys.platform == "linux":
            with suppress(OSError):  # it has ended
                return time.clock_gettime(self._process_clock)
        return time.monotonic()


@cache
def _warn_unfiltered(what: str, reason: str) -> None:
    """Log once why system calls are not filtered; the other limits hold all the same."""
    log.warning(
        "%s can reach files and the network if they break out of their sandbox",
        what,
        extra={"fields": {"reason": reason}},
    )
