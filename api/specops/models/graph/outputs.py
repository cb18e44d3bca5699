"""Sets what a rewritten graph gives: logits and the last hidden state of the tokens that need them.

After the last attention no token depends on other tokens. So the graph continues there only with
the tokens whose logits are wanted.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from specops.models.contract import GGUF_MATMUL
from specops.models.graph.nodes import RefusedGraphError, attributes_of, set_nodes
from specops.runtime import kernels

LOGITS, LOGIT_ROWS = "logits", "logit_rows"
CONTROL: dict[str, list[str | int]] = {
    "spans": ["spans", 3],
    "block_tables": ["slots", "blocks"],
    "cache": [4],
}
_HIDDEN = "hidden"
_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", GGUF_MATMUL)


def keep_what_gives_logits(graph: onnx.GraphProto) -> None:
    """Remove every node and weight that the logits do not depend on."""
    if LOGITS not in {item.name for item in graph.output}:
        raise RefusedGraphError("it has no output logits")
    needed, kept = {LOGITS}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(filter(None, node.input))
            kept.append(node)
    set_nodes(graph, reversed(kept))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in needed]:
        graph.initializer.remove(tensor)


def gather_logit_rows(graph: onnx.GraphProto) -> None:
    """After the last attention, take `logit_rows` of every tensor that comes from before it."""
    constants = {tensor.name for tensor in graph.initializer}
    last = [node for node in graph.node if node.op_type == kernels.ATTENTION][-1]
    behind = _descendants(graph, last)
    gathered: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if behind.intersection(node.output):
            for place, name in enumerate(node.input):
                if not name or name in constants or name in behind:
                    continue
                rows = f"{name}.at_logit_rows"
                if name not in gathered:
                    gathered.add(name)
                    nodes.append(
                        helper.make_node("Gather", [name, LOGIT_ROWS], [rows], name=rows, axis=1)
                    )
                node.input[place] = rows
        nodes.append(node)
    set_nodes(graph, nodes)


def _descendants(graph: onnx.GraphProto, start: onnx.NodeProto) -> set[str]:
    """Return the tensors that depend on a node's outputs, without these outputs."""
    reached = set(start.output)
    for node in graph.node:
        if reached.intersection(node.input):
            reached.update(filter(None, node.output))
    return reached - set(start.output)


def declare(graph: onnx.GraphProto) -> None:
    """Declare inputs and outputs as the engine binds them; old notes on shapes go."""
    read = {name for node in graph.node for name in node.input}
    logits = next(item for item in graph.output if item.name == LOGITS)
    dims = logits.type.tensor_type.shape.dim
    if logits.type.tensor_type.elem_type != TensorProto.FLOAT or not (dims and dims[-1].dim_value):
        raise RefusedGraphError("its logits are not float32 over a vocabulary of a fixed size")
    vocabulary = dims[-1].dim_value
    shapes: dict[str, list[str | int]] = {
        **{name: [1, "tokens"] for name in ("input_ids", "position_ids") if name in read},
        **CONTROL,
        LOGIT_ROWS: ["logit_rows"],
    }
    del graph.input[:], graph.output[:], graph.value_info[:]
    for name, shape in shapes.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
    _add_output(graph, LOGITS, vocabulary)
    _output_hidden_states(graph)


def output_product(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """Return the product with weights that the logits come from; None if there is no such node.

    Between it and the logits there may be steps of one input each: a bias, a factor, a soft cap.
    """
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    node = makers.get(LOGITS)
    while node is not None and not (node.op_type in _PRODUCTS and node.input[1] in weights):
        before = [name for name in node.input if name and name not in weights]
        node = makers.get(before[0]) if len(before) == 1 else None
    return node


def _output_hidden_states(graph: onnx.GraphProto) -> None:
    """Make the input of the last product an output, if the product's weights tell its size."""
    product = output_product(graph)
    if product is None:
        return
    weights = {tensor.name: tensor for tensor in graph.initializer}
    if product.op_type == GGUF_MATMUL:
        kind, size = TensorProto.FLOAT, attributes_of(product)["K"]
    elif product.op_type == "MatMulNBits":
        kind, size = weights[product.input[2]].data_type, attributes_of(product)["K"]
    else:
        weight = weights[product.input[1]]
        kind, size = weight.data_type, weight.dims[attributes_of(product).get("transB", 0)]
    if kind != TensorProto.FLOAT:
        return
    before = product.input[0]
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == before:
                    names[place] = _HIDDEN
    _add_output(graph, _HIDDEN, size)


def _add_output(graph: onnx.GraphProto, name: str, size: int) -> None:
    shape = [1, LOGIT_ROWS, size]
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
