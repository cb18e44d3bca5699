"""How many threads the service may keep busy: affinity and cgroup quota, not the host's cores."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(root: Path = _CGROUP, proc: Path = _PROC) -> float:
    """CPUs that the cgroups of this process grant, v1 or v2; infinity without a quota.

    The lowest quota counts, of this process's own cgroup and of those above it. A container
    sees its own cgroup at the mount's root.
    """
    return min((_quota(folder) for folder in _folders(root, proc)), default=math.inf)


def available_cpus(root: Path = _CGROUP, proc: Path = _PROC) -> float:
    """CPUs that this process can keep busy, parts of one included."""
    return min(float(len(os.sched_getaffinity(0))), cpu_quota(root, proc))


def available_threads(root: Path = _CGROUP, proc: Path = _PROC) -> int:
    """Threads worth starting; at least 1."""
    return max(1, math.floor(available_cpus(root, proc)))


def _folders(root: Path, proc: Path) -> Iterator[Path]:
    """Folders of this process's CPU cgroups, each with those above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount = root
        elif "cpu" in controllers.split(","):
            mount = root / "cpu"
        else:
            continue
        own = mount if ".." in path else mount / path.lstrip("/")  # outside of the namespace
        for folder in (own, *own.parents):
            yield folder
            if folder == mount:
                break


def _quota(folder: Path) -> float:
    """The quota of one cgroup; infinity where it has none, or there is no such folder here."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf
