"""Without the parts that only Linux has, the rest works: each test takes one part away."""

import ctypes
import mmap
import os
import resource
from pathlib import Path

import pytest

from specops.runtime.kvcache.block_pool import BlockPool
from specops.system import cpus, memory, page_cache, without_procfs
from specops.system.checksums import checksums
from specops.system.resources import raise_open_files, read_throttling

SIBLINGS = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


def topology(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, others in siblings.items():
        described = folder / f"cpu{cpu}" / "topology"
        described.mkdir(parents=True)
        (described / "thread_siblings_list").write_text(others + "\n")
    return folder


@pytest.mark.parametrize(
    ("allowed", "threads"), [({*range(8)}, 4), ({0, 4}, 1), ({0, 1, 4}, 2), ({1, 2, 3}, 3)]
)
def test_hyperthreads_are_not_taken_for_cores(
    tmp_path: Path, allowed: set[int], threads: int
) -> None:
    system = topology(tmp_path / "cpu", SIBLINGS)
    assert cpus.available_threads(tmp_path, tmp_path, cpus=allowed, system=system) == threads


@pytest.mark.parametrize("count", [4, 16, 64])
def test_each_cpu_counts_if_the_system_does_not_describe_cores(tmp_path: Path, count: int) -> None:
    allowed = {*range(count)}
    assert cpus.available_threads(tmp_path, tmp_path, cpus=allowed, system=tmp_path) == count
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert cpus.available_threads(tmp_path, tmp_path, cpus=allowed, system=tmp_path) == 3
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpus.available_threads(tmp_path, tmp_path, cpus=allowed, system=tmp_path) == 1


def test_without_affinity_all_cpus_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpus.allowed_cpus() == {*range(os.cpu_count() or 1)}


def test_memory_is_known_without_procfs(tmp_path: Path) -> None:
    reading = memory.read_memory(tmp_path, tmp_path)
    assert reading.source == "process"
    assert reading.limit == os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert 0 < reading.anon < reading.limit
    assert memory.page_cache_room(tmp_path, tmp_path) == reading.limit - reading.anon
    assert memory.read_pressure(tmp_path, tmp_path) is None
    assert read_throttling(tmp_path).periods == 0


@pytest.mark.parametrize("failed", [0, -1])
def test_the_systems_call_gives_the_memory_if_it_works(failed: int) -> None:
    def proc_pid_rusage(process: int, kind: int, buffer: object) -> int:
        assert (process, kind) == (os.getpid(), 0)
        usage = ctypes.cast(buffer, ctypes.POINTER(without_procfs._Usage)).contents
        usage.footprint, usage.resident = 3 << 20, 5 << 20
        return failed

    class Library:
        pass

    library = Library()
    library.proc_pid_rusage = proc_pid_rusage
    found = without_procfs.own_memory(library)
    if not failed:
        assert found == (3 << 20, 2 << 20)
    else:
        assert found == without_procfs.own_memory()


def test_files_are_read_where_the_page_cache_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(page_cache, "_POPULATE_READ", mmap.MADV_WILLNEED)
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 << 20))
    assert checksums([path], room=1 << 20).keys() == {"weights"}
    page_cache.forget(path)
    pool = BlockPool(2, mmap.PAGESIZE)
    pool.memory[1] = 7
    assert pool.memory[1].all()


def test_fewer_open_files_than_wanted_are_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """macOS reports a hard limit that it does not grant."""

    def refuse(*arguments: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1 << 62))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_open_files(65_536) == 256
    assert "current limit exceeds" in caplog.text
