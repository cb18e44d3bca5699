"""How many threads the service may keep busy: affinity and cgroup quota, not the host's cores."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_SYSTEM = Path("/sys/devices/system/cpu")


def cpu_quota(root: Path = _CGROUP, proc: Path = _PROC) -> float:
    """CPUs that the cgroups of this process grant, v1 or v2; infinity without a quota.

    The lowest quota counts, of this process's own cgroup and of those above it. A container
    sees its own cgroup at the mount's root.
    """
    return min((_quota(folder) for folder in _folders(root, proc)), default=math.inf)


def allowed_cpus() -> set[int]:
    """Numbers of the CPUs that this process may run on; all where affinity is unknown (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return {*range(os.cpu_count() or 1)}


def cores(cpus: set[int], system: Path = _SYSTEM) -> int:
    """Cores that the CPUs belong to: two hyperthreads compute hardly faster than one.

    Each is its own where the system does not say.
    """
    found = set()
    for cpu in cpus:
        try:
            core = (system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        found.add(core.strip())
    return len(found)


def available_cpus(root: Path = _CGROUP, proc: Path = _PROC) -> float:
    """CPUs that this process can keep busy, parts of one included."""
    return min(float(len(allowed_cpus())), cpu_quota(root, proc))


def available_threads(
    root: Path = _CGROUP,
    proc: Path = _PROC,
    *,
    cpus: set[int] | None = None,
    system: Path = _SYSTEM,
) -> int:
    """Threads worth starting, one a core; at least 1.

    Args:
        cpus: that the process may run on; None: as the system says.
        system: the folder that describes each CPU.
    """
    allowed = allowed_cpus() if cpus is None else cpus
    return max(1, math.floor(min(cores(allowed, system), cpu_quota(root, proc))))


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
