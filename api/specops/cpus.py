"""How many threads the service may keep busy: affinity and cgroup quota, not the host's cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(root: Path = _CGROUP) -> float:
    """CPUs that the cgroup grants (v2 or v1); infinity without a quota."""
    try:
        unified = root / "cpu.max"
        if unified.is_file():
            quota, period = unified.read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
    except FileNotFoundError:
        return math.inf
    if quota in ("max", "-1"):
        return math.inf
    return int(quota) / int(period)


def available_threads(root: Path = _CGROUP) -> int:
    """Threads worth starting; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(allowed, cpu_quota(root))))
