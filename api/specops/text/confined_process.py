"""Runs untrusted programs in a separate process, and ends it when one takes too long.

Chat templates and grammars are such programs. `confined_worker` says what the process cannot reach.
This module starts it, gives it one program at a time, and measures the time. When a program exceeds
a limit, a new process replaces the old one.
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
_USED_UP_SECONDS = 60.0  # of work, after which a new process takes over, before the system's limit
_END_SECONDS = 0.5  # from the end of its socket to the end of the process
_MIN_WAIT_SECONDS = 0.001
_PIECE_BYTES = 1 << 20  # of an answer, received at once
# -I ignores PYTHONPATH, which may be what leads to this package.
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


class ProgramRefusal(Exception):  # noqa: N818 - the program's fault
    """The program is wrong, raises an error or fails; the message says why."""


class ProgramLimitExceeded(Exception):  # noqa: N818 - the program's fault
    """The program took too much time or memory, wrote too much or ended its process."""


class ProgramProcessError(Exception):
    """The process could not be started, or the system ended it."""


class _Ended(Exception):  # noqa: N818 - internal
    """The process ended, or sent something that it should never send."""


class ConfinedProcess:
    """Runs untrusted programs, one after the other. Thread-safe.

    Attributes:
        worker: the module whose `main` the process runs.
        what: what messages call the programs.
        seconds: processor time allowed per program. A limit on wall-clock time would end honest
            programs while other threads use the cores.
        clock_seconds: wall-clock time allowed per program, for a process that waits instead of
            computing.
        ended: number of processes that a limit (`limit`) or anything else (`crash`) has ended.
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
        """Start the process if there is none, without waiting for it.

        The process gets the priority of the first thread that calls this.
        """
        with self._lock:
            self._current()

    def run(self, request: Mapping[str, Any]) -> str:
        """Send a request to the process; return its answer.

        Raises:
            ProgramRefusal: the program is wrong, or raises an error.
            ProgramLimitExceeded: the program takes too much time or memory.
            ProgramProcessError: no process could run it; a second try may succeed.
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
        """End the program that is running, if any: nobody waits for it any more."""
        with self._stopping:
            if self._busy is not None:
                self._busy.kill()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.cancel()  # if its start has not begun
        self._starter.shutdown()  # after it has waited for the replaced processes to end
        if child is not None and not child.cancelled() and child.exception() is None:
            child.result().close()

    # -- the process; all of this holds the lock ---------------------------------------------------

    def _current(self) -> Future[_Child]:
        """Return the current process, which may still be starting."""
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
    """One process. An untrusted program may decide what it sends.

    Attributes:
        seconds: wall-clock time of all programs so far.

    Raises:
        OSError: the process cannot be started.
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
            raise OSError("it did not start: see its messages on standard error")
        if reason:
            _warn_unfiltered(what, reason)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def exchange(self, message: bytes, seconds: float, clock: float) -> tuple[bytes, str]:
        """Send a request; return the answer's kind and text.

        Args:
            message: the request.
            seconds: processor time allowed.
            clock: wall-clock time allowed, in seconds.

        Raises:
            ProgramLimitExceeded: the program takes too much time or memory.
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
        """Return the exit status, or the signal that ended the process as a negative number."""
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
    """Limits one program's wall-clock time, and its process's processor time if there is one.

    Only Linux shows another process's processor time; elsewhere wall-clock time counts instead.
    """

    def __init__(self, seconds: float, computing: float, process: int | None = None) -> None:
        self._start = time.monotonic()
        self._seconds, self._computing = seconds, computing
        self._too_slow = f"it takes longer than {computing:g} s"
        # The id that clock_getcpuclockid(3) makes: that clock counts all the process's threads.
        self._process_clock = None if process is None else (~process << 3) | 2
        self._used_before = self._used()

    def passed(self) -> float:
        """Return the wall-clock seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return how many seconds to wait before asking again.

        Raises:
            ProgramLimitExceeded: the time is up.
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
    """Log once why system calls are not filtered; the other limits still hold."""
    log.warning(
        "%s can reach files and the network if they break out of their sandbox",
        what,
        extra={"fields": {"reason": reason}},
    )
