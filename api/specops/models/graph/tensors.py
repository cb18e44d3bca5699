"""Weights of a graph that lie in a file beside it: read where they are, and described."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, TensorProto, helper, numpy_helper

from specops.models.folder import ModelError
from specops.models.inside import inside

_PAGE = 4096
_PLACE = {"location", "offset", "length", "checksum"}


def check_places(graph: GraphProto, folder: Path) -> None:
    """Make sure that all weights lie in the graph's own `folder`: a graph may be a stranger's.

    Raises:
        ModelError: a weight's file is missing or lies elsewhere, or more is said of it than where
            it lies: ONNX Runtime takes packed forms of a weight as they are.
    """
    attributes = [item for node in graph.node for item in node.attribute]
    if graph.sparse_initializer or any(
        item.HasField("sparse_tensor") or item.sparse_tensors or item.tensors for item in attributes
    ):
        raise ModelError(f"{folder}: the graph has sparse weights or lists of weights")
    values = (item.t for item in attributes if item.HasField("t"))
    for tensor in (*graph.initializer, *values):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = place_of(tensor)
            try:
                if odd := place.keys() - _PLACE:
                    raise ValueError(f"{min(odd)} is nothing that says where it lies")
                file = inside(folder, place.get("location", ""))
            except ValueError as error:
                raise ModelError(f"{folder}: the weight {tensor.name}: {error}") from error
            if not file.is_file():
                raise ModelError(f"{file} is missing: copy or download the whole folder")


def place_of(tensor: TensorProto) -> dict[str, str]:
    """Where a weight lies: `location`, `offset` and `length`; empty if it is in the graph."""
    return {entry.key: entry.value for entry in tensor.external_data}


def values_of(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    """A tensor's elements; mapped, where they lie in a file in the graph's `folder`."""
    values: NDArray[Any]
    if tensor.data_location != TensorProto.EXTERNAL:
        values = numpy_helper.to_array(tensor)
        return values
    place = place_of(tensor)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    file, offset = folder / place["location"], int(place.get("offset", 0))
    values = np.memmap(file, kind, "r", offset, tuple(tensor.dims))
    return values


def fill_page(file: BinaryIO) -> None:
    """Write zeros up to the next page: what is written next starts on one."""
    file.write(bytes(-file.tell() % _PAGE))


def external(
    name: str, data_type: int, dims: Sequence[int], *, location: str, offset: int, length: int
) -> TensorProto:
    """A tensor whose `length` bytes lie in the file `location` from `offset` on."""
    tensor = TensorProto(
        name=name, data_type=data_type, dims=dims, data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
