"""Runs `specops serve` as a process and watches its states, times and memory from the start."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.tools.repeating import repeating
from tests.waiting import PATIENCE, answers, wait

START_SECONDS = 1800.0
STOP_SECONDS = 60.0
_POLL_SECONDS = 0.1  # to read /proc takes milliseconds of the two cores; memory grows over seconds
_CONVERTER = "specops.models.child"  # a module that runs in a process of its own


@dataclass
class Memory:
    """The peak memory of each kind of process, in bytes.

    The server's includes mapped files; the converter's does not, for it maps all weights in turn.
    `together` is the peak of the anonymous memory of all processes at one time, which the
    container's cap counts.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    together: int = 0

    def sample(self, pid: int) -> None:
        """Read the memory of a process and its descendants."""
        total = 0
        for process in _tree(pid):
            try:
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                status = Path(f"/proc/{process}/status").read_text()
            except OSError:  # it ended just now
                continue
            converts = _CONVERTER.encode() in words
            kind, row = ("converter", "RssAnon") if converts else ("server", "VmHWM")
            kib = {
                line.split(":")[0]: int(line.split()[1])
                for line in status.splitlines()
                if line.startswith(("VmHWM", "RssAnon"))
            }
            total += kib.get("RssAnon", 0) * 1024
            self.peaks[kind] = max(self.peaks.get(kind, 0), kib.get(row, 0) * 1024)
        self.together = max(self.together, total)


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for process in found:
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:  # the process ended just now
            continue
        for thread in threads:
            try:
                children = Path(f"/proc/{process}/task/{thread}/children").read_text()
            except OSError:  # the thread ended just now
                continue
            found += map(int, children.split())
    return found


@dataclass
class Running:
    """A running service and its log since this start."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    memory: Memory = field(default_factory=Memory)
    _begins: int = 0  # bytes of the log that an earlier start has written

    def said(self) -> str:
        """Return the log of this start."""
        return self.log.read_bytes()[self._begins :].decode(errors="replace")

    def states(self) -> list[tuple[str, datetime]]:
        """Return the logged states in order, each with the time at which it began."""
        written = self.said().rpartition("\n")[0]  # the last line may be half there
        lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
        found = [(line["message"].split(), datetime.fromisoformat(line["time"])) for line in lines]
        return [
            (words[2].rstrip(":"), time) for words, time in found if words[:2] == ["model", "is"]
        ]

    def get(self, path: str) -> Any:
        """Return the JSON of an endpoint."""
        return httpx.get(self.url + path, timeout=60).json()

    def generate(self, **body: Any) -> Any:
        """Return the answer of `/generate`."""
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        prefix = f"{name}{{{text}}} " if labels else f"{name} "
        page = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        (value,) = (line[len(prefix) :] for line in page.splitlines() if line.startswith(prefix))
        return float(value)

    def seconds(self, state: str) -> float:
        """Return how long the service was in a state."""
        return sum(
            (end - begin).total_seconds()
            for (name, begin), (_, end) in pairwise(self.states())
            if name == state
        )

    @property
    def path(self) -> list[str]:
        """The states, each named once per visit."""
        return [name for name, _ in groupby(name for name, _ in self.states())]

    def wait(self) -> None:
        """Wait until the service is ready; fail if it ends or says that it failed."""

        def ready() -> bool:
            assert self.process.poll() is None, self.said()
            assert "failed" not in self.path, self.said()
            return answers(f"{self.url}/health")

        wait("the model is ready", ready, START_SECONDS)


@contextmanager
def serving(folder: Path, port: int, **environ: str) -> Iterator[Running]:
    """Start the service with these variables, wait until it is ready, and stop it at the end."""
    inherited = {name: value for name, value in os.environ.items() if "SPECOPS_" not in name}
    env = {**inherited, "HF_TOKEN_PATH": os.devnull, "SPECOPS_PORT": str(port), **environ}
    log = folder / "serve.log"
    begins = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "specops", "serve"], env=env, stdout=output, stderr=output
        )
    running = Running(f"http://127.0.0.1:{port}", process, log, _begins=begins)
    try:
        with repeating(lambda: running.memory.sample(process.pid), _POLL_SECONDS):
            running.wait()
            yield running
            process.terminate()
            assert process.wait(STOP_SECONDS) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
