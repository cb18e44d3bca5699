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
VERSIONS = {"v2": "0::{}\n", "v1": "7:cpu,cpuacct:{0}\n4:memory:{0}\n"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def proc_in(folder: Path, version: str, cgroup: str) -> Path:
    """A procfs of a process in `cgroup`."""
    write(folder / "proc/self/cgroup", VERSIONS[version].format(cgroup))
    return folder / "proc"


@pytest.mark.parametrize("cgroup", ["/", "/system.slice/specops.service"])
@pytest.mark.parametrize(
    ("version", "mount", "last"),
    [
        ("v2", "", "usage_usec 5\nthrottled_usec 2500000\n"),
        ("v1", "cpu", "throttled_time 2500000000\n"),
    ],
)
def test_throttling_is_read(
    version: str, mount: str, last: str, cgroup: str, tmp_path: Path
) -> None:
    """Of the process's own cgroup; without a quota there, of the nearest one above it."""
    proc = proc_in(tmp_path, version, cgroup)
    own = tmp_path / mount / cgroup.lstrip("/")
    write(tmp_path / mount / "cpu.stat", "nr_periods 9\nnr_throttled 9\n" + last)
    write(own / "cpu.stat", QUOTA + last)
    assert read_throttling(tmp_path, proc) == Throttling(40, 10, 2.5)
    write(own / "part" / "cpu.stat", "nr_periods 0\nnr_throttled 0\n")
    proc = proc_in(tmp_path, version, f"{cgroup.rstrip('/')}/part")
    assert read_throttling(tmp_path, proc) == Throttling(40, 10, 2.5)


def test_no_quota_is_no_throttling(tmp_path: Path) -> None:
    proc = proc_in(tmp_path, "v2", "/")
    assert read_throttling(tmp_path, proc) == Throttling(0, 0, 0.0)
    (tmp_path / "cpu.stat").write_text("usage_usec 5\n")
    assert read_throttling(tmp_path, proc) == Throttling(0, 0, 0.0)


@pytest.mark.parametrize("cgroup", ["/", "/system.slice/specops.service"])
@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        ("v2", "memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\n"),
        ("v1", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_kills_for_memory_are_read(
    version: str, name: str, text: str, cgroup: str, tmp_path: Path
) -> None:
    proc = proc_in(tmp_path, version, cgroup)
    assert read_oom_kills(tmp_path, proc) == 0
    mount = tmp_path if version == "v2" else tmp_path / "memory"
    write(mount / name, text.replace("oom_kill 2", "oom_kill 9"))
    write(mount / cgroup.lstrip("/") / name, text)
    assert read_oom_kills(tmp_path, proc) == 2


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
