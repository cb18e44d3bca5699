"""Draws a graph again with 8-bit weights and activations: the form that reads prompts fastest.

MatMulNBits scales block by block, which costs the most where many tokens pass at once. Here every
linear layer is one integer product: weights in int8 with a scale per output, activations in uint8
with a scale per token. A token's scale is its own maximum's, so no token depends on its
neighbours, and a prompt's keys and values are the same bits however it is cut.

512 tokens of TinyLlama-1.1B's shape take 1.8 s instead of 2.9 s (int4-128, 2 cores, AMD EPYC,
AVX512-VNNI, onnxruntime 1.31.1). The demo target needs 0.07 ± 0.08 thousandths of a bit per byte
more that way: no difference (`bench/results/quantization.md`).

The weights are those that the graph has, rounded once more, so no checkpoint is needed and graphs
that others published work too. The head stays: a prefill computes it for the last token alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specops.kernels.packing import unpacked
from specops.models.tensors import external, fill_page, values_of

_MICROSOFT = "com.microsoft"
_INLINE_BYTES = 1024
_SLAB_WEIGHTS = 2**22  # float32 weights at a time: 16 MiB
_LARGEST = 127  # of a code; activations have their zero at 128
_TINY = 1e-12  # scale of a row of zeros
_ZERO_POINTS, _GROUP_INDEX, _BIAS = 3, 4, 5  # places among MatMulNBits' inputs


def int8_prefill(graph: Path, destination: Path) -> int:
    """Write the 8-bit form of a graph.

    Args:
        graph: the graph; its weights lie beside it.
        destination: the new graph; its weights are written beside it.

    Returns:
        How many linear layers were drawn again; those that are no MatMulNBits, or one with a
        feature that is rare (a group index, zero points that are no codes), stay as they are.
    """
    model = onnx.load(graph, load_external_data=False)
    with destination.with_name(f"{destination.name}.data").open("wb") as file:
        drawing = _Drawing(model.graph, graph.parent, file)
        drawing.draw()
    onnx.save(model, destination)
    return drawing.layers


class _Drawing:
    def __init__(self, graph: onnx.GraphProto, folder: Path, file: BinaryIO) -> None:
        self.layers = 0
        self._graph = graph
        self._folder = folder
        self._file = file
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        self._written: list[TensorProto] = []
        self._activations: set[str] = set()  # quantized once, however many layers read them

    def draw(self) -> None:
        """Replace the graph's nodes and weights."""
        constants = {"one": np.float32(1), "largest": np.float32(_LARGEST)}
        for name, value in {**constants, "tiny": np.float32(_TINY), "zero": np.uint8(128)}.items():
            self._write(f"int8_{name}", np.array(value))
        for node in self._graph.node:
            if self._can_be_drawn(node):
                self._linear(node)
            else:
                self._nodes.append(node)
        read = {name for node in self._nodes for name in node.input}
        for name, tensor in self._stored.items():
            if name in read:
                self._keep(tensor)
        del self._graph.node[:], self._graph.initializer[:]
        self._graph.node.extend(self._nodes)
        self._graph.initializer.extend(self._written)

    def _can_be_drawn(self, node: onnx.NodeProto) -> bool:
        if node.op_type != "MatMulNBits" or "logits" in node.output:
            return False
        zero_points = _optional(node, _ZERO_POINTS)
        plain = not zero_points or self._stored[zero_points].data_type == TensorProto.UINT8
        return plain and not _optional(node, _GROUP_INDEX)

    def _linear(self, node: onnx.NodeProto) -> None:
        x, name = node.input[0], node.output[0]
        bias = _optional(node, _BIAS)
        self._activation(x)
        weight, scales = self._weight(node)
        inputs = [
            f"{x}.codes",
            self._write(f"{name}.int8", weight),
            "int8_one",
            self._write(f"{name}.int8_scales", scales),
            "int8_zero",
        ]
        self._node("MatMulIntegerToFloat", inputs, f"{name}.product", domain=_MICROSOFT)
        scaled = f"{name}.scaled" if bias else name
        self._node("Mul", [f"{name}.product", f"{x}.scale"], scaled)
        if bias:
            self._node("Add", [scaled, bias], name)
        self.layers += 1

    def _activation(self, x: str) -> None:
        """The codes of x [batch, sequence, K], and its scales [batch, sequence, 1]."""
        if x in self._activations:
            return
        self._activations.add(x)
        self._node("Abs", [x], f"{x}.abs")
        self._node("ReduceMax", [f"{x}.abs"], f"{x}.max", axes=[-1], keepdims=1)
        self._node("Div", [f"{x}.max", "int8_largest"], f"{x}.any_scale")
        self._node("Max", [f"{x}.any_scale", "int8_tiny"], f"{x}.scale")
        self._node("Div", [x, f"{x}.scale"], f"{x}.scaled")
        self._node("QuantizeLinear", [f"{x}.scaled", "int8_one", "int8_zero"], f"{x}.codes")

    def _weight(self, node: onnx.NodeProto) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """A layer's weight [K, N] in int8 and its scales [N]."""
        inputs, outputs = (_integer(node, key) for key in ("K", "N"))
        weight = np.empty((inputs, outputs), np.int8)
        scales = np.empty(outputs, np.float32)
        start = 0
        for slab in self._dequantized(node):
            rows = slice(start, start + len(slab))
            scales[rows] = np.maximum(np.abs(slab).max(axis=1) / _LARGEST, _TINY)
            weight[:, rows] = np.rint(slab / scales[rows, None]).T
            start += len(slab)
        return weight, scales

    def _dequantized(self, node: onnx.NodeProto) -> Iterator[NDArray[np.float32]]:
        """The weight [N, K] in slabs of rows."""
        inputs, outputs = (_integer(node, key) for key in ("K", "N"))
        bits, block = (_integer(node, key) for key in ("bits", "block_size"))
        codes = self._values(node.input[1]).reshape(outputs, -1)
        scales = self._values(node.input[2]).reshape(outputs, -1)
        zeros = np.full((outputs, 1), 2 ** (bits - 1), np.uint8)
        if name := _optional(node, _ZERO_POINTS):
            zeros = unpacked(self._values(name).reshape(outputs, -1), bits)[:, : scales.shape[1]]
        step = max(1, _SLAB_WEIGHTS // inputs)
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            blocks = unpacked(codes[rows], bits).reshape(-1, scales.shape[1], block)
            centred = blocks.astype(np.float32) - zeros[rows, :, None]
            slab = centred * scales[rows, :, None].astype(np.float32)
            yield slab.reshape(len(slab), -1)[:, :inputs]

    def _values(self, name: str) -> NDArray[Any]:
        return values_of(self._stored[name], self._folder)

    def _keep(self, tensor: TensorProto) -> None:
        if tensor.data_location == TensorProto.EXTERNAL:
            self._write(tensor.name, self._values(tensor.name))
        else:
            self._written.append(tensor)

    def _write(self, name: str, values: NDArray[Any]) -> str:
        if values.nbytes <= _INLINE_BYTES:
            self._written.append(numpy_helper.from_array(values, name))
            return name
        fill_page(self._file)
        tensor = external(
            name,
            helper.np_dtype_to_tensor_dtype(values.dtype),
            values.shape,
            location=Path(self._file.name).name,
            offset=self._file.tell(),
            length=values.nbytes,
        )
        self._file.write(np.ascontiguousarray(values).data)
        self._written.append(tensor)
        return name

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self._nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))


def _optional(node: onnx.NodeProto, place: int) -> str:
    """The name of an input; empty where the node leaves it out."""
    return node.input[place] if len(node.input) > place else ""


def _integer(node: onnx.NodeProto, name: str) -> int:
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == name)
