"""What a rewritten graph gives: logits and the last hidden state, of the tokens that need them.

Behind the last attention no token looks at others: there the graph goes on with those alone whose
logits are wanted.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from specops.models.graph.tokenwise import RefusedGraphError, attributes_of
from specops.models.graph.wiring import set_nodes
from specops.runtime import kernels

LOGITS, LOGIT_ROWS = "logits", "logit_rows"
_HIDDEN = "hidden"
CONTROL = {"spans": ["spans", 3], "block_tables": ["slots", "blocks"], "cache": [4]}
_TOKENS = ("input_ids", "position_ids")
_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits")


def keep_what_gives_logits(graph: onnx.GraphProto) -> None:
    """Remove every node and weight that the logits do not follow from."""
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
    """Behind the last attention, take `logit_rows` of every tensor that comes from before it."""
    constants = {tensor.name for tensor in graph.initializer}
    last = max(place for place, node in enumerate(graph.node) if node.op_type == kernels.ATTENTION)
    behind = _descendants(graph, graph.node[last])
    gathered: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if behind.intersection(node.output):
            for place, name in enumerate(node.input):
                if not name or name in constants or name in behind:
                    continue
                if name not in gathered:
                    gathered[name] = f"{name}.at_logit_rows"
                    nodes.append(
                        helper.make_node(
                            "Gather",
                            [name, LOGIT_ROWS],
                            [gathered[name]],
                            name=gathered[name],
                            axis=1,
                        )
                    )
                node.input[place] = gathered[name]
        nodes.append(node)
    set_nodes(graph, nodes)


def _descendants(graph: onnx.GraphProto, start: onnx.NodeProto) -> set[str]:
    """The tensors that follow from a node's outputs, without those."""
    reached = set(start.output)
    for node in graph.node:
        if reached.intersection(node.input):
            reached.update(filter(None, node.output))
    return reached - set(start.output)


def declare(graph: onnx.GraphProto) -> None:
    """Inputs and outputs as the engine binds them; notes on shapes in between are outdated."""
    read = {name for node in graph.node for name in node.input}
    logits = next(item for item in graph.output if item.name == LOGITS)
    dims = logits.type.tensor_type.shape.dim
    if logits.type.tensor_type.elem_type != TensorProto.FLOAT or not (dims and dims[-1].dim_value):
        raise RefusedGraphError("its logits are not float32 over a vocabulary of a fixed size")
    vocabulary = dims[-1].dim_value
    shapes: dict[str, list[str | int]] = {
        **{name: [1, "tokens"] for name in _TOKENS if name in read},
        **CONTROL,  # type: ignore[dict-item]
        LOGIT_ROWS: ["logit_rows"],
    }
    del graph.input[:], graph.output[:], graph.value_info[:]
    for name, shape in shapes.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
    wanted = [1, LOGIT_ROWS, vocabulary]
    graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, wanted))
    _give_hidden(graph)


def output_product(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """The product with weights that the logits follow from; None where there is no such node.

    Between it and the logits there may be steps of one input each: a bias, a factor, a soft cap.
    """
    weights = {tensor.name for tensor in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    node = producers.get(LOGITS)
    while node is not None and not (node.op_type in _PRODUCTS and node.input[1] in weights):
        before = [name for name in node.input if name and name not in weights]
        node = producers.get(before[0]) if len(before) == 1 else None
    return node


def _give_hidden(graph: onnx.GraphProto) -> None:
    """Make what the last product reads an output, too, where its weights say its size."""
    node = output_product(graph)
    if node is None:
        return
    weights = {tensor.name: tensor for tensor in graph.initializer}
    if node.op_type == "MatMulNBits":
        kind, size = weights[node.input[2]].data_type, attributes_of(node)["K"]
    else:
        weight = weights[node.input[1]]
        kind, size = weight.data_type, weight.dims[attributes_of(node).get("transB", 0)]
    if kind == TensorProto.FLOAT:
        _rename(graph, node.input[0], _HIDDEN)
        wanted = helper.make_tensor_value_info(_HIDDEN, TensorProto.FLOAT, [1, LOGIT_ROWS, size])
        graph.output.append(wanted)


def _rename(graph: onnx.GraphProto, before: str, after: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == before:
                    names[place] = after
