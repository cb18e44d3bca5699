"""Reads memory limits, memory use by kind, and memory pressure.

The kernel kills by a cgroup's anonymous memory and swap, not by `memory.current`: that includes
page cache (such as our weights), which the kernel can drop at any time. So this module reads each
kind separately. Both cgroup versions are in use; their files and names differ.
"""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from specops.system import without_procfs
from specops.system.cgroup import CGROUP_ROOT, PROC, cgroup_folders, counters

_PAGE_BYTES = mmap.PAGESIZE
_KIB = 1024
_UNLIMITED_V1 = 1 << 62  # the kernel says a little less than 1 << 63


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes held and bytes allowed.

    If a cgroup limits this process, the figures are the whole cgroup's, because the limit applies
    to the sum; otherwise they are this process's, with the machine's memory as the limit.
    `swap_limit` is the usable swap: 0 on a machine without swap. `swap_cap` is the swap that the
    kernel allows in addition to `limit`; it may exceed the machine's, and is None if the kernel
    enforces no limit, which can happen even if the container engine was given one.
    """

    anon: int
    file: int
    swap: int
    limit: int
    swap_limit: int
    source: str  # "cgroup v2", "cgroup v1" or "process"
    swap_cap: int | None = None

    @property
    def limit_note(self) -> str:
        """Where `limit` comes from."""
        if self.source == "process":
            return "the machine's memory: no cgroup limits this process"
        return f"held by {self.source}"

    @property
    def swap_note(self) -> str:
        """Where `swap_limit` comes from."""
        if self.swap_cap == 0:
            return "the limit: none is allowed"
        if self.swap_limit == 0:
            return "this machine has none"
        if self.swap_cap is None:
            unlimited = "" if self.source == "process" else ": the kernel holds no limit for swap"
            return f"all that this machine has{unlimited}"
        if self.swap_cap > self.swap_limit:
            return f"all that this machine has; the limit is {self.swap_cap / 1e6:,.1f} MB"
        return f"held by {self.source}"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that one process holds: anonymous, backed by files, swapped out."""

    anon: int
    file: int
    swap: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Seconds since boot during which some or all tasks waited for memory."""

    some: float
    full: float


def read_memory(proc: Path = PROC, root: Path = CGROUP_ROOT) -> MemoryReading:
    """Read the memory of the limiting cgroup, or of this process if no cgroup limits it.

    Raises:
        OSError: procfs is not readable.
    """
    if not (proc / "meminfo").exists():  # macOS
        return _of_process(proc, without_procfs.total_memory(), 0)
    machine = _fields_kib(proc / "meminfo")
    memory_total, swap_total = machine["MemTotal"], machine["SwapTotal"]
    groups = _memory_cgroups(proc, root)
    if folders := groups.get(2):
        limit = _lowest(folders, "memory.max")
        if limit is not None and limit < memory_total:
            held = _with_limit(folders, "memory.max", limit)
            stat = counters(held / "memory.stat")
            cap = _lowest(folders, "memory.swap.max")
            return MemoryReading(
                anon=stat["anon"],
                file=stat["file"],
                swap=_number(held / "memory.swap.current") or 0,  # 0 without swap accounting
                limit=limit,
                swap_limit=_least(cap, swap_total),
                source="cgroup v2",
                swap_cap=cap,
            )
    if folders := groups.get(1):
        stat = counters(folders[0] / "memory.stat")
        limit = stat["hierarchical_memory_limit"]
        if limit < memory_total:
            # Memory plus swap; the field is missing if the kernel does not account for swap.
            both = stat.get("hierarchical_memsw_limit", _UNLIMITED_V1)
            cap = max(0, both - limit) if both < _UNLIMITED_V1 else None
            stat = counters(_with_limit(folders, "memory.limit_in_bytes", limit) / "memory.stat")
            return MemoryReading(
                anon=stat["total_rss"],
                file=stat["total_cache"],
                swap=stat.get("total_swap", 0),
                limit=limit,
                swap_limit=_least(cap, swap_total),
                source="cgroup v1",
                swap_cap=cap,
            )
    return _of_process(proc, memory_total, swap_total)


def _of_process(proc: Path, limit: int, swap_limit: int) -> MemoryReading:
    own = process_memory(proc)
    return MemoryReading(own.anon, own.file, own.swap, limit, swap_limit, source="process")


def process_memory(proc: Path = PROC) -> ProcessMemory:
    """Read the memory of this process alone.

    Raises:
        OSError: procfs is not readable.
    """
    if not (proc / "self" / "status").exists():
        anon, file = without_procfs.own_memory()
        return ProcessMemory(anon, file, swap=0)
    # Not `smaps_rollup`, which visits every page of the mapped weights.
    status = _fields_kib(proc / "self" / "status")
    if "RssAnon" in status:
        anon, file = status["RssAnon"], status["RssFile"]
    else:  # missing in sandboxes that imitate procfs
        _, resident, shared = map(int, (proc / "self" / "statm").read_text("utf-8").split()[:3])
        anon, file = (resident - shared) * _PAGE_BYTES, shared * _PAGE_BYTES
    return ProcessMemory(anon, file, status.get("VmSwap", 0))


def page_cache_room(proc: Path = PROC, root: Path = CGROUP_ROOT) -> int:
    """Return how many bytes of files can stay in memory: the limit less anonymous memory.

    If the machine has less memory available because of other processes, that counts.

    Raises:
        OSError: procfs is not readable.
    """
    reading = read_memory(proc, root)
    room = max(0, reading.limit - reading.anon)
    if not (proc / "meminfo").exists():
        return room
    available = _fields_kib(proc / "meminfo").get("MemAvailable")  # missing on old kernels
    return room if available is None else min(room, available)


def read_pressure(proc: Path = PROC, root: Path = CGROUP_ROOT) -> Pressure | None:
    """Read the memory pressure of this process's cgroup, or else of the machine.

    Returns:
        None if the kernel keeps no pressure figures.
    """
    own = _memory_cgroups(proc, root).get(2, [])[:1]
    for path in (*(folder / "memory.pressure" for folder in own), proc / "pressure" / "memory"):
        try:
            text = path.read_text("utf-8")
        except OSError:  # also EOPNOTSUPP: the file exists, but the accounting is off
            continue
        totals = dict(re.findall(r"^(some|full) .*\btotal=(\d+)", text, re.MULTILINE))
        if "some" in totals:
            return Pressure(int(totals["some"]) / 1e6, int(totals.get("full", 0)) / 1e6)
    return None


def _memory_cgroups(proc: Path, root: Path) -> dict[int, list[Path]]:
    """Return the cgroup folders with memory figures by version, the process's folder first."""
    return {
        version: [folder for folder in folders if (folder / "memory.stat").is_file()]
        for version, folders in cgroup_folders("memory", root, proc).items()
    }


def _lowest(folders: list[Path], name: str) -> int | None:
    """Return these cgroups' lowest limit called `name`; None if there is none."""
    limits = [_number(folder / name) for folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def _with_limit(folders: list[Path], name: str, limit: int) -> Path:
    """Return the outermost of these cgroups whose limit called `name` is `limit`, else the first.

    Its memory counts, including that of its other child cgroups: they share the limit.
    """
    return next((folder for folder in folders[::-1] if _number(folder / name) == limit), folders[0])


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it says `max` or the file is missing."""
    try:
        text = path.read_text("utf-8").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _least(limit: int | None, available: int) -> int:
    return available if limit is None else min(limit, available)


def _fields_kib(path: Path) -> dict[str, int]:
    """Read lines such as `Name: 5 kB`; return bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text("utf-8"), re.MULTILINE)
    return {name: int(value) * _KIB for name, value in lines}
