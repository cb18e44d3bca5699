"""Creates a cgroup, as root: the limits of a container, without a container.

Both versions of cgroups are in use, so both are supported. A program moves itself into the group
before it starts, so that all its pages are charged to the group.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specops.system.page_cache import forget

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_GONE_SECONDS = 30.0


class CgroupError(RuntimeError):
    """No cgroup can be created here; the message says why."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A group with a memory cap, or a CPU quota, or both."""

    version: int  # of the cgroup interface, 1 or 2
    folders: tuple[Path, ...]  # of its files; in version 1 a folder per controller

    def enclosed(self, command: Sequence[object]) -> list[str]:
        """The command line that runs a command inside the group."""
        joins = "".join(f"echo $$ >{folder}/cgroup.procs && " for folder in self.folders)
        return ["sh", "-c", f'{joins}exec "$@"', "sh", *map(str, command)]

    def counters(self) -> dict[str, int]:
        """`memory.stat` in bytes and events, with version 2's names for `anon` and `file`."""
        stat = _pairs(self.folders[0] / "memory.stat")
        if self.version == 1:
            stat |= {"anon": stat["rss"], "file": stat["cache"]}
        return stat

    def oom_kills(self) -> int:
        """Number of processes that the kernel killed because of this group's cap."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _pairs(self.folders[0] / name)["oom_kill"]

    def swap_bytes(self) -> int:
        """Swap in use; 0 if the kernel does not count it."""
        if self.version == 1:
            return self.counters().get("swap", 0)
        file = self.folders[0] / "memory.swap.current"
        return int(file.read_text("utf-8")) if file.exists() else 0


@contextmanager
def cgroup(
    name: str, *, memory: int | None = None, swap: int = 0, cpus: float | None = None
) -> Iterator[Cgroup]:
    """A new group, which is removed when the block and the group's last process have ended.

    Args:
        name: name of the group.
        memory: memory cap in bytes; None: no cap.
        swap: swap in bytes that the group may use in addition.
        cpus: CPU quota in cores; None: no quota.

    Raises:
        CgroupError: this machine does not allow it.
    """
    controllers = (["memory"] if memory is not None else []) + (["cpu"] if cpus is not None else [])
    version = 1 if (ROOT / "memory" / "memory.stat").is_file() else 2
    parents = [ROOT / controller if version == 1 else ROOT for controller in controllers]
    folders = tuple(dict.fromkeys(parent / name for parent in parents))
    try:
        if version == 2:
            enable = " ".join(f"+{controller}" for controller in controllers)
            (ROOT / "cgroup.subtree_control").write_text(enable, "utf-8")
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for file, value in _limits(version, memory, swap, cpus):
            for folder in folders:
                if (folder / file).exists():
                    (folder / file).write_text(str(value), "utf-8")
    except OSError as error:
        for folder in folders:
            if folder.is_dir():
                folder.rmdir()
        raise CgroupError(f"no cgroup can be created here: {error}") from error
    try:
        yield Cgroup(version, folders)
    finally:
        for folder in folders:
            _remove(folder)


def _limits(
    version: int, memory: int | None, swap: int, cpus: float | None
) -> Iterator[tuple[str, object]]:
    """Files and their contents, in an order that the kernel accepts."""
    if memory is not None and version == 1:
        yield "memory.limit_in_bytes", memory
        yield "memory.memsw.limit_in_bytes", memory + swap
    elif memory is not None:
        yield "memory.max", memory
        yield "memory.swap.max", swap
    if cpus is not None and version == 1:
        yield "cpu.cfs_period_us", _PERIOD_US
        yield "cpu.cfs_quota_us", round(cpus * _PERIOD_US)
    elif cpus is not None:
        yield "cpu.max", f"{round(cpus * _PERIOD_US)} {_PERIOD_US}"


def _remove(folder: Path) -> None:
    """Remove a group, whose last process may still be ending."""
    deadline = time.monotonic() + _GONE_SECONDS
    while True:
        try:
            os.rmdir(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _pairs(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text("utf-8").splitlines())
    return {key: int(value) for key, value in pairs}


def evict(folder: Path) -> None:
    """Evict every file below a folder from the page cache, so that the next start reads the disk.

    Pages already in memory are not charged to a cgroup. Without a cgroup, too, only starts from the
    disk are comparable: the place of a file in memory depends on the process that read it. From the
    same file, TinyLlama's shape made 59 tokens per second and, half an hour later, 42.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            forget(path)
