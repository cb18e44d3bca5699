"""How much memory there is, what holds it and how much the machine suffers for it.

The kernel kills on the cgroup's anonymous memory and swap, not on `memory.current`, which counts
page cache that it can drop at any time (our weights among it). So the kinds are read apart. Both
cgroup versions exist in the field, with different files and different words.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from specops.system import without_procfs

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
_PAGE_BYTES = mmap.PAGESIZE
_KIB = 1024


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes held and bytes allowed.

    Where a cgroup limits this process, the figures are the whole cgroup's, because that is what
    the limit counts; otherwise they are this process's own and the limit is the machine's memory.
    `swap_limit` is the swap that can really be used: 0 where the machine has none.
    """

    anon: int
    file: int
    swap: int
    limit: int
    swap_limit: int
    source: str  # "cgroup v2", "cgroup v1" or "process"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that one process holds: anonymous, backed by files, swapped out."""

    anon: int
    file: int
    swap: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Seconds, since boot, in which some or all tasks waited for memory."""

    some: float
    full: float


def read_memory(proc: Path = PROC, root: Path = CGROUP_ROOT) -> MemoryReading:
    """Read the memory of the limiting cgroup, or of this process where nothing limits it.

    Raises:
        OSError: procfs is not readable.
    """
    if not (proc / "meminfo").exists():  # macOS
        return _of_process(proc, without_procfs.total_memory(), 0)
    machine = _fields_kib(proc / "meminfo")
    memory_total, swap_total = machine["MemTotal"], machine["SwapTotal"]
    version2, version1 = _cgroups(proc, root)
    if version2 is not None:
        limit = _lowest(version2, root, "memory.max")
        if limit is not None and limit < memory_total:
            stat = _counters(version2 / "memory.stat")
            return MemoryReading(
                anon=stat["anon"],
                file=stat["file"],
                swap=_number(version2 / "memory.swap.current") or 0,  # none without swap accounting
                limit=limit,
                swap_limit=_least(_lowest(version2, root, "memory.swap.max"), swap_total),
                source="cgroup v2",
            )
    if version1 is not None:
        stat = _counters(version1 / "memory.stat")
        limit = stat["hierarchical_memory_limit"]
        if limit < memory_total:
            # Memory plus swap; the field is missing where the kernel does not account for swap.
            both = stat.get("hierarchical_memsw_limit")
            return MemoryReading(
                anon=stat["total_rss"],
                file=stat["total_cache"],
                swap=stat.get("total_swap", 0),
                limit=limit,
                swap_limit=_least(None if both is None else both - limit, swap_total),
                source="cgroup v1",
            )
    return _of_process(proc, memory_total, swap_total)


def _of_process(proc: Path, limit: int, swap_limit: int) -> MemoryReading:
    own = process_memory(proc)
    return MemoryReading(own.anon, own.file, own.swap, limit, swap_limit, source="process")


def process_memory(proc: Path = PROC) -> ProcessMemory:
    """Read this process's own memory, whatever limits it.

    Raises:
        OSError: procfs is not readable.
    """
    if not (proc / "self" / "status").exists():
        anon, file = without_procfs.own_memory()
        return ProcessMemory(anon, file, swap=0)
    # `status` and not `smaps_rollup`: the latter walks every page of the mapped weights.
    status = _fields_kib(proc / "self" / "status")
    if "RssAnon" in status:
        anon, file = status["RssAnon"], status["RssFile"]
    else:  # sandboxes that imitate procfs leave these lines out
        _, resident, shared = map(int, (proc / "self" / "statm").read_text().split()[:3])
        anon, file = (resident - shared) * _PAGE_BYTES, shared * _PAGE_BYTES
    return ProcessMemory(anon, file, status.get("VmSwap", 0))


def page_cache_room(proc: Path = PROC, root: Path = CGROUP_ROOT) -> int:
    """Bytes of files that can stay in memory: the limit less what is held anonymously.

    At most what the machine has available, which others may have taken.

    Raises:
        OSError: procfs is not readable.
    """
    reading = read_memory(proc, root)
    room = max(0, reading.limit - reading.anon)
    if not (proc / "meminfo").exists():
        return room
    available = _fields_kib(proc / "meminfo").get("MemAvailable")  # old kernels do not say
    return room if available is None else min(room, available)


def read_pressure(proc: Path = PROC, root: Path = CGROUP_ROOT) -> Pressure | None:
    """Read the memory pressure of this process's cgroup, or else of the machine.

    Returns:
        None where the kernel keeps no pressure figures.
    """
    version2, _ = _cgroups(proc, root)
    candidates = [proc / "pressure" / "memory"]
    if version2 is not None:
        candidates.insert(0, version2 / "memory.pressure")
    for path in candidates:
        try:
            text = path.read_text()
        except OSError:  # also EOPNOTSUPP: the file is there, the accounting is off
            continue
        totals = dict(re.findall(r"^(some|full) .*\btotal=(\d+)", text, re.MULTILINE))
        if "some" in totals:
            return Pressure(int(totals["some"]) / 1e6, int(totals.get("full", 0)) / 1e6)
    return None


def _cgroups(proc: Path, root: Path) -> tuple[Path | None, Path | None]:
    """Return the folders of this process's cgroup that have memory figures: v2's and v1's."""
    version2 = version1 = None
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            version2 = _existing(root, path)
        elif "memory" in controllers.split(","):
            version1 = _existing(root / "memory", path)
    return version2, version1


def _existing(mount: Path, path: str) -> Path | None:
    """Return the cgroup's folder, or the mount itself: a container sees its own cgroup there."""
    for folder in (mount / path.lstrip("/"), mount):
        if (folder / "memory.stat").is_file():
            return folder
    return None


def _lowest(cgroup: Path, root: Path, name: str) -> int | None:
    """Return the lowest limit called `name` from the cgroup up to the root; None without one."""
    limits = []
    for folder in (cgroup, *cgroup.parents):
        limits.append(_number(folder / name))
        if folder == root:
            break
    return min((limit for limit in limits if limit is not None), default=None)


def _number(path: Path) -> int | None:
    """Return the file's number; None where it says `max` or there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _least(limit: int | None, available: int) -> int:
    return available if limit is None else max(0, min(limit, available))


def _counters(path: Path) -> dict[str, int]:
    """Read `name value` lines."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def _fields_kib(path: Path) -> dict[str, int]:
    """Read the `Name: value kB` lines, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: int(value) * _KIB for name, value in found}
