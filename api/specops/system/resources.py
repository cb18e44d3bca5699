"""Reads the use of resources other than memory: processor quota, page faults, disk, open files.

Any process can read these figures, so the service can report why it is slow without a privileged
exporter.
"""

import logging
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from specops.system.cgroup import CGROUP_ROOT, PROC, cgroup_folders, counters

log = logging.getLogger(__name__)

# By cgroup version: name and unit of the throttled time; the file that counts kills.
_THROTTLED = {2: ("throttled_usec", 1e6), 1: ("throttled_time", 1e9)}
_KILLS = {2: "memory.events", 1: "memory.oom_control"}


@dataclass(frozen=True, slots=True)
class Throttling:
    """How much the processor quota has throttled the cgroup since its start; 0 without a quota."""

    periods: int
    throttled_periods: int
    throttled_seconds: float


def read_throttling(root: Path = CGROUP_ROOT, proc: Path = PROC) -> Throttling:
    """Read how often and how long a processor quota stopped this process's cgroup.

    The quota may belong to a parent cgroup; the nearest one counts.
    """
    for version, folders in cgroup_folders("cpu", root, proc).items():
        unit, per_second = _THROTTLED[version]
        for folder in folders:
            counts = counters(folder / "cpu.stat")
            if counts.get("nr_periods"):
                return Throttling(
                    counts["nr_periods"],
                    counts.get("nr_throttled", 0),
                    counts.get(unit, 0) / per_second,
                )
    return Throttling(0, 0, 0.0)


def read_oom_kills(root: Path = CGROUP_ROOT, proc: Path = PROC) -> int:
    """Read how many processes of this cgroup the kernel killed for lack of memory.

    Returns:
        0 if the kernel does not report it.
    """
    for version, folders in cgroup_folders("memory", root, proc).items():
        for folder in folders:
            counts = counters(folder / _KILLS[version])
            if "oom_kill" in counts:
                return counts["oom_kill"]
    return 0


def read_faults() -> dict[str, int]:
    """Read this process's page faults: `minor`, served from memory, and `major`, read from disk."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"minor": usage.ru_minflt, "major": usage.ru_majflt}


def raise_open_files(count: int) -> int:
    """Let this process open up to `count` files; return how many it may open now.

    Shells set a limit of 1,024 for programs that use `select`; this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count and hard > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
            soft = min(count, hard)
        except (OSError, ValueError) as error:  # macOS allows fewer than its hard limit
            log.warning("this process can open at most %d files: %s", soft, error)
    return min(soft, count)


def read_disk(folder: Path) -> dict[str, int]:
    """Read the total and free bytes of the volume of `folder`, which need not exist yet.

    Raises:
        OSError: the volume does not answer.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    total, _, free = shutil.disk_usage(existing)
    return {"total": total, "free": free}
