"""Replaces a graph's MatMulNBits by the operator of `specops.kernels`, weights and all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specops import kernels
from specops.kernels.packing import TILE, pack
from specops.models.tensors import external, fill_page, values_of

_COLUMNS = 256 * TILE  # packed at a time
_INT8_ACTIVATIONS = 4  # the least accuracy_level that asks for what the kernels do
_BLOCK, _LARGEST_BLOCK = 32, 256  # blocks are multiples of the first
_OPERANDS = ("x", "codes", "scales", "zero_points", "order", "bias")
_TYPES = {"codes": TensorProto.UINT8, "scales": TensorProto.FLOAT, "zero_points": TensorProto.UINT8}


def write_tiles(
    model: onnx.ModelProto, folder: Path, location: str, target: BinaryIO
) -> list[TensorProto]:
    """Let the kernels compute every product that they can.

    Args:
        model: the graph; its nodes and initializers are changed.
        folder: where its external weights lie.
        location: the name of the file that `target` writes, as the graph will call it.
        target: gets the tiles, each product's from a page's start on, in the order of the nodes.

    Returns:
        The tiles, which are to become initializers of the graph; none if there is no such product.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    written: list[TensorProto] = []
    for index, node in enumerate(graph.node):
        operands = {key: name for key, name in zip(_OPERANDS, node.input, strict=False) if name}
        if not _computable(node, operands, tensors):
            continue
        arrays = {
            key: values_of(tensors[operands[key]], folder) for key in _TYPES if key in operands
        }
        name = f"{node.name or node.output[0]}.tiles"
        written.append(_write(name, arrays, _attributes(node), location, target))
        graph.node[index].CopyFrom(_replaced(node, operands, name))
    if written:
        model.opset_import.append(helper.make_opsetid(kernels.DOMAIN, 1))
        used = {name for node in graph.node for name in node.input}
        for name in tensors.keys() - used:
            graph.initializer.remove(tensors[name])
    return written


def _attributes(node: onnx.NodeProto) -> dict[str, int]:
    return {item.name: item.i for item in node.attribute}


def _computable(
    node: onnx.NodeProto, operands: Mapping[str, str], tensors: Mapping[str, TensorProto]
) -> bool:
    """Whether a node is a product, with weights that the kernels know and no more exactness."""
    attributes = _attributes(node)
    return (
        node.op_type == "MatMulNBits"
        and attributes.get("accuracy_level", 0) >= _INT8_ACTIVATIONS
        and attributes["bits"] in (4, 8)
        and attributes["block_size"] % _BLOCK == 0
        and attributes["block_size"] <= _LARGEST_BLOCK
        and "order" not in operands
        and all(
            operands[key] in tensors and tensors[operands[key]].data_type == kind
            for key, kind in _TYPES.items()
            if key in operands
        )
    )


def _write(
    name: str,
    arrays: Mapping[str, NDArray[Any]],
    attributes: Mapping[str, int],
    location: str,
    target: BinaryIO,
) -> TensorProto:
    """Append a product's tiles, some columns at a time, and describe them."""
    columns, bits, block = (attributes[key] for key in ("N", "bits", "block_size"))
    blocks = math.ceil(attributes["K"] / block)
    codes = arrays["codes"].reshape(columns, blocks, -1)
    scales = arrays["scales"].reshape(columns, blocks)
    points = arrays.get("zero_points")
    if points is not None:
        points = points.reshape(columns, -1)
    offset = target.tell()
    for start in range(0, columns, _COLUMNS):
        part = slice(start, start + _COLUMNS)
        some = None if points is None else points[part]
        target.write(pack(codes[part], scales[part], some, bits=bits, block=block).data)
    length = target.tell() - offset
    fill_page(target)
    return external(
        name, TensorProto.UINT8, [length], location=location, offset=offset, length=length
    )


def _replaced(node: onnx.NodeProto, operands: Mapping[str, str], tiles: str) -> onnx.NodeProto:
    """The same product, computed by the kernels."""
    inputs = [operands["x"], tiles]
    if "bias" in operands:
        inputs.append(operands["bias"])
    attributes = _attributes(node)
    return helper.make_node(
        kernels.OPERATOR,
        inputs,
        list(node.output),
        name=node.name,
        domain=kernels.DOMAIN,
        **{key: attributes[key] for key in ("N", "K", "bits", "block_size")},
        zero_points=int("zero_points" in operands),
        bias=int("bias" in operands),
    )
