"""Where, when and with what a result was measured: a figure without it cannot be compared."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from specops.system.cpus import available_threads
from specops.system.memory import read_memory

_ROOT = Path(__file__).resolve().parents[2]
# What decides which kernels ONNX Runtime takes.
_FLAGS_OF_INTEREST = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, the software and the command. Memory in bytes."""

    cpu: str
    cpu_flags: tuple[str, ...]
    threads: int
    memory_bytes: int
    memory_limit_bytes: int
    huge_pages: str
    load_average: float  # of the last minute, before the benchmark: 0 on a quiet machine
    system: str
    python: str
    onnxruntime: str
    specops: str
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
    cpu, flags = _cpu()
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return Machine(
        cpu=cpu,
        cpu_flags=tuple(flag for flag in _FLAGS_OF_INTEREST if flag in flags),
        threads=available_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit_bytes=read_memory().limit,
        huge_pages=_huge_pages(),
        load_average=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        onnxruntime=version("onnxruntime"),
        specops=version("specops"),
        commit=commit or None,
        modified=None if status is None else bool(status),
        command=_command(sys.argv[1:]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _command(arguments: Sequence[str]) -> str:
    """What was asked for, without the folder of the results."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--results")
    _, asked = parser.parse_known_args(arguments)
    return shlex.join(["python", "-m", "bench", *asked])


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """The first processor's name and its flags, as far as the system tells."""
    fields: dict[str, str] = {}
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or platform.machine(), frozenset(flags.split())


def _huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """The chosen mode of transparent huge pages: always, madvise or never."""
    if not setting.is_file():
        return "unknown"
    text = setting.read_text(encoding="utf-8")
    return text[text.find("[") + 1 : text.find("]")]


def _git(*arguments: str) -> str | None:
    """What git says; None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
