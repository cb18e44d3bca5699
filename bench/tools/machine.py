"""Where, when and with what a result was measured: a figure without it cannot be compared."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from specops.runtime import kernels
from specops.system.cpus import available_threads
from specops.system.memory import read_memory

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, the software and the command. Memory in bytes."""

    cpu: str
    kernels: str  # that this processor takes: what it can do
    threads: int
    memory_limit_bytes: int
    load_average: float  # of the last minute, before the benchmark: 0 on a quiet machine
    system: str
    python: str
    onnxruntime: str
    commit: str | None
    modified: bool | None  # tracked files differ from the commit
    command: str
    date: str

    @property
    def line(self) -> str:
        """All that a table's reader needs, in one line."""
        commit = f"commit {self.commit[:10]}{'+' if self.modified else ''}, " if self.commit else ""
        return (
            f"{self.cpu}, {self.threads} threads, {self.memory_limit_bytes / 2**30:.1f} GiB, "
            f"onnxruntime {self.onnxruntime}, {commit}{self.date[:10]}, "
            f"load average at start {self.load_average:.2f}"
        )


def describe() -> Machine:
    """Describe this machine and this run."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return Machine(
        cpu=_cpu(),
        kernels=kernels.kernel(),
        threads=available_threads(),
        memory_limit_bytes=read_memory().limit,
        load_average=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        onnxruntime=version("onnxruntime"),
        commit=commit or None,
        modified=None if status is None else bool(status),
        command=shlex.join(["python", "-m", "bench", *map(_told, sys.argv[1:])]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _told(word: str) -> str:
    """A word of the command; a file by its name alone, since its folder is only of this machine."""
    return Path(word).name if os.path.isabs(word) else word


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first processor's name, as far as the system tells."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*arguments: str) -> str | None:
    """What git says; None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
