"""Processes that do what they are told: both ends of the pipe.

Runs in the environments of peers, too, so nothing but the standard library; what goes through the
pipe is made of plain lists, dictionaries, texts and numbers, which every side knows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_SECONDS = 300.0
_STOP_SECONDS = 10.0
_SHOWN_LINES = 5


class WorkerError(RuntimeError):
    """A process under comparison died or was silent for too long."""


class Worker:
    """A process that answers. A context manager: it does not outlive its block.

    `command` starts it, with its end of the pipe as the last argument and `environment` beside our
    own variables; it calls `serve`. An answer may take `patience` seconds.
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
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
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

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, do: str, **values: object) -> Any:
        """Have it call the method `do`; returns what that returns.

        Raises:
            WorkerError: it died, or did not answer in time.
        """
        try:
            self._pipe.send((do, values))
            if not self._pipe.poll(self._patience):
                raise WorkerError(f"{self.name} did not answer within {self._patience:g} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._died() from None

    def _died(self) -> WorkerError:
        """Why it ended, as far as it told."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        last = "\n  ".join(said[-_SHOWN_LINES:]) or "nothing"
        return WorkerError(f"{self.name} ended ({self._process.poll()}); it said:\n  {last}")

    def close(self) -> None:
        """End the process and wait until it is gone."""
        self._pipe.close()  # its signal to leave
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def serve(side: object) -> None:
    """Call the methods of an object as a `Worker` asks, until it leaves.

    An error ends the process, with the reason as its last line of standard error.
    """
    pipe = Connection(int(sys.argv[-1]))
    with contextlib.suppress(EOFError):
        while True:
            do, values = pipe.recv()
            pipe.send(getattr(side, do)(**values))
