"""Memory readings from imitated procfs and cgroup trees, and from this machine."""

import mmap
import subprocess
import sys
from dataclasses import asdict

import pytest

from specops.system.memory import (
    Pressure,
    ProcessMemory,
    page_cache_room,
    process_memory,
    read_memory,
    read_pressure,
)
from tests.system.machine import GIB, Machine, limited

KIB = 1024
MIB = 1024 * KIB
NO_LIMIT = 2**63 - 4096  # as version 1 writes it


def v2(folder: str, limit: object, swap: object, *, anon: int = 3 * MIB) -> dict[str, object]:
    """Files of a version 2 cgroup, with 5 MiB of page cache and 1 MiB of swap."""
    return {
        f"{folder}memory.stat": f"anon {anon}\nfile {5 * MIB}\nshmem 1",
        f"{folder}memory.max": limit,
        f"{folder}memory.swap.max": swap,
        f"{folder}memory.swap.current": MIB,
    }


def v1(
    folder: str, limit: int, both: int | None, *, own: int | None = None, anon: int = 3 * MIB
) -> dict[str, object]:
    """The same of version 1; `both`: memory and swap; `own`: the limit of this cgroup alone."""
    lines = [f"rss {MIB}", f"total_rss {anon}", f"total_cache {5 * MIB}", f"total_swap {MIB}"]
    lines += [f"hierarchical_memory_limit {limit}"]
    lines += [] if both is None else [f"hierarchical_memsw_limit {both}"]
    files: dict[str, object] = {f"memory{folder}/memory.stat": "\n".join(lines)}
    return files if own is None else files | {f"memory{folder}/memory.limit_in_bytes": own}


HELD = {"anon": 3 * MIB, "file": 5 * MIB, "swap": MIB}
PROCESS = {
    **{"anon": 100 * KIB, "file": 200 * KIB, "swap": 7 * KIB},
    **{"limit": 8 * GIB, "swap_limit": 2 * GIB, "source": "process", "swap_cap": None},
}
V2, V1 = {"source": "cgroup v2"}, {"source": "cgroup v1"}
POD = {"limit": 2 * GIB, "anon": GIB}
# The process's cgroups, their files, and what is read.
READINGS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "no limit: the process's memory and the machine's": ("0::/", {}, PROCESS),
    "v2: a limit makes the cgroup the source": ("0::/", v2("", 4 * GIB, GIB),
        {**HELD, "limit": 4 * GIB, "swap_limit": GIB, "swap_cap": GIB, **V2}),
    "v2: no more swap than the machine has": ("0::/", v2("", 4 * GIB, 12 * GIB),
        {"swap_limit": 2 * GIB, "swap_cap": 12 * GIB}),
    "v2: no limit of swap": ("0::/", v2("", 4 * GIB, "max"), {"swap_limit": 2 * GIB}),
    "v2: a limit that limits nothing": ("0::/", v2("", 64 * GIB, "max"), PROCESS),
    "v2: none": ("0::/", v2("", "max", "max"), PROCESS),
    "v2: a parent's": ("0::/pod/api", {**v2("pod/", 2 * GIB, 0), **v2("pod/api/", "max", "max")},
        {"limit": 2 * GIB, "swap_limit": 0, **V2}),
    # The kernel kills by the parent's limit as soon as both containers together reach it.
    "v2: all that shares the lowest limit is held": (
        "0::/pod/api", {**v2("pod/", 2 * GIB, 0, anon=GIB), **v2("pod/api/", 3 * GIB, "max")}, POD
    ),
    "v2: with equal limits, too": (
        "0::/pod/api", {**v2("pod/", 2 * GIB, 0, anon=GIB), **v2("pod/api/", 2 * GIB, "max")}, POD
    ),
    "v2: the process's own is lower": (
        "0::/pod/api", {**v2("pod/", 2 * GIB, 0, anon=GIB), **v2("pod/api/", GIB, "max")},
        {"limit": GIB, **HELD}),
    "v2: a path outside of the container is the mount": ("0::/../../docker/abc", v2("", GIB, 0),
        {"limit": GIB}),
    "v1: the swap limit is memory and swap less memory": (
        "5:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/", v1("/docker/abc", 4 * GIB, 5 * GIB),
        {**HELD, "limit": 4 * GIB, "swap_limit": GIB, "swap_cap": GIB, **V1}),
    "v1: all that shares the lowest limit is held": (
        "5:memory:/pod/api",
        {
            **v1("/pod/api", 2 * GIB, 3 * GIB, own=NO_LIMIT),
            **v1("/pod", 2 * GIB, 3 * GIB, own=2 * GIB, anon=GIB),
        },
        {**POD, "swap_limit": GIB},
    ),
    "v1: in a container, at the mount; no figures of swap": (
        "5:memory:/docker/abc", v1("", GIB, None), {"limit": GIB, "swap_limit": 2 * GIB, **V1}
    ),
    "v1: none": ("5:memory:/docker/abc", v1("", NO_LIMIT, NO_LIMIT), PROCESS),
}  # fmt: skip


@pytest.mark.parametrize("case", READINGS)
def test_memory_is_read_where_it_is_limited(machine: Machine, case: str) -> None:
    cgroups, files, expected = READINGS[case]
    machine.enter(cgroups)
    machine.set(files)
    reading = asdict(read_memory(machine.proc, machine.root))
    assert {name: reading[name] for name in expected} == expected
    assert process_memory(machine.proc) == ProcessMemory(100 * KIB, 200 * KIB, 7 * KIB)


def test_a_kernel_without_swap_accounting_holds_none(machine: Machine) -> None:
    machine.set(v2("", 4 * GIB, GIB))
    (machine.root / "memory.swap.current").unlink()
    assert read_memory(machine.proc, machine.root).swap == 0


@pytest.mark.parametrize(
    ("limit", "swap", "machine_has", "note"),
    [
        (4 * GIB, 12 * GIB, 16 * GIB, "held by cgroup v2"),
        (4 * GIB, 12 * GIB, 2 * GIB, "all that this machine has; the limit is 12,884.9 MB"),
        (4 * GIB, 12 * GIB, 0, "this machine has none"),
        (4 * GIB, None, 2 * GIB, "all that this machine has: the kernel holds no limit for swap"),
        (4 * GIB, 0, 2 * GIB, "the limit: none is allowed"),
        (None, None, 2 * GIB, "all that this machine has"),
    ],
)
def test_the_note_says_which_limit_of_swap_applies(
    machine: Machine, limit: int | None, swap: int | None, machine_has: int, note: str
) -> None:
    total = f"MemTotal: 8388608 kB\nSwapTotal: {machine_has // KIB} kB\n"
    machine.write(machine.proc / "meminfo", total)
    machine.set(v2("", limit or "max", "max" if swap is None else swap))
    reading = read_memory(machine.proc, machine.root)
    assert reading.swap_note == note
    if limit is None:
        assert "no cgroup" in reading.limit_note
        return
    assert reading.limit_note == "held by cgroup v2"
    machine.enter("5:memory:/docker/abc")  # and with the other version
    machine.set(v1("/docker/abc", limit, NO_LIMIT if swap is None else limit + swap))
    assert read_memory(machine.proc, machine.root).swap_note == note.replace("v2", "v1")


def test_procfs_without_kinds_of_memory_is_read_from_statm(machine: Machine) -> None:
    machine.write(machine.proc / "self/status", "Name:\tpython\nVmRSS:\t 4 kB\n")
    machine.write(machine.proc / "self/statm", "500 30 10 1 0 20 0\n")
    reading = read_memory(machine.proc, machine.root)
    assert (reading.anon, reading.file) == (20 * mmap.PAGESIZE, 10 * mmap.PAGESIZE)
    assert reading.swap == 0


PSI = "some avg10=0.00 avg60=1.50 avg300=0.10 total=2500000\nfull avg10=0.00 total=1500000\n"


def test_pressure_is_the_cgroups_or_else_the_machines(machine: Machine) -> None:
    def pressure() -> Pressure | None:
        return read_pressure(machine.proc, machine.root)

    machine.write(machine.proc / "pressure/memory", PSI.replace("2500000", "9900000"))
    machine.set({**v2("", "max", "max"), "memory.pressure": PSI})
    assert pressure() == Pressure(some=2.5, full=1.5)
    (machine.root / "memory.pressure").unlink()
    assert pressure() == Pressure(some=9.9, full=1.5)
    (machine.proc / "pressure/memory").unlink()
    assert pressure() is None


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
    machine.set(v2("", GIB, "max"))
    assert room() == GIB - 3 * MIB
    machine.set(v2("", MIB, "max"))
    assert room() == 0
    little = "MemTotal: 8388608 kB\nMemAvailable: 7 kB\nSwapTotal: 0 kB\n"
    machine.write(machine.proc / "meminfo", little)
    machine.set(v2("", "max", "max"))
    assert room() == 7 * KIB


def test_a_real_cap_is_read_from_inside_it() -> None:
    code = (
        "from specops.system.memory import *; r = read_memory(); print(r.limit, r.source, r.anon)"
    )
    command = [sys.executable, "-c", code]
    with limited(memory=512 * MIB) as group:
        done = subprocess.run(group.enclosed(command), capture_output=True, text=True, check=True)
        limit, *source, anon = done.stdout.split()
        assert int(limit) == 512 * MIB
        assert source == ["cgroup", f"v{group.version}"]
        assert 0 < int(anon) < 512 * MIB
        assert group.oom_kills() == 0


def test_a_process_above_a_real_cap_is_killed_and_counted() -> None:
    with limited(memory=64 * MIB) as group:
        command = [sys.executable, "-c", "print(len(bytearray(256 << 20)))"]
        done = subprocess.run(group.enclosed(command), capture_output=True, check=False)
        assert done.returncode == -9
        assert group.oom_kills() == 1
