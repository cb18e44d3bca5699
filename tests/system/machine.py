"""A machine's /proc and /sys/fs/cgroup, as folders that a test fills."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.memory.cgroup import Cgroup, CgroupError, cgroup

GIB = 1 << 30


@contextmanager
def limited(**limits: Any) -> Iterator[Cgroup]:
    """A real cgroup with these limits; skips where none can be made."""
    try:
        with cgroup(f"specops-test-{os.getpid()}", **limits) as group:
            yield group
    except CgroupError as error:
        pytest.skip(str(error))


class Machine:
    """8 GiB of memory, 2 GiB of swap, and a process in the root cgroup.

    Attributes:
        proc: the mount of procfs.
        root: the mount of cgroup version 2, with the mounts of version 1 in it.
    """

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 8388608 kB\nSwapTotal: 2097152 kB\nHuge: 0\n")
        self.write(
            self.proc / "self/status",
            "Name:\tpython\nRssAnon:\t  100 kB\nRssFile:\t  200 kB\nVmSwap:\t  7 kB\n",
        )
        self.enter("0::/")
        self.root.mkdir()

    def enter(self, *cgroups: str) -> None:
        """Put the process into cgroups: lines of /proc/self/cgroup."""
        self.write(self.proc / "self/cgroup", "\n".join(cgroups) + "\n")

    def set(self, files: Mapping[str, object]) -> None:
        """Write files of cgroups, by their paths below the mount."""
        for name, content in files.items():
            self.write(self.root / name.lstrip("/"), f"{content}\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
