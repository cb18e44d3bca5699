"""Redraws an export as onnxruntime-genai's model builder draws graphs for CPUs.

Queries, keys and values are three products or one. Nodes of their own add biases. SiLU is a sigmoid
and a product. The embedding and rotations are plain tables, and names are paths.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from tests.models.convert.dequantize import unpacked


def write_published(
    source: Path, destination: Path, *, packed: bool = False, normed: bool = False
) -> Path:
    """Write the graph `source` in that form as `destination`, with its weights beside it.

    Args:
        source: a quantized export's graph.
        destination: the new graph.
        packed: whether queries, keys and values stay one product.
        normed: whether heads of queries and keys get norms, with other weights in each layer.
    """
    model = onnx.load(source)
    drawing = _Drawing(model.graph, packed=packed, normed=normed)
    computed = drawing.draw_tables()
    for node in [node for node in model.graph.node if node.output[0] not in computed]:
        drawing.draw(node)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(drawing.nodes)
    model.graph.initializer.extend(drawing.tensors.values())
    destination.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(
        model,
        destination,
        save_as_external_data=True,
        location=f"{destination.name}.data",
        size_threshold=1024,
    )
    return destination


class _Drawing:
    def __init__(self, graph: onnx.GraphProto, *, packed: bool, normed: bool) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._packed, self._normed = packed, normed
        self._sizes: dict[
            str, tuple[int, int]
        ] = {}  # of a product: number of outputs, and of those of a head
        self._attention = {
            node.input[0]: node for node in graph.node if node.op_type == "GroupQueryAttention"
        }

    def draw_tables(self) -> set[str]:
        """Add the tables of rotations; returns the names of what computes them."""
        computed = set[str]()
        for name in [name for name in self.tensors if name.endswith("frequencies")]:
            start = name.removesuffix("frequencies")
            places = np.arange(int(self._values(f"{start}stop")), dtype=np.float32)[:, None]
            angles = (places * self._values(name)).astype(np.float64)
            for kind, values in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                table = values.astype(np.float32) * self._values(f"{start}factor")
                self._weight(f"{start}{kind}_cache", table)
            steps = (
                "row",
                "places",
                "angles",
                "cos_values",
                "sin_values",
                "cos_cache",
                "sin_cache",
            )
            computed.update(f"{start}{step}" for step in steps)
        return computed

    def draw(self, node: onnx.NodeProto) -> None:
        """Add the nodes that the builder draws instead of a node."""
        if node.op_type == "GatherBlockQuantized":
            self._embedding(node)
        elif node.op_type == "QuickGelu":
            self._node("Sigmoid", [node.input[0]], f"{node.output[0]}/Sigmoid")
            operands = [node.input[0], f"{node.output[0]}/Sigmoid"]
            self._node("Mul", operands, node.output[0])
        elif node.op_type == "MatMulNBits":
            self._product(node)
        elif node.op_type == "GroupQueryAttention" and not self._packed:
            operands = [f"{node.input[0]}/{part}" for part in "qkv"]
            if self._normed:
                operands[:2] = [self._head_norm(name) for name in operands[:2]]
            self.nodes.append(_changed(node, inputs=[*operands, *node.input[3:]]))
        else:
            self.nodes.append(node)

    def _embedding(self, node: onnx.NodeProto) -> None:
        codes, scales = (self._values(node.input[place]) for place in (0, 2))
        attributes = {item.name: item.i for item in node.attribute}
        values = unpacked(codes, attributes["bits"]).astype(np.float32)
        middle = np.float32(2 ** (attributes["bits"] - 1))
        wide = np.repeat(scales, attributes["block_size"], axis=1)[:, : values.shape[1]]
        table = self._weight("model.embed_tokens.weight", (values - middle) * wide)
        self._node("Gather", [table, "input_ids"], node.output[0])

    def _product(self, node: onnx.NodeProto) -> None:
        attention = self._attention.get(node.output[0])
        if attention is None or self._packed:
            self._rows(node, node.output[0], slice(None))
            return
        attributes = {item.name: item.i for item in attention.attribute if item.name != "scale"}
        (rows,) = (item.i for item in node.attribute if item.name == "N")
        size = rows // (attributes["num_heads"] + 2 * attributes["kv_num_heads"])
        queries, keys = attributes["num_heads"] * size, attributes["kv_num_heads"] * size
        starts = np.cumsum([0, queries, keys, keys])
        for part, start, stop in zip("qkv", starts, starts[1:], strict=False):
            self._rows(node, f"{node.output[0]}/{part}", slice(int(start), int(stop)))
            self._sizes[f"{node.output[0]}/{part}"] = (int(stop - start), size)

    def _rows(self, node: onnx.NodeProto, output: str, rows: slice) -> None:
        """Add a product with some of the rows, and a node that adds the bias."""
        names = [name for name in node.input[1:4] if name]
        inputs = [self._weight(f"{output}.{name}", self._values(name)[rows]) for name in names]
        bias = node.input[5] if len(node.input) > 5 else ""
        product = f"{output}/MatMul" if bias else output
        made = _changed(node, inputs=[node.input[0], *inputs], output=product)
        for item in made.attribute:
            if item.name == "N":
                item.i = len(self._values(names[0])[rows])
        self.nodes.append(made)
        if bias:
            added = self._weight(f"{output}.bias", self._values(bias)[rows])
            self._node("Add", [product, added], output)

    def _head_norm(self, x: str) -> str:
        """Add an RMS norm of each head of x; the heads lie beside each other."""
        rows, size = self._sizes[x]
        weight = np.linspace(0.5, 2.0, size, dtype=np.float32) * (1 + len(self.nodes) / 100)
        heads = self._weight(f"{x}.heads", np.array([0, -1, size], np.int64))
        self._node("Reshape", [x, heads], f"{x}/heads")
        norm = helper.make_node(
            "SimplifiedLayerNormalization",
            [f"{x}/heads", self._weight(f"{x}.norm", weight)],
            [f"{x}/norm"],
            name=f"/model/{x}/norm",
            axis=-1,
            epsilon=1e-4,
        )
        self.nodes.append(norm)
        whole = self._weight(f"{x}.whole", np.array([0, -1, rows], np.int64))
        self._node("Reshape", [f"{x}/norm", whole], f"{x}/normed")
        return f"{x}/normed"

    def _values(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = numpy_helper.to_array(self.tensors[name])
        return values

    def _weight(self, name: str, values: NDArray[Any]) -> str:
        self.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def _node(self, op: str, inputs: list[str], output: str) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"/model/{output}/{op}"))


def _changed(
    node: onnx.NodeProto, *, inputs: list[str], output: str | None = None
) -> onnx.NodeProto:
    """Return a copy of a node with other inputs and, if given, another output."""
    made = onnx.NodeProto.FromString(node.SerializeToString())
    del made.input[:]
    made.input.extend(inputs)
    if output is not None:
        made.output[0] = output
    made.name = f"/model/{made.output[0]}/{node.op_type}"
    return made
