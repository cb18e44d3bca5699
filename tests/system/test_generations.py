"""What a cache keeps: the two generations used last, and whatever was used within a week."""

import os
import time
from pathlib import Path

import pytest

from specops.system import generations
from specops.system.folders import locked
from specops.system.generations import outdated, remove, sweep, use

DAY = 24 * 3600.0


def made(folder: Path, name: str, days: float) -> Path:
    """A folder that was last used so many days ago."""
    path = folder / name
    path.mkdir()
    (path / "weights").write_bytes(b"0")
    then = time.time() - days * DAY
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize(
    ("days", "gone"),
    [
        ([], []),
        ([30, 20], []),
        ([30, 20, 0], [30]),
        ([6, 5, 4, 0], []),
        ([30, 8, 6, 5, 0], [8, 30]),
    ],
)
def test_two_stay_and_others_while_they_are_used(
    tmp_path: Path, days: list[int], gone: list[int]
) -> None:
    paths = {age: made(tmp_path, str(age), age) for age in days}
    found = outdated(list(paths.values()))
    assert found == [paths[age] for age in gone]
    remove(found)
    assert {age for age, path in paths.items() if not path.exists()} == set(gone)


def test_what_is_used_is_young_again(tmp_path: Path) -> None:
    first, second, third = (made(tmp_path, str(age), age) for age in (30, 20, 10))
    assert outdated([first, second, third]) == [first]
    use(first)
    assert outdated([first, second, third]) == [second]


def test_a_process_that_runs_for_weeks_still_uses_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ticks = made(tmp_path, "old", 0), iter([None, None])
    use(path)
    aged = made(tmp_path, "like", 30).stat().st_mtime
    os.utime(path, (aged, aged))

    def sleep(seconds: float) -> None:
        assert seconds < 7 * DAY
        if next(ticks, path) is path:
            raise InterruptedError

    monkeypatch.setattr(generations.time, "sleep", sleep)
    with pytest.raises(InterruptedError):
        generations._touch_all()
    assert path.stat().st_mtime > time.time() - DAY


def test_nothing_is_swept_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    old = [made(root, str(age), age) for age in (30, 20, 10)]

    def find(_: Path) -> list[Path]:
        return outdated([path for path in old if path.exists()])

    with locked(root):
        sweep(root, find)
        assert all(path.exists() for path in old)
    sweep(root, find)
    assert [path.exists() for path in old] == [False, True, True]


def test_a_read_only_cache_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [made(tmp_path, str(age), age) for age in (30, 20, 10)]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    for name in ("utime", "rmdir", "unlink", "open"):
        monkeypatch.setattr(os, name, refuse)
    use(paths[0])
    remove(outdated(paths))
    assert all(path.exists() for path in paths)
