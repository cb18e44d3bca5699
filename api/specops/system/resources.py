"""Use of the machine besides memory: processor quota, page faults, disk, open files.

Any process can read these figures. So the service can itself say why it is slow, and needs no
privileged exporter.
"""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from specops.system.cgroup import CGROUP_ROOT, counters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Throttling:
    """Effect of the processor quota on the cgroup since its start; zeros without a quota."""

    periods: int
    throttled_periods: int
    throttled_seconds: float


@dataclass(frozen=True, slots=True)
class Faults:
    """Page faults of this process since its start: served from memory, or read from disk."""

    minor: int
    major: int


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of a volume, and bytes that this process may still write."""

    total: int
    free: int


def read_throttling(root: Path = CGROUP_ROOT) -> Throttling:
    """Read how often and how long the processor quota stopped the cgroup."""
    for path, unit, per_second in (
        (root / "cpu.stat", "throttled_usec", 1e6),
        (root / "cpu" / "cpu.stat", "throttled_time", 1e9),
    ):
        if counts := counters(path):
            return Throttling(
                counts.get("nr_periods", 0),
                counts.get("nr_throttled", 0),
                counts.get(unit, 0) / per_second,
            )
    return Throttling(0, 0, 0.0)


def read_oom_kills(root: Path = CGROUP_ROOT) -> int:
    """Read how many processes of the cgroup the kernel killed for lack of memory; 0 if unknown."""
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        if counts := counters(path):
            return counts.get("oom_kill", 0)
    return 0


def read_faults() -> Faults:
    """Read this process's page faults."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Faults(minor=usage.ru_minflt, major=usage.ru_majflt)


def raise_open_files(wanted: int) -> int:
    """Let this process open up to `wanted` files; return how many it may open now.

    Shells set a limit of 1,024 for programs that use `select`, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted and hard > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
            soft = min(wanted, hard)
        except (OSError, ValueError) as error:  # macOS allows fewer than its hard limit says
            log.warning("at most %d open files are possible: %s", soft, error)
    return min(soft, wanted)


def read_disk(folder: Path) -> Disk:
    """Read the volume of `folder`, which need not exist yet.

    Raises:
        OSError: the volume does not answer.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    volume = os.statvfs(existing)
    return Disk(volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize)
