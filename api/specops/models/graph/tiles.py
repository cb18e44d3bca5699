"""Replaces a graph's MatMulNBits by our operator, and writes their weights as tiles.

A tile holds the weights of 16 columns in the order in which the kernels read them (`matmul.h`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specops.models.contract import INT8_ACTIVATIONS
from specops.models.graph.nodes import Wiring, attributes_of
from specops.models.graph.product_inputs import Made, pair_gates, take_gelus_in, take_norms_in
from specops.models.graph.tensors import fill_page, values_of
from specops.runtime import kernels
from specops.runtime.kernels.packing import TILE, pack, weight_type

_COLUMNS = 256 * TILE  # packed at a time
_ANY_ACTIVATIONS = 0  # accuracy_level is unset
_BLOCK, _LARGEST_BLOCK = 32, 256  # the kernels' blocks are multiples of the first
_OPERANDS = ("x", "codes", "scales", "zero_points", "order", "bias")
_TYPES = {
    "codes": (TensorProto.UINT8,),
    "scales": (TensorProto.FLOAT,),
    "zero_points": (TensorProto.UINT8,),
}

Tensors = Mapping[str, TensorProto]


def write_tiles(
    model: onnx.ModelProto, folder: Path, location: str, target: BinaryIO
) -> list[TensorProto]:
    """Let the kernels compute every product that they can.

    Args:
        model: the graph; its nodes change, and weights that no node reads any more go.
        folder: where its external weights lie.
        location: the name of the file `target`, for the graph.
        target: gets the tiles in the order of the nodes; each product's start on a page.

    Returns:
        The tiles, which are to become initializers of the graph.
    """
    graph = model.graph
    _take_biases_in(graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    written: list[TensorProto] = []
    computable = partial(_computable, tensors=tensors)
    take_gelus_in(graph, computable)
    pairs = pair_gates(graph, computable, partial(_alike, tensors=tensors))
    for node in graph.node:
        if not computable(node):
            continue
        behind = pairs.get(node.output[0])
        product = _Product((node, behind) if behind else (node,), tensors, folder)
        tiles = TensorProto(
            name=f"{node.name or node.output[0]}.tiles",
            data_type=TensorProto.UINT8,
            data_location=TensorProto.EXTERNAL,
        )
        offset = target.tell()
        product.write(target)
        length = target.tell() - offset
        fill_page(target)
        tiles.dims.append(length)
        for key, value in {"location": location, "offset": offset, "length": length}.items():
            tiles.external_data.add(key=key, value=str(value))
        written.append(tiles)
        node.CopyFrom(_replaced(node, tiles.name, product))
    take_norms_in(graph)
    used = {name for node in graph.node for name in node.input}
    for name in tensors.keys() - used:
        graph.initializer.remove(tensors[name])
    return written


def _take_biases_in(graph: onnx.GraphProto) -> None:
    """Turn a weight that is added to a product, and to nothing else, into the product's bias."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    readers = Wiring(graph).readers
    for product in [node for node in graph.node if node.op_type == "MatMulNBits"]:
        (output,), users = product.output, readers.get(product.output[0], [])
        if len(users) != 1 or users[0].op_type != "Add" or "bias" in _operands(product):
            continue
        (bias,) = (tensors.get(name) for name in users[0].input if name != output)
        if bias is None or bias.data_type != TensorProto.FLOAT:
            continue
        if list(bias.dims) != [attributes_of(product)["N"]]:
            continue
        product.input.extend([""] * (len(_OPERANDS) - 1 - len(product.input)))
        product.input.append(bias.name)
        product.output[0] = users[0].output[0]
        graph.node.remove(users[0])


def _operands(node: onnx.NodeProto) -> dict[str, str]:
    return {key: name for key, name in zip(_OPERANDS, node.input, strict=False) if name}


def _computable(node: onnx.NodeProto, tensors: Tensors) -> bool:
    """Return whether the kernels compute a node: they know its weights and are exact enough."""
    attributes, operands = attributes_of(node), _operands(node)
    return (
        node.op_type == "MatMulNBits"
        and attributes.get("accuracy_level", 0) in (_ANY_ACTIVATIONS, INT8_ACTIVATIONS)
        and not attributes.get("weight_prepacked", 0)
        and attributes.get("bits", 4) in (4, 8)
        and attributes["block_size"] % _BLOCK == 0
        and attributes["block_size"] <= _LARGEST_BLOCK
        and "order" not in operands
        and all(
            operands[key] in tensors and tensors[operands[key]].data_type in kinds
            for key, kinds in _TYPES.items()
            if key in operands
        )
    )


def _alike(one: onnx.NodeProto, other: onnx.NodeProto, tensors: Tensors) -> bool:
    """Return whether two products have the same input, weights of the same form and no bias."""
    operands = _operands(one), _operands(other)
    first, second = (
        {key: tensors[given[key]].data_type for key in _TYPES if key in given} for given in operands
    )
    return (
        first == second
        and operands[0]["x"] == operands[1]["x"]
        and not any("bias" in given for given in operands)
        and attributes_of(one) == attributes_of(other)
    )


class _Product:
    """The weights of one product, or of two with their columns behind each other."""

    def __init__(self, nodes: Sequence[onnx.NodeProto], tensors: Tensors, folder: Path) -> None:
        attributes = attributes_of(nodes[0])
        self.columns = attributes["N"] * len(nodes)
        self.depth, self.block = attributes["K"], attributes["block_size"]
        self.bits = attributes.get("bits", 4)
        blocks = math.ceil(self.depth / self.block)
        arrays: dict[str, NDArray[Any]] = {}
        for key in _TYPES:
            names = [given[key] for given in map(_operands, nodes) if key in given]
            parts = [values_of(tensors[name], folder) for name in names]
            if len(parts) == 1:
                arrays[key] = parts[0].reshape(self.columns, -1)
            elif parts:
                rows = [part.reshape(attributes["N"], -1) for part in parts]
                arrays[key] = np.concatenate(rows)
        self._codes = arrays["codes"].reshape(self.columns, blocks, -1)
        self._scales = arrays["scales"].reshape(self.columns, blocks)
        self._points = arrays.get("zero_points")
        self.type = weight_type(self._scales, self._points, self.bits)
        self._parts = [slice(at, at + _COLUMNS) for at in range(0, self.columns, _COLUMNS)]

    def write(self, target: BinaryIO) -> None:
        """Write the tiles, some columns at a time."""
        for part in self._parts:
            points = None if self._points is None else self._points[part]
            _, tiles = pack(
                *(self._codes[part], self._scales[part], points),
                **{"bits": self.bits, "block": self.block, "type": self.type},
            )
            target.write(tiles.data)


def _replaced(node: onnx.NodeProto, tiles: str, product: _Product) -> onnx.NodeProto:
    """Return the same product, computed by the kernels."""
    operands = _operands(node)
    inputs = [operands["x"], tiles]
    if "bias" in operands:
        inputs.append(operands["bias"])
    return helper.make_node(
        kernels.MATMUL,
        inputs,
        list(node.output),
        name=node.name or node.output[0],
        domain=kernels.DOMAIN,
        N=[product.columns],
        K=product.depth,
        types=[int(product.type)],
        block_size=product.block,
        bias=int("bias" in operands),
        input=attributes_of(node).get("input", int(Made.AS_IT_IS)),
        epsilon=0.0,
    )
