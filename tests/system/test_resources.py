"""Resources: both cgroup versions are read; without cgroups the figures are zeros."""

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
from tests.system.machine import Machine

QUOTA = "nr_periods 40\nnr_throttled 10\n"
CGROUPS = ["/", "/system.slice/specops.service"]


@pytest.mark.parametrize("cgroup", CGROUPS)
@pytest.mark.parametrize(
    ("line", "mount", "last"),
    [
        ("0::", "", "usage_usec 5\nthrottled_usec 2500000\n"),
        ("7:cpu,cpuacct:", "cpu", "throttled_time 2500000000\n"),
    ],
)
def test_throttling_is_read(
    machine: Machine, line: str, mount: str, last: str, cgroup: str
) -> None:
    """Of the process's own cgroup; without a quota there, of the nearest one above it."""
    own = f"{mount}{cgroup}"
    machine.set({f"{mount}/cpu.stat": "nr_periods 9\nnr_throttled 9\n" + last})
    machine.set({f"{own}/cpu.stat": QUOTA + last})
    machine.enter(line + cgroup)
    assert read_throttling(machine.root, machine.proc) == Throttling(40, 10, 2.5)
    machine.set({f"{own}/part/cpu.stat": "nr_periods 0\nnr_throttled 0\n"})
    machine.enter(f"{line}{cgroup.rstrip('/')}/part")
    assert read_throttling(machine.root, machine.proc) == Throttling(40, 10, 2.5)


def test_no_quota_is_no_throttling(machine: Machine) -> None:
    assert read_throttling(machine.root, machine.proc) == Throttling(0, 0, 0.0)
    machine.set({"cpu.stat": "usage_usec 5"})
    assert read_throttling(machine.root, machine.proc) == Throttling(0, 0, 0.0)


@pytest.mark.parametrize("cgroup", CGROUPS)
@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::", "{}/memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill {}"),
        ("4:memory:", "memory{}/memory.oom_control", "oom_kill_disable 0\noom_kill {}"),
    ],
)
def test_kills_for_memory_are_read(
    machine: Machine, line: str, file: str, text: str, cgroup: str
) -> None:
    machine.enter(line + cgroup)
    assert read_oom_kills(machine.root, machine.proc) == 0
    for above, kills in (("/", 9), (cgroup, 2)):
        machine.set({file.format(above): text.format(kills)})
    assert read_oom_kills(machine.root, machine.proc) == 2


def test_touching_new_memory_is_a_minor_fault() -> None:
    pages = 64
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:  # the allocator would reuse touched pages
        before = read_faults()
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        assert read_faults()["minor"] > before["minor"]


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
    assert read_disk(tmp_path / "not" / "yet")["total"] == read_disk(tmp_path)["total"] > 0
