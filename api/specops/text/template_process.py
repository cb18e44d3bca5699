"""Has chat templates rendered in a process of their own, and ends it when one takes too long.

The process is `template_worker`, which says what it has no access to. This module starts it, gives
it one rendering at a time, and measures. A rendering that exceeds a limit ends the process, and a
new one takes over.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import struct
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

log = logging.getLogger(__name__)

# Processor time of one rendering. A template takes milliseconds; where other threads have the
# cores, a second of the clock would end honest ones.
_SECONDS = 1.0
_TOO_SLOW = f"it takes longer than {_SECONDS:g} s"
_CLOCK_SECONDS = 5.0  # the same by the clock, for a process that waits instead of computing
_MOST_BYTES = 16 << 20  # of a prompt; a request has at most 1 MiB, and a template adds little to it
_START_SECONDS = 60.0  # it takes 0.05; more where the machine swaps
_USED_UP_SECONDS = 60.0  # of rendering: a new process takes over before the system's limit
_END_SECONDS = 0.5  # from the end of its socket to that of the process
_LEAST_WAIT_SECONDS = 0.001
_PIECE_BYTES = 1 << 20  # of an answer, at once
# -I ignores PYTHONPATH, which may be where this package is.
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = """\
import sys
parent, root = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from specops.text.template_worker import main
main(int(parent))
"""
_KEPT = ("TZ", "LD_LIBRARY_PATH")  # of the environment
_HEADER = struct.Struct(">cQ")  # as in `template_worker`, which would bring Jinja into this process
_LENGTH = struct.Struct(">Q")
_READY, _TEXT, _REFUSED, _EXCEEDED = b"R", b"T", b"E", b"L"


class TemplateRefusal(Exception):  # noqa: N818 - the template's doing
    """The template is not Jinja, raises an error or fails; the message says why."""


class TemplateLimitExceeded(Exception):  # noqa: N818 - the template's doing
    """The template took too much time or memory, wrote too much or ended its process."""


class TemplateProcessError(Exception):
    """The process could not be started, or the system ended it."""


class _Ended(Exception):  # noqa: N818 - internal
    """The process ended, or sent what it never sends."""


class TemplateProcess:
    """Renders templates, one after the other. Thread-safe.

    Attributes:
        ended: how many processes were ended by a limit (`limit`) and by anything else (`crash`).
    """

    def __init__(self) -> None:
        # The system ends the process together with the thread that started it (PR_SET_PDEATHSIG).
        # So one thread starts all of them; it lives as long as this object.
        self._starter = ThreadPoolExecutor(1, "templates")
        self._lock = Lock()
        self._child: Future[_Child] | None = None
        self.ended = {"limit": 0, "crash": 0}

    def start(self) -> None:
        """Start the process, if there is none; do not wait for it.

        It gets the priority of the first thread that calls this.
        """
        with self._lock:
            self._current()

    def compile(self, source: str, names: Mapping[str, str]) -> None:
        """Find out whether a template can be used.

        Raises:
            TemplateRefusal, TemplateLimitExceeded, TemplateProcessError: see `render`.
        """
        self._exchange({"source": source, "names": dict(names), "values": None})

    def render(self, source: str, names: Mapping[str, str], values: Mapping[str, Any]) -> str:
        """Return what a template writes.

        Args:
            source: the template as Jinja.
            names: texts that all its renderings know, such as `bos_token`.
            values: what this rendering knows, of JSON's types.

        Raises:
            TemplateRefusal: the template is not Jinja, or raises an error.
            TemplateLimitExceeded: the template takes too much.
            TemplateProcessError: there is no process to render it; another try may find one.
        """
        return self._exchange({"source": source, "names": dict(names), "values": dict(values)})

    def close(self) -> None:
        """End the process."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.cancel()  # if it has not begun to start
        self._starter.shutdown()  # after it has waited for those that were ended
        if child is not None and not child.cancelled() and child.exception() is None:
            child.result().close()

    def _exchange(self, request: dict[str, Any]) -> str:
        try:
            message = json.dumps(request).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise TemplateRefusal(str(error)) from error
        with self._lock:
            child = self._ready()
            try:
                kind, text = child.exchange(message)
            except TemplateLimitExceeded:
                self.ended["limit"] += 1
                self._replace(child)
                raise
            except _Ended:
                raise self._crashed(child) from None
            if child.seconds > _USED_UP_SECONDS:
                self._replace(child)
        if kind == _REFUSED:
            raise TemplateRefusal(text)
        return text

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
            self._child = self._starter.submit(_Child)
        return self._child

    def _ready(self) -> _Child:
        try:
            return self._current().result()
        except OSError as error:
            raise TemplateProcessError(f"no process for chat templates: {error}") from error

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
            return TemplateProcessError("the system ended the process that renders chat templates")
        how = signal.Signals(-status).name if status is not None and status < 0 else "it ended"
        return TemplateLimitExceeded(f"it breaks the process that renders it ({how})")


class _Child:
    """One process. What it sends may be a stranger's doing.

    Attributes:
        seconds: time of all renderings so far, by the clock.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # Without TZ the C library would look at the time zone's file again and again.
        environment.setdefault("TZ", ":/etc/localtime")
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: S603 # nosec B603: our own module
                [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), _ROOT],
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
        self._clock = _Clock(_START_SECONDS)
        try:
            kind, reason = self._receive()
        except (TemplateLimitExceeded, _Ended):
            kind, reason = b"", ""
        if kind != _READY:
            self.close()
            raise OSError("it does not start: see its messages on standard error")
        if reason:
            _warn_unfiltered(reason)

    @property
    def alive(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def exchange(self, message: bytes) -> tuple[bytes, str]:
        """Send a request; return the answer's kind and text.

        Raises:
            TemplateLimitExceeded: the rendering takes too much.
            _Ended: see there.
        """
        self._clock = _Clock(_CLOCK_SECONDS, self._process.pid)
        try:
            self._socket.settimeout(self._clock.left())
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except TimeoutError:
            raise TemplateLimitExceeded(_TOO_SLOW) from None
        except OSError as error:
            raise _Ended from error
        kind, text = self._receive()
        self.seconds += self._clock.passed()
        if kind == _EXCEEDED:
            raise TemplateLimitExceeded("it takes too much memory")
        if kind not in (_TEXT, _REFUSED):
            raise _Ended
        return kind, text

    def _receive(self) -> tuple[bytes, str]:
        kind, size = _HEADER.unpack(self._read(_HEADER.size))
        if size > _MOST_BYTES:
            raise TemplateLimitExceeded(f"it writes more than {_MOST_BYTES >> 20} MiB")
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
    """Measures one rendering: by the clock, and the processor time of the process if there is one.

    Only Linux tells another process's time; elsewhere the clock's counts in its place.
    """

    def __init__(self, seconds: float, process: int | None = None) -> None:
        self._start = time.monotonic()
        self._seconds = seconds
        # As clock_getcpuclockid(3) makes it: the time of a whole process.
        self._process_clock = None if process is None else (~process << 3) | 2
        self._used_before = self._used()

    def passed(self) -> float:
        """Return the seconds since the start, by the clock."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return for how long to wait before asking again.

        Raises:
            TemplateLimitExceeded: the time is over.
        """
        left = self._seconds - self.passed()
        if self._process_clock is not None:
            left = min(left, _SECONDS - (self._used() - self._used_before))
        if left <= 0:
            raise TemplateLimitExceeded(_TOO_SLOW)
        return max(left, _LEAST_WAIT_SECONDS)

    def _used(self) -> float:
        if self._process_clock is not None and sys.platform == "linux":
            with suppress(OSError):  # it has ended
                return time.clock_gettime(self._process_clock)
        return time.monotonic()


@cache
def _warn_unfiltered(reason: str) -> None:
    """Log once why system calls are not filtered; the other limits hold all the same."""
    log.warning(
        "chat templates can reach files and the network if they break out of Jinja's sandbox",
        extra={"fields": {"reason": reason}},
    )


SHARED = TemplateProcess()
"""The process of this program's templates."""
atexit.register(SHARED.close)
