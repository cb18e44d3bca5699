"""Threads follow the cgroup's quota and the affinity."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.memory.cgroup import CgroupError, cgroup
from specops.system.cpus import cpu_quota


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", math.inf), ("150000 100000", 1.5), ("400000 100000", 4.0)]
)
def test_quota_of_cgroup_v2(tmp_path: Path, text: str, quota: float) -> None:
    assert cpu_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("text", "quota"), [("-1", math.inf), ("50000", 0.5), ("200000", 2.0)])
def test_quota_of_cgroup_v1(tmp_path: Path, text: str, quota: float) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == quota


def test_the_lowest_quota_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/pod/api\n0::/pod/api\n")
    (root / "pod" / "api").mkdir(parents=True)
    (root / "pod" / "cpu.max").write_text("150000 100000\n")
    (root / "pod" / "api" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(root, proc) == 1.5
    (root / "cpu" / "pod" / "api").mkdir(parents=True)
    (root / "cpu" / "pod" / "api" / "cpu.cfs_quota_us").write_text("50000\n")
    (root / "cpu" / "pod" / "api" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(root, proc) == 0.5


def test_a_path_that_is_not_seen_here_means_the_mounts_own_quota(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (root / "cpu.max").write_text("200000 100000\n")
    for path in ("/../../docker/abc", "/docker/abc"):
        (proc / "self" / "cgroup").write_text(f"0::{path}\n")
        assert cpu_quota(root, proc) == 2.0


PRINT_THREADS = [
    sys.executable,
    "-c",
    "from specops.system import cpus; print(cpus.available_threads())",
]


def test_threads_follow_a_real_affinity() -> None:
    one = min(os.sched_getaffinity(0))
    pinned = subprocess.run(
        PRINT_THREADS,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )
    assert pinned.stdout.strip() == "1"


def test_threads_follow_a_real_quota() -> None:
    try:
        with cgroup(f"specops-test-{os.getpid()}", cpus=1.5) as group:
            command = group.enclosed(PRINT_THREADS)
            limited = subprocess.run(command, capture_output=True, text=True, check=True)
    except CgroupError as error:
        pytest.skip(str(error))
    assert limited.stdout.strip() == "1"
