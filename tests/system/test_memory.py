"""Memory readings from imitated procfs and cgroup trees, and from this machine."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.memory.cgroup import CgroupError, cgroup
from specops.system.memory import (
    MemoryReading,
    Pressure,
    ProcessMemory,
    page_cache_room,
    process_memory,
    read_memory,
    read_pressure,
)

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Machine:
    """A machine's /proc and /sys/fs/cgroup, as folders."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.root = folder / "cgroup"
        self.write("proc/meminfo", "MemTotal: 8388608 kB\nSwapTotal: 2097152 kB\nHugePages: 0\n")
        self.write(
            "proc/self/status",
            "Name:\tpython\nRssAnon:\t  100 kB\nRssFile:\t  200 kB\nVmSwap:\t  7 kB\n",
        )
        self.write("proc/self/cgroup", "0::/\n")
        self.root.mkdir()

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def memory(self) -> MemoryReading:
        return read_memory(self.proc, self.root)

    def pressure(self) -> Pressure | None:
        return read_pressure(self.proc, self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# The reading of what the two functions below write with these limits.
CGROUP = MemoryReading(
    anon=3 * MIB,
    file=5 * MIB,
    swap=MIB,
    limit=4 * GIB,
    swap_limit=GIB,
    source="cgroup v2",
    swap_cap=GIB,
)


def write_version2(machine: Machine, folder: str = "cgroup", *, limit: str, swap: str) -> None:
    machine.write(f"{folder}/memory.stat", f"anon {3 * MIB}\nfile {5 * MIB}\nshmem 1\n")
    machine.write(f"{folder}/memory.max", f"{limit}\n")
    machine.write(f"{folder}/memory.swap.max", f"{swap}\n")
    machine.write(f"{folder}/memory.swap.current", f"{MIB}\n")


def write_version1(machine: Machine, folder: str, *, limit: int, both: int | None) -> None:
    lines = [f"rss {MIB}", f"total_rss {3 * MIB}", f"total_cache {5 * MIB}", f"total_swap {MIB}"]
    lines.append(f"hierarchical_memory_limit {limit}")
    if both is not None:
        lines.append(f"hierarchical_memsw_limit {both}")
    machine.write(f"{folder}/memory.stat", "\n".join(lines))


def test_without_a_cgroup_limit_the_process_and_the_machine_are_read(machine: Machine) -> None:
    assert machine.memory() == MemoryReading(
        100 * KIB, 200 * KIB, 7 * KIB, limit=8 * GIB, swap_limit=2 * GIB, source="process"
    )


def test_version_2_limit_makes_the_cgroup_the_source(machine: Machine) -> None:
    write_version2(machine, limit=str(4 * GIB), swap=str(GIB))
    assert machine.memory() == CGROUP
    assert process_memory(machine.proc) == ProcessMemory(100 * KIB, 200 * KIB, 7 * KIB)
    for swap in (str(12 * GIB), "max"):  # never more than the machine has
        write_version2(machine, limit=str(4 * GIB), swap=swap)
        assert machine.memory().swap_limit == 2 * GIB
    (machine.root / "memory.swap.current").unlink()  # without swap accounting
    assert machine.memory().swap == 0


@pytest.mark.parametrize("limit", ["max", str(64 * GIB)])
def test_version_2_limit_that_limits_nothing_is_ignored(machine: Machine, limit: str) -> None:
    write_version2(machine, limit=limit, swap="max")
    assert machine.memory().source == "process"


def test_version_2_limit_of_a_parent_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/api\n")
    write_version2(machine, "cgroup/pod", limit=str(2 * GIB), swap="0")
    write_version2(machine, "cgroup/pod/api", limit="max", swap="max")
    reading = machine.memory()
    assert (reading.limit, reading.swap_limit, reading.source) == (2 * GIB, 0, "cgroup v2")


def test_version_2_holds_what_shares_the_lowest_limit(machine: Machine) -> None:
    """The kernel kills by the parent's limit as soon as both containers together reach it."""
    machine.write("proc/self/cgroup", "0::/pod/api\n")
    write_version2(machine, "cgroup/pod", limit=str(2 * GIB), swap="0")
    write_version2(machine, "cgroup/pod/api", limit=str(3 * GIB), swap="max")
    machine.write("cgroup/pod/memory.stat", f"anon {GIB}\nfile {7 * MIB}\n")
    machine.write("cgroup/pod/memory.swap.current", "5")
    for own in (3 * GIB, 2 * GIB):  # with equal limits, too
        machine.write("cgroup/pod/api/memory.max", str(own))
        reading = machine.memory()
        assert (reading.anon, reading.file, reading.swap) == (GIB, 7 * MIB, 5)
    machine.write("cgroup/pod/api/memory.max", str(GIB))
    assert (machine.memory().limit, machine.memory().anon) == (GIB, 3 * MIB)


def test_version_1_holds_what_shares_the_lowest_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:memory:/pod/api\n")
    write_version1(machine, "cgroup/memory/pod/api", limit=2 * GIB, both=3 * GIB)
    write_version1(machine, "cgroup/memory/pod", limit=2 * GIB, both=3 * GIB)
    stat = machine.root / "memory/pod/memory.stat"
    stat.write_text(stat.read_text().replace(f"total_rss {3 * MIB}", f"total_rss {GIB}"))
    machine.write("cgroup/memory/pod/api/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    machine.write("cgroup/memory/pod/memory.limit_in_bytes", f"{2 * GIB}\n")
    reading = machine.memory()
    assert (reading.limit, reading.anon, reading.swap_limit) == (2 * GIB, GIB, GIB)


def test_version_2_path_outside_of_the_container_falls_back_to_the_mount(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../../docker/abc\n")
    write_version2(machine, limit=str(GIB), swap="0")
    assert machine.memory().limit == GIB


def test_version_1_swap_limit_is_memory_and_swap_less_memory(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/\n")
    write_version1(machine, "cgroup/memory/docker/abc", limit=4 * GIB, both=5 * GIB)
    assert machine.memory() == replace(CGROUP, source="cgroup v1")


def test_version_1_inside_a_container_is_read_at_the_mount(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:memory:/docker/abc\n")
    write_version1(machine, "cgroup/memory", limit=GIB, both=None)
    reading = machine.memory()
    assert (reading.limit, reading.swap_limit) == (GIB, 2 * GIB)
    write_version1(machine, "cgroup/memory", limit=2**63 - 4096, both=2**63 - 4096)  # no limit
    assert machine.memory().source == "process"


@pytest.mark.parametrize(
    ("limit", "swap", "machine_has", "note"),
    [
        (4 * GIB, str(12 * GIB), 16 * GIB, "held by cgroup v2"),
        (4 * GIB, str(12 * GIB), 2 * GIB, "all that this machine has; the limit is 12,884.9 MB"),
        (4 * GIB, str(12 * GIB), 0, "this machine has none"),
        (4 * GIB, "max", 2 * GIB, "all that this machine has: the kernel holds no limit for swap"),
        (4 * GIB, "0", 2 * GIB, "the limit: none is allowed"),
        (None, "max", 2 * GIB, "all that this machine has"),
    ],
)
def test_it_is_said_which_limit_of_swap_holds(
    machine: Machine, limit: int | None, swap: str, machine_has: int, note: str
) -> None:
    machine.write("proc/meminfo", f"MemTotal: 8388608 kB\nSwapTotal: {machine_has // KIB} kB\n")
    write_version2(machine, limit=str(limit or "max"), swap=swap)
    assert machine.memory().swap_note == note
    if limit is None:
        assert "no cgroup" in machine.memory().limit_note
        return
    assert machine.memory().limit_note == "held by cgroup v2"
    machine.write("proc/self/cgroup", "5:memory:/docker/abc\n")  # and with the other version
    both = 2**63 - 4096 if swap == "max" else limit + int(swap)
    write_version1(machine, "cgroup/memory/docker/abc", limit=limit, both=both)
    assert machine.memory().swap_note == note.replace("v2", "v1")


def test_procfs_without_kinds_of_memory_is_read_from_statm(machine: Machine) -> None:
    machine.write("proc/self/status", "Name:\tpython\nVmRSS:\t 4 kB\n")
    machine.write("proc/self/statm", "500 30 10 1 0 20 0\n")
    reading = machine.memory()
    assert (reading.anon, reading.file) == (20 * mmap.PAGESIZE, 10 * mmap.PAGESIZE)
    assert reading.swap == 0


PSI = "some avg10=0.00 avg60=1.50 avg300=0.10 total=2500000\nfull avg10=0.00 total=1500000\n"


def test_pressure_is_the_cgroups_or_else_the_machines(machine: Machine) -> None:
    machine.write("proc/pressure/memory", PSI.replace("2500000", "9900000"))
    write_version2(machine, limit="max", swap="max")
    machine.write("cgroup/memory.pressure", PSI)
    assert machine.pressure() == Pressure(some=2.5, full=1.5)
    (machine.root / "memory.pressure").unlink()
    assert machine.pressure() == Pressure(some=9.9, full=1.5)
    (machine.proc / "pressure/memory").unlink()
    assert machine.pressure() is None


def test_this_machine_is_read_and_touched_memory_is_seen() -> None:
    before = read_memory()
    # A separate mapping: the allocator may still hold freed memory of this size.
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held[:: mmap.PAGESIZE] = b"x" * (len(held) // mmap.PAGESIZE)
    after = read_memory()
    assert after.anon - before.anon > 48 * MIB
    assert 0 < after.anon < after.limit


def test_room_for_files_is_the_limit_without_anonymous_memory(machine: Machine) -> None:
    """Unless the machine has less memory available."""

    def room() -> int:
        return page_cache_room(machine.proc, machine.root)

    assert room() == 8 * GIB - 100 * KIB
    write_version2(machine, limit=str(GIB), swap="max")
    assert room() == GIB - 3 * MIB
    write_version2(machine, limit=str(MIB), swap="max")
    assert room() == 0
    machine.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 7 kB\nSwapTotal: 0 kB\n")
    write_version2(machine, limit="max", swap="max")
    assert room() == 7 * KIB


def test_a_real_cap_is_read_from_inside_it() -> None:
    code = (
        "from specops.system.memory import *; r = read_memory(); print(r.limit, r.source, r.anon)"
    )
    command = [sys.executable, "-c", code]
    try:
        with cgroup(f"specops-test-{os.getpid()}", memory=512 * MIB) as group:
            done = subprocess.run(
                group.enclosed(command), capture_output=True, text=True, check=True
            )
            limit, *source, anon = done.stdout.split()
            assert int(limit) == 512 * MIB
            assert source == ["cgroup", f"v{group.version}"]
            assert 0 < int(anon) < 512 * MIB
            assert group.oom_kills() == 0
    except CgroupError as error:
        pytest.skip(str(error))


def test_a_process_above_a_real_cap_is_killed_and_counted() -> None:
    try:
        with cgroup(f"specops-test-{os.getpid()}", memory=64 * MIB) as group:
            command = [sys.executable, "-c", "print(len(bytearray(256 << 20)))"]
            done = subprocess.run(group.enclosed(command), capture_output=True, check=False)
            assert done.returncode == -9
            assert group.oom_kills() == 1
    except CgroupError as error:
        pytest.skip(str(error))
