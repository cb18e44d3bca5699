"""Writes an exported model: one sequential weight file, and a folder that appears all at once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from specops.models.convert.errors import ExportError

_ALIGNMENT = 4096  # one page: onnxruntime maps an initializer straight from an aligned offset
MANIFEST = "specops.json"


class Extent(NamedTuple):
    """A run of bytes in the weight file."""

    offset: int
    length: int


class WeightFile:
    """The external-data file of a graph: tensors one after another, each on a page of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()

    def write(self, chunks: Iterable[NDArray[Any]]) -> Extent:
        """Appends `chunks` as one tensor and says where it lies."""
        position = self._stream.tell()
        offset = position + -position % _ALIGNMENT
        self._stream.write(b"\0" * (offset - position))
        for chunk in chunks:
            self._stream.write(chunk.data if chunk.flags.c_contiguous else chunk.tobytes())
        return Extent(offset, self._stream.tell() - offset)


@contextmanager
def folder_at_once(destination: Path) -> Iterator[Path]:
    """A temporary sibling to fill; renamed to `destination` when the block ends without error.

    On an error nothing is left behind. What a killed export left is cleared by the next one for
    the same destination. An earlier export at `destination` is replaced; any other folder that
    is not empty is refused with ExportError.
    """
    destination = destination.absolute()
    if destination.exists() and not _replaceable(destination):
        raise ExportError(
            f"{destination} exists and is no earlier export; choose another destination or "
            "remove it"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial")
    with _locked(partial):
        _clear(partial)
        try:
            yield partial
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
            _replace(destination, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _replaceable(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir()))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds `folder`, made if need be, against a second export to the same place."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _acquire(folder, handle):
            raise ExportError(f"another export is writing {folder}; wait for it to end")
        yield
    finally:
        os.close(handle)


def _acquire(folder: Path, handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # The other export may have renamed the folder between our open and our lock.
    return folder.exists() and folder.stat().st_ino == os.fstat(handle).st_ino


def _clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _replace(destination: Path, partial: Path) -> None:
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    partial.rename(destination)
    _sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
