"""Describes the machine, the software and the command of a measurement, for comparisons."""

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
    kernels: str
    threads: int
    memory_limit_bytes: int
    load_average: float  # over the last minute before the benchmark: 0 on a quiet machine
    system: str
    python: str
    onnxruntime: str
    commit: str | None
    modified: bool  # tracked files differ from the commit
    command: str
    date: str

    @property
    def line(self) -> str:
        """The machine in one line, as a note below a table."""
        commit = f"commit {self.commit[:10]}{'+' if self.modified else ''}, " if self.commit else ""
        return (
            f"{self.cpu}, {self.threads} threads, {self.memory_limit_bytes / 2**30:.1f} GiB, "
            f"onnxruntime {self.onnxruntime}, {commit}{self.date[:10]}, "
            f"load average at start {self.load_average:.2f}"
        )


def describe() -> Machine:
    """Describe this machine and this run."""
    # Absolute paths lose their folder, which is specific to this machine.
    words = (Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])
    return Machine(
        cpu=_cpu(),
        kernels=kernels.kernel(),
        threads=available_threads(),
        memory_limit_bytes=read_memory().limit,
        load_average=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        onnxruntime=version("onnxruntime"),
        commit=_git("rev-parse", "HEAD") or None,
        modified=bool(_git("status", "--porcelain", "--untracked-files=no")),
        command=shlex.join(["python", "-m", "bench", *words]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cpu() -> str:
    """The first processor, with family and model: clouds use one name for several generations."""
    block = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    parts = (line.partition(":") for line in block.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in parts}
    name = facts.get("model name", platform.machine())
    if {"cpu family", "model"} <= facts.keys():
        name += f" (family {facts['cpu family']}, model {facts['model']})"
    return name


def _git(*arguments: str) -> str:
    """Git's output; empty without git or a repository."""
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
