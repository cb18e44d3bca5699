"""Threads follow the cgroup's quota and the affinity."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from specops.cpus import available_threads, cpu_quota


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", math.inf), ("150000 100000", 1.5), ("400000 100000", 4.0)]
)
def test_quota_of_cgroup_v2(tmp_path: Path, text: str, quota: float) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("text", "quota"), [("-1", math.inf), ("50000", 0.5), ("200000", 2.0)])
def test_quota_of_cgroup_v1(tmp_path: Path, text: str, quota: float) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == quota


def test_no_cgroup_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


def test_threads_are_at_least_one_and_at_most_the_affinity(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert available_threads(tmp_path) == allowed
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_threads(tmp_path) == 1
