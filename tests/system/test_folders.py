"""Folders and files appear whole, and one process writes at a time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from specops.system.folders import atomic_file, atomic_folder, clear_leftovers, locked
from tests.waiting import PATIENCE

MANIFEST = "manifest.json"
# Holds a folder's lock until its standard input ends.
HOLDER = """
import sys
from pathlib import Path
from specops.system.folders import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path / "cache"`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "cache")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# -- locks -----------------------------------------------------------------------------------------


def test_a_lock_is_a_file_that_is_open_for_writing_beside_its_folder(tmp_path: Path) -> None:
    """NFS grants an exclusive lock of nothing else; the folder holds what it always held."""
    with locked(tmp_path / "cache") as handle:
        assert Path(f"/proc/self/fd/{handle}").resolve() == tmp_path / ".cache.lock"
        assert os.write(handle, b"") == 0
        assert names(tmp_path / "cache") == []
    assert names(tmp_path) == ["cache"]


def test_one_process_waits_for_the_other(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    waits, has = Event(), Event()

    def take() -> None:
        with locked(tmp_path / "cache", waits.set):
            has.set()

    thread = Thread(target=take)
    thread.start()
    assert waits.wait(PATIENCE)
    assert not has.is_set()
    holder.communicate()  # it ends, and removes its lock's file, for which the thread waits
    thread.join(PATIENCE)
    assert has.is_set()
    assert names(tmp_path) == ["cache"]


def test_a_lock_of_a_killed_process_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / ".cache.lock").exists()
    with locked(tmp_path / "cache", lambda: pytest.fail("it waits")):
        pass


def test_who_waited_for_a_removed_file_locks_the_new_one(tmp_path: Path) -> None:
    """Never two at the same time, however many come and go."""
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with locked(tmp_path / "cache"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_all_hidden_leftovers_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "half").touch()
    for name in (".x.lock", ".sources.json.7", "sources.json"):
        (tmp_path / name).touch()
    (tmp_path / "x").mkdir()
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["sources.json", "x"]


# -- folders and files -----------------------------------------------------------------------------


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"

    def stop_halfway() -> None:
        with atomic_folder(out, MANIFEST) as partial:
            (partial / MANIFEST).write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()
    assert names(tmp_path / "new") == []
    for content in ("1", "2"):
        with atomic_folder(out, MANIFEST) as partial:
            (partial / MANIFEST).write_text(content)
            assert not out.exists() or (out / MANIFEST).read_text() == "1"
        assert (out / MANIFEST).read_text() == content
    assert names(tmp_path / "new") == ["out"]


@pytest.mark.parametrize("kind", ["a folder", "a file", "the current folder", "one above it"])
def test_what_nobody_meant_to_replace_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thesis = tmp_path / "home" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years")
    out = {"a file": thesis, "the current folder": Path(), "one above it": Path("..")}.get(
        kind, thesis.parent
    )
    (tmp_path / "home" / "below").mkdir()
    if not out.is_absolute():
        (thesis.parent / MANIFEST).touch()
        monkeypatch.chdir(thesis.parent / "below" if out.name else thesis.parent)
    with pytest.raises(FileExistsError, match=r"not written by|current folder"):
        atomic_folder(out, MANIFEST).__enter__()
    assert thesis.read_text() == "years"
    assert names(tmp_path) == ["home"]


def test_an_empty_folder_and_what_a_link_leads_to_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with atomic_folder(tmp_path / "out", MANIFEST) as partial:
        (partial / MANIFEST).touch()
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "disk") == [MANIFEST]


def test_of_two_writers_of_a_folder_one_is_refused(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as partial:
        (partial / "half").touch()
        with pytest.raises(BlockingIOError), atomic_folder(tmp_path / "out"):
            pass
        assert (partial / "half").exists()
    assert names(tmp_path) == ["out"]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    with atomic_file(file) as partial:
        partial.write_text("old")

    def fail(text: str) -> None:
        with atomic_file(file) as partial:
            if text:
                partial.write_text(text)
            raise RuntimeError

    for text in ("ne", ""):  # also before there is a file
        with pytest.raises(RuntimeError):
            fail(text)
    assert file.read_text() == "old"
    assert names(tmp_path) == ["kept.json"]
