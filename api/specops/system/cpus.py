"""Counts the CPUs that this process may use: its affinity and cgroup quota, not the host's CPUs."""

import math
import os
from pathlib import Path

from specops.system.cgroup import CGROUP_ROOT, PROC, cgroup_folders

_SYSTEM = Path("/sys/devices/system/cpu")
_QUOTA_FILES = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


def cpu_quota(root: Path = CGROUP_ROOT, proc: Path = PROC) -> float:
    """Return the CPUs that this process's cgroups grant; infinity without a quota.

    The lowest quota counts, of the process's cgroup and its ancestors.
    """
    quotas = [math.inf]
    for version, folders in cgroup_folders("cpu", root, proc).items():
        for folder in folders:
            try:
                texts = [(folder / name).read_text("utf-8") for name in _QUOTA_FILES[version]]
            except FileNotFoundError:
                continue
            quota, period = " ".join(texts).split()
            quotas.append(math.inf if quota in ("max", "-1") else int(quota) / int(period))
    return min(quotas)


def allowed_cpus() -> set[int]:
    """Return the CPUs that this process may run on; all CPUs if affinity is unknown (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return {*range(os.cpu_count() or 1)}


def cores(cpus: set[int], system: Path = _SYSTEM) -> int:
    """Count the cores of these CPUs: two hyperthreads compute hardly faster than one.

    Each CPU counts as a core if the system does not describe cores.
    """
    siblings = set()
    for cpu in cpus:
        try:
            core = (system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text("utf-8")
        except OSError:
            core = str(cpu)
        siblings.add(core.strip())
    return len(siblings)


def available_cpus() -> float:
    """Return how many CPUs this process can keep busy; may be a fraction."""
    return min(float(len(allowed_cpus())), cpu_quota())


def compute_threads(setting: int) -> int:
    """Return the number of compute threads: the setting, or one per core if it is 0."""
    return setting or available_threads()


def available_threads(
    root: Path = CGROUP_ROOT,
    proc: Path = PROC,
    *,
    cpus: set[int] | None = None,
    system: Path = _SYSTEM,
) -> int:
    """Return the number of threads to start: one per core, at least 1.

    Args:
        root: mount of the cgroups.
        proc: mount of procfs.
        cpus: CPUs that the process may run on; None: those of its affinity.
        system: folder of sysfs that describes each CPU.
    """
    allowed = allowed_cpus() if cpus is None else cpus
    return max(1, math.floor(min(cores(allowed, system), cpu_quota(root, proc))))
