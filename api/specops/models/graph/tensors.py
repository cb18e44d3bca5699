"""Reads a graph's weights from the file next to it, and checks where they are."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, TensorProto, helper, numpy_helper

from specops.models.contract import SOURCE
from specops.models.conversions import source_files
from specops.models.errors import ModelError
from specops.models.paths import path_inside

_PAGE = 4096
_PLACE = {"location", "offset", "length", "checksum"}


def locate(graph: GraphProto, folder: Path) -> None:
    """Check that all weights are in the graph's own `folder`, since the graph is not trusted.

    Weights that our conversion has left in its source file get that file's location.

    Raises:
        ModelError: a weight's file is missing or elsewhere, or the graph says more about a weight
            than where it is. ONNX Runtime would use a packed form of a weight without a check.
    """
    attributes = [item for node in graph.node for item in node.attribute]
    if graph.sparse_initializer or any(
        item.HasField("sparse_tensor") or item.sparse_tensors or item.tensors for item in attributes
    ):
        raise ModelError(f"{folder}: the graph has sparse weights or lists of weights")
    values = (item.t for item in attributes if item.HasField("t"))
    sources = {f"{SOURCE}{at}": str(file) for at, file in enumerate(source_files(folder))}
    for tensor in (*graph.initializer, *values):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = _place_of(tensor)
            if source := sources.get(place.get("location", "")):
                next(item for item in tensor.external_data if item.key == "location").value = source
                continue
            try:
                if odd := place.keys() - _PLACE:
                    raise ValueError(f"its entry {min(odd)} does not say where it lies")
                file = path_inside(folder, place.get("location", ""))
            except ValueError as error:
                raise ModelError(f"{folder}: the weight {tensor.name}: {error}") from error
            if not file.is_file():
                if file.name.startswith(SOURCE):
                    raise ModelError(f"{folder}: the file that it was made from has changed since")
                raise ModelError(f"{file} is missing: copy or download the whole folder")


def values_of(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    """Return a weight's elements, memory-mapped if they are in a file in the graph's `folder`."""
    values: NDArray[Any]
    if tensor.data_location != TensorProto.EXTERNAL:
        values = numpy_helper.to_array(tensor)
        return values
    place = _place_of(tensor)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    file, offset = folder / place["location"], int(place.get("offset", 0))
    return np.memmap(file, kind, "r", offset, tuple(tensor.dims))


def append(
    name: str,
    chunks: Iterable[NDArray[np.uint8]],
    location: str,
    target: BinaryIO,
    dims: Sequence[int] = (),
) -> TensorProto:
    """Write the bytes of a weight to the end of the file `target`, from a page on.

    Args:
        name: of the tensor.
        chunks: its bytes.
        location: the file's name in the graph.
        target: open for writing.
        dims: its shape; empty: one axis of bytes.

    Returns:
        The weight, uint8 [bytes] or of `dims`, in a file that the graph calls `location`.
    """
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, data_location=TensorProto.EXTERNAL)
    offset = target.tell()
    for chunk in chunks:
        target.write(chunk.data)
    length = target.tell() - offset
    fill_page(target)
    tensor.dims.extend(dims or [length])
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def fill_page(file: BinaryIO) -> None:
    """Write zeros up to the next page, so that the next weight starts on a page."""
    file.write(bytes(-file.tell() % _PAGE))


def _place_of(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}
