"""Writes an exported model: one sequential weight file, and a folder that appears all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from specops.models.convert.errors import ExportError
from specops.system.folders import folder_at_once

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

    def flush(self) -> None:
        """Lets others read what was written."""
        self._stream.flush()

    def write(self, chunks: Iterable[NDArray[Any]]) -> Extent:
        """Appends `chunks` as one tensor and says where it lies."""
        position = self._stream.tell()
        offset = position + -position % _ALIGNMENT
        self._stream.write(b"\0" * (offset - position))
        for chunk in chunks:
            self._stream.write(chunk.data if chunk.flags.c_contiguous else chunk.tobytes())
        return Extent(offset, self._stream.tell() - offset)


@contextmanager
def export_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder to fill; takes the place of `destination` as `folder_at_once` says.

    An earlier export at `destination` is replaced.

    Raises:
        ExportError: `destination` has something else in it, or another export is writing it.
    """
    destination = destination.absolute()
    if destination.exists() and not _replaceable(destination):
        raise ExportError(
            f"{destination} exists and is no earlier export; choose another destination or "
            "remove it"
        )
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(folder_at_once(destination))
        except BlockingIOError as error:
            raise ExportError(
                f"another export is writing {error.filename}; wait for it to end"
            ) from None
        yield folder


def _replaceable(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir()))
