"""A process that answers requests over a pipe: both ends of it.

The process may run in the environment of another engine. So this module needs only the standard
library, and only lists, dictionaries, strings and numbers go through the pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_SECONDS = 300.0
_STOP_SECONDS = 10.0
_SHOWN_LINES = 5


class WorkerError(RuntimeError):
    """A compared process died, did not answer in time, or computes something else."""


class Worker:
    """A process that answers requests. A context manager: the process ends with the block.

    Args:
        name: its name in errors.
        command: starts the process, which calls `serve`; the number of its end of the pipe is
            appended as the last argument.
        environment: variables in addition to this process's.
        patience: timeout of an answer in seconds.

    Attributes:
        pid: the process id.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        patience: float = _ANSWER_SECONDS,
    ) -> None:
        self.name = name
        self._patience = patience
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `__exit__`
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.pid = self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()  # tells the process to end
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def ask(self, do: str, **values: object) -> Any:
        """Let the process call its method `do`, and return the result.

        Raises:
            WorkerError: the process died, or did not answer in time.
        """
        try:
            self._pipe.send((do, values))
            if not self._pipe.poll(self._patience):
                raise WorkerError(f"{self.name} did not answer within {self._patience:g} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._died() from None

    def _died(self) -> WorkerError:
        """An error with the last lines of the process's output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        last = "\n  ".join(said[-_SHOWN_LINES:]) or "nothing"
        return WorkerError(f"{self.name} ended ({self._process.poll()}); it said:\n  {last}")


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, after one that does not count."""
    seconds = []
    for _ in range(1 + count):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def serve(side: object) -> None:
    """Call the methods of an object that a `Worker` asks for, until it closes the pipe.

    An error ends the process; its last line on standard error gives the reason.
    """
    pipe = Connection(int(sys.argv[-1]))
    with contextlib.suppress(EOFError):
        while True:
            do, values = pipe.recv()
            pipe.send(getattr(side, do)(**values))
