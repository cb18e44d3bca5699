"""Resources: both cgroup versions are read; without cgroups the figures are zeros."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest

from specops.system.resources import (
    Throttling,
    raise_open_files,
    read_disk,
    read_faults,
    read_oom_kills,
    read_throttling,
)

QUOTA = "nr_periods 40\nnr_throttled 10\n"


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("cpu.stat", "usage_usec 5\nthrottled_usec 2500000\n"),
        ("cpu/cpu.stat", "throttled_time 2500000000\n"),
    ],
    ids=["v2", "v1"],
)
def test_throttling_is_read(name: str, last: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(QUOTA + last)
    assert read_throttling(tmp_path) == Throttling(40, 10, 2.5)


def test_no_quota_is_no_throttling(tmp_path: Path) -> None:
    assert read_throttling(tmp_path) == Throttling(0, 0, 0.0)
    (tmp_path / "cpu.stat").write_text("usage_usec 5\n")
    assert read_throttling(tmp_path) == Throttling(0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
    ids=["v2", "v1"],
)
def test_kills_for_memory_are_read(name: str, text: str, tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path) == 0
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert read_oom_kills(tmp_path) == 2


def test_touching_new_memory_is_a_minor_fault() -> None:
    pages = 64
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:  # the allocator would reuse touched pages
        before = read_faults()
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        assert read_faults().minor > before.minor


@pytest.mark.parametrize(
    ("soft", "hard", "now"),
    [(1024, 4096, 2048), (1024, 1500, 1500), (1024, 1024, 1024), (8192, 8192, 2048)],
)
def test_open_files_are_raised_as_far_as_is_allowed(
    soft: int, hard: int, now: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert raise_open_files(2048) == now
    assert limits[resource.RLIMIT_NOFILE] == (max(soft, now), hard)


def test_a_volume_is_known_before_its_folder_is_made(tmp_path: Path) -> None:
    assert read_disk(tmp_path / "not" / "yet").total == read_disk(tmp_path).total > 0
