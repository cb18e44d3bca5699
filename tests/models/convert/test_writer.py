"""The destination holds a whole export or what it held before, whatever happens in between."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from specops.models.convert import ExportError
from specops.models.convert.writer import MANIFEST, WeightFile, export_folder


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_until_interrupted(destination: Path) -> None:
    with suppress(KeyboardInterrupt), export_folder(destination) as folder:
        (folder / MANIFEST).write_text("second")
        raise KeyboardInterrupt


def test_tensors_lie_in_order_on_pages_of_their_own(tmp_path: Path) -> None:
    first = np.arange(2000, dtype=np.float32).reshape(40, 50)
    second = np.arange(7, dtype=np.uint8)
    with WeightFile(tmp_path / "weights") as file:
        # a transposed slab is not contiguous, and must still be written in its own order
        places = [file.write([first[:25], first[25:]]), file.write([second]), file.write([first.T])]
    content = (tmp_path / "weights").read_bytes()
    assert [place.offset for place in places] == [0, 8192, 12288]
    stored = [content[place.offset : place.offset + place.length] for place in places]
    assert stored == [first.tobytes(), second.tobytes(), first.T.tobytes()]


def test_the_folder_appears_only_at_the_end(tmp_path: Path) -> None:
    destination = tmp_path / "model"
    with export_folder(destination) as folder:
        (folder / "file").write_text("content")
        assert not destination.exists()
    assert names(tmp_path) == ["model"]
    assert names(destination) == ["file"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    destination = tmp_path / "model"
    write_until_interrupted(destination)
    assert names(tmp_path) == []
    with export_folder(destination) as folder:
        (folder / MANIFEST).write_text("first")
    write_until_interrupted(destination)
    assert (destination / MANIFEST).read_text() == "first"
    assert names(tmp_path) == ["model"]


def test_an_earlier_export_is_replaced_whole(tmp_path: Path) -> None:
    destination = tmp_path / "model"
    for content in ("first", "second"):
        with export_folder(destination) as folder:
            (folder / MANIFEST).write_text(content)
            (folder / content).touch()
    assert names(destination) == ["second", MANIFEST]
    assert names(tmp_path) == ["model"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with (
        pytest.raises(ExportError, match="exists and is no earlier export"),
        export_folder(tmp_path),
    ):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["thesis.txt"]


def test_what_a_killed_export_left_is_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.partial"
    leftover.mkdir()
    (leftover / "half").touch()
    with export_folder(tmp_path / "model") as folder:
        (folder / "whole").touch()
    assert names(tmp_path / "model") == ["whole"]


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path) -> None:
    destination = tmp_path / "model"
    with export_folder(destination) as folder:
        (folder / "first").touch()
        with (
            pytest.raises(ExportError, match="another export is writing"),
            export_folder(destination),
        ):
            pytest.fail("the block must not run")
    assert names(destination) == ["first"]
