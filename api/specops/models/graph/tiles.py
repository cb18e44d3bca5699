"""Replaces a graph's MatMulNBits by the operator of `specops.runtime.kernels`, weights and all.

Tiles are proven by unpacking them: the codes, scales and zero points that come out must be the
graph's own, bit by bit. Logits prove nothing: kernels round sums in other places than
onnxruntime's, and a few arbitrary tokens can make any difference out of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specops.models.folder import ModelError
from specops.models.graph.product_inputs import Made, pair_gates, take_gelus_in, take_norms_in
from specops.models.graph.tensors import external, fill_page, values_of
from specops.models.graph.tokenwise import attributes_of
from specops.models.graph.wiring import Wiring
from specops.runtime import kernels
from specops.runtime.kernels.packing import TILE, as_halves, pack, unpacked, zero_points_of

_COLUMNS = 256 * TILE  # packed at a time
_LINE = 64  # bytes
_ANY_ACTIVATIONS, _INT8_ACTIVATIONS = 0, 4  # accuracy_level: unset, and what the kernels do
_BLOCK, _LARGEST_BLOCK = 32, 256  # blocks are multiples of the first
_OPERANDS = ("x", "codes", "scales", "zero_points", "order", "bias")
_TYPES = {
    "codes": (TensorProto.UINT8,),
    "scales": (TensorProto.FLOAT,),
    "zero_points": (TensorProto.UINT8, TensorProto.FLOAT),
}

Bytes = NDArray[np.uint8]


class ZeroPoints(IntEnum):
    """Where a product's zero points are, by the value of its operator's attribute."""

    MIDDLE = 0  # nowhere: all are the middle of the range
    CODES = 1  # behind a tile, as codes
    FRACTIONS = 2  # behind a block's scales, in float32


class Weights(NamedTuple):
    """Quantized weights, a byte for each code: [N, blocks, block], [N, blocks], [N, blocks].

    Zero points are codes too, a byte each, or fractions in float32.
    """

    codes: Bytes
    scales: NDArray[np.float32]
    zero_points: Bytes | NDArray[np.float32] | None


def write_tiles(
    model: onnx.ModelProto, folder: Path, location: str, target: BinaryIO
) -> list[TensorProto]:
    """Let the kernels compute every product that they can.

    Args:
        model: the graph; its nodes change, and weights that no node reads any more go.
        folder: where its external weights lie.
        location: the name of the file that `target` writes, as the graph will call it.
        target: gets the tiles, each product's from a page's start on, in the order of the nodes.

    Returns:
        The tiles, which are to become initializers of the graph; none if there is no such product.

    Raises:
        ModelError: tiles do not hold what the graph has.
    """
    graph = model.graph
    _take_biases_in(graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    written: list[TensorProto] = []
    computable = partial(_computable, tensors=tensors)
    take_gelus_in(graph, computable)
    pairs = pair_gates(graph, computable, partial(_alike, tensors=tensors))
    for index, node in enumerate(graph.node):
        if not computable(node):
            continue
        behind = pairs.get(node.output[0])
        product = _product((node, behind) if behind else (node,), tensors, folder)
        name = f"{node.name or node.output[0]}.tiles"
        written.append(_write(name, product, location, target))
        graph.node[index].CopyFrom(_replaced(node, name, product))
    take_norms_in(graph)
    used = {name for node in graph.node for name in node.input}
    for name in tensors.keys() - used:
        graph.initializer.remove(tensors[name])
    return written


def unpack(
    tiles: Bytes,
    columns: int,
    depth: int,
    *,
    bits: int,
    block: int,
    points: ZeroPoints,
    halves: bool = False,
) -> Weights:
    """The weights that tiles hold: what `specops.runtime.kernels.packing.pack` was given.

    Args:
        tiles: [bytes].
        columns: N.
        depth: K.
        bits: of a code, 4 or 8.
        block: weights with one scale.
        points: where zero points are, if anywhere.
        halves: scales, and offsets instead of fractions, are float16.
    """
    blocks = math.ceil(depth / block)
    count = math.ceil(columns / TILE)
    code_bytes = TILE * block * bits // 8
    whole = tiles.reshape(count, -1)
    fractions = points is ZeroPoints.FRACTIONS
    lines_of_scales = blocks * (2 if fractions else 1)
    if halves:
        lines_of_scales = -(-lines_of_scales // 2)
    used = blocks * code_bytes + lines_of_scales * _LINE
    if halves and not fractions:  # behind every other block the scales of two
        pairs = np.pad(whole[:, :used], ((0, 0), (0, blocks % 2 * code_bytes)))
        pairs = pairs.reshape(count, -1, 2 * code_bytes + _LINE)
        ends = (code_bytes, code_bytes + _LINE)
        words = np.stack([pairs[:, :, : ends[0]], pairs[:, :, ends[1] :]], axis=2)
        words = words.reshape(count, -1, code_bytes)[:, :blocks]
        stored = pairs[:, :, ends[0] : ends[1]].reshape(count, -1, _LINE // 2)[:, :blocks]
    else:
        lines = whole[:, :used].reshape(count, blocks, -1)
        words, stored = lines[:, :, :code_bytes], lines[:, :, code_bytes:]
    numbers = np.ascontiguousarray(stored).view(np.float16 if halves else np.float32)
    if bits == 4:  # a byte holds a code and the one four further on
        words = words.reshape(count, blocks, -1, 1, TILE, 4)
        words = np.concatenate([words & np.uint8(15), words >> np.uint8(4)], axis=3)
    codes = words.reshape(count, blocks, block // 4, TILE, 4).transpose(0, 3, 1, 2, 4)
    zero_points: NDArray[Any] | None = None
    if points is ZeroPoints.CODES:
        flat = whole[:, used:][:, : blocks * TILE]
        zero_points = _by_column(flat.reshape(count, blocks, TILE), columns)
    scales = _by_column(numbers[:, :, :TILE], columns)
    if fractions:
        behind = _by_column(numbers[:, :, TILE:], columns)
        zero_points = zero_points_of(scales, behind) if halves else behind
    codes = codes.reshape(count * TILE, blocks, block)[:columns]
    return Weights(codes, scales.astype(np.float32, copy=False), zero_points)


def _by_column(values: NDArray[Any], columns: int) -> NDArray[Any]:
    """[tiles, blocks, 16] as [N, blocks]."""
    found: NDArray[Any] = values.transpose(0, 2, 1).reshape(-1, values.shape[1])[:columns]
    return found


def _take_biases_in(graph: onnx.GraphProto) -> None:
    """A weight that is added to a product, and to nothing else, becomes the product's bias."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    readers = Wiring(graph).readers
    for product in [node for node in graph.node if node.op_type == "MatMulNBits"]:
        (output,), users = product.output, readers.get(product.output[0], [])
        if len(users) != 1 or users[0].op_type != "Add" or "bias" in _operands(product):
            continue
        (bias,) = (name for name in users[0].input if name != output)
        if shapes.get(bias) != [attributes_of(product)["N"]] or kinds[bias] != TensorProto.FLOAT:
            continue
        product.input.extend([""] * (len(_OPERANDS) - 1 - len(product.input)))
        product.input.append(bias)
        product.output[0] = users[0].output[0]
        graph.node.remove(users[0])


def _operands(node: onnx.NodeProto) -> dict[str, str]:
    return {key: name for key, name in zip(_OPERANDS, node.input, strict=False) if name}


def _computable(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Whether a node is a product, with weights that the kernels know and no more exactness."""
    attributes, operands = attributes_of(node), _operands(node)
    return (
        node.op_type == "MatMulNBits"
        and attributes.get("accuracy_level", 0) in (_ANY_ACTIVATIONS, _INT8_ACTIVATIONS)
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


def _alike(one: onnx.NodeProto, other: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Whether two products have one input, weights of one form and no bias."""
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


def _product(
    nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, TensorProto], folder: Path
) -> _Product:
    """The weights of products, the columns of one behind those of another."""
    attributes, operands = attributes_of(nodes[0]), [_operands(node) for node in nodes]
    columns = attributes["N"]
    arrays = {}
    for key in _TYPES:
        parts = [values_of(tensors[given[key]], folder) for given in operands if key in given]
        if len(parts) == 1:
            (arrays[key],) = parts
        elif parts:
            arrays[key] = np.concatenate([part.reshape(columns, -1) for part in parts])
    return _Product(arrays, attributes | {"N": columns * len(nodes)})


class _Product:
    """A product's weights as its graph has them, some columns at a time."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, int]) -> None:
        self.columns, self.depth, self.block = (attributes[key] for key in ("N", "K", "block_size"))
        self.bits = attributes.get("bits", 4)
        self._blocks = math.ceil(self.depth / self.block)
        self._codes = arrays["codes"].reshape(self.columns, self._blocks, -1)
        self._scales = arrays["scales"].reshape(self.columns, self._blocks)
        points = arrays.get("zero_points")
        self._points = None if points is None else points.reshape(self.columns, -1)
        self.kind = _kind_of(points)
        self.halves = all(as_halves(*self._factors(part)) is not None for part in self.parts())

    def parts(self) -> Iterator[slice]:
        """Columns that are packed at a time."""
        for start in range(0, self.columns, _COLUMNS):
            yield slice(start, start + _COLUMNS)

    def packed(self, part: slice) -> Bytes:
        """The tiles of some columns."""
        codes, (scales, points) = self._codes[part], self._factors(part)
        if not self.halves or not (found := as_halves(scales, points)):
            return pack(codes, scales, points, bits=self.bits, block=self.block)
        behind = points if found.offsets is None else found.offsets
        return pack(codes, found.scales, behind, bits=self.bits, block=self.block)

    def held(self, tiles: Bytes, part: slice) -> bool:
        """Whether the tiles are those columns' weights, bit by bit."""
        codes = unpacked(self._codes[part], self.bits)
        scales, points = self._factors(part)
        if points is not None and self.kind is ZeroPoints.CODES:
            points = unpacked(points, self.bits)[:, : self._blocks]
        shape = {"bits": self.bits, "block": self.block}
        found = unpack(tiles, len(codes), self.depth, **shape, points=self.kind, halves=self.halves)
        return _equal(found, Weights(codes, scales, points))

    def _factors(self, part: slice) -> tuple[NDArray[np.float32], NDArray[Any] | None]:
        return self._scales[part], None if self._points is None else self._points[part]


def _write(name: str, product: _Product, location: str, target: BinaryIO) -> TensorProto:
    """Append a product's tiles, and describe them."""
    offset = target.tell()
    for part in product.parts():
        tiles = product.packed(part)
        if not product.held(tiles, part):
            raise ModelError(f"{name} do not hold the weights that the graph has")
        target.write(tiles.data)
    length = target.tell() - offset
    fill_page(target)
    return external(
        name, TensorProto.UINT8, [length], location=location, offset=offset, length=length
    )


def _kind_of(zero_points: NDArray[Any] | None) -> ZeroPoints:
    if zero_points is None:
        return ZeroPoints.MIDDLE
    return ZeroPoints.FRACTIONS if zero_points.dtype == np.float32 else ZeroPoints.CODES


def _equal(found: Weights, wanted: Weights) -> bool:
    """Bit by bit: a scale that is NaN equals itself."""
    return all(
        np.array_equal(_bits(one), _bits(other)) for one, other in zip(found, wanted, strict=True)
    )


def _bits(values: NDArray[Any] | None) -> Bytes:
    return np.ascontiguousarray([] if values is None else values).view(np.uint8)


def _replaced(node: onnx.NodeProto, tiles: str, product: _Product) -> onnx.NodeProto:
    """The same product, computed by the kernels."""
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
        N=product.columns,
        K=product.depth,
        bits=product.bits,
        block_size=product.block,
        zero_points=int(product.kind),
        half_scales=int(product.halves),
        bias=int("bias" in operands),
        input=attributes_of(node).get("input", int(Made.AS_IT_IS)),
        epsilon=0.0,
    )
