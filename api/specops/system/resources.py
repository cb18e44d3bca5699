"""What the service takes of the machine besides memory: processor quota, page faults, disk.

All of it is readable without rights, so that the service can say itself why it is slow and no
privileged exporter has to stand beside it. Both cgroup versions exist in the field.
"""

from __future__ import annotations

import logging
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Throttling:
    """What the processor quota did to the cgroup since it exists; zeros without a quota."""

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
    """Bytes of a volume, and those of them that this process may still fill."""

    total: int
    free: int


def read_throttling(root: Path = CGROUP_ROOT) -> Throttling:
    """Read how often and how long the processor quota stopped the cgroup."""
    for path, unit, per_second in (
        (root / "cpu.stat", "throttled_usec", 1e6),
        (root / "cpu" / "cpu.stat", "throttled_time", 1e9),
    ):
        if counts := _counters(path):
            return Throttling(
                counts.get("nr_periods", 0),
                counts.get("nr_throttled", 0),
                counts.get(unit, 0) / per_second,
            )
    return Throttling(0, 0, 0.0)


def read_oom_kills(root: Path = CGROUP_ROOT) -> int:
    """Read how many processes of the cgroup the kernel killed for memory; 0 where it is silent."""
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        if counts := _counters(path):
            return counts.get("oom_kill", 0)
    return 0


def read_faults() -> Faults:
    """Read this process's page faults."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Faults(minor=usage.ru_minflt, major=usage.ru_majflt)


def raise_open_files(wanted: int) -> int:
    """Let this process open up to `wanted` files, if it may; return how many it may now.

    Shells give 1,024 for programs that use `select`, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted and hard > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
            soft = min(wanted, hard)
        except (OSError, ValueError) as error:  # macOS allows fewer than its own hard limit says
            log.warning("%d open files are all there can be: %s", soft, error)
    return min(soft, wanted)


def read_disk(folder: Path) -> Disk:
    """Read the volume that `folder` is on, or will be on once it is made.

    Raises:
        OSError: the volume does not answer.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    volume = os.statvfs(existing)
    return Disk(volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize)


def _counters(path: Path) -> dict[str, int]:
    """Read `name value` lines; nothing where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
