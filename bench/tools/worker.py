"""Processes that answer a line of JSON with a line of JSON: both ends.

Runs in the environments of peers, too, so nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_SECONDS = 300.0
_STOP_SECONDS = 10.0
_SHOWN_LINES = 5
_CHUNK = 1 << 16


class WorkerError(RuntimeError):
    """A process under comparison died, was silent for too long or talked nonsense."""


class Worker:
    """A process that answers. A context manager: it does not outlive its block.

    `command` starts it, with `environment` beside our own variables; an answer may take `patience`
    seconds.
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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        if self._process.stdin is None:
            raise AssertionError("opened with a pipe")
        line = json.dumps({"do": do, **values}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        text = self._line()
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            raise WorkerError(f"{self.name} answered {text[:80]!r} to {do}") from None
        return answer

    def _line(self) -> bytes:
        """The next line of its output."""
        if self._process.stdout is None:
            raise AssertionError("opened with a pipe")
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + self._patience
        while b"\n" not in self._unread:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"{self.name} did not answer within {self._patience:g} s")
            piece = os.read(output, _CHUNK)
            if not piece:
                raise self._died()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> WorkerError:
        """Why it ended, as far as it told."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = "\n  ".join(said[-_SHOWN_LINES:]) or "nothing"
        return WorkerError(f"{self.name} ended ({self._process.poll()}); it said:\n  {last}")

    def close(self) -> None:
        """End the process and wait until it is gone."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # the end of its input is its signal to leave
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def serve(side: object) -> None:
    """Answer the requests on standard input until it ends, each by the method that it names.

    What the libraries print goes to standard error: standard output carries answers alone. An
    error ends the process, with the reason as its last line of standard error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        values = json.loads(line)
        answer = getattr(side, values.pop("do"))(**values)
        print(json.dumps(answer), file=answers, flush=True)
