"""Takes what stands in front of a product into it: a gate, and a norm.

`specops.QuantizedMatMul` makes what it multiplies: from a residual and what is added to it the norm
of both, from the halves of a feed-forward's first product what one lets through of the other. A
layer then is five nodes where it was ten.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import onnx
from onnx import TensorProto, helper

from specops.models.graph.tokenwise import MICROSOFT, attributes_of
from specops.models.graph.wiring import Wiring, set_nodes
from specops.runtime import kernels

_NORM, _SKIP_NORM = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"
_EPSILONS = {_NORM: 1e-5, _SKIP_NORM: 1e-12}  # where a node has no attribute
_SKIP_OUTPUTS = 3  # the sum's place among the outputs of _SKIP_NORM
_BIAS = 2


class Made(IntEnum):
    """What a product makes of its input, by the value of its operator's attribute."""

    AS_IT_IS = 0
    NORM = 1
    SILU_GATE = 2
    GELU_GATE = 3


def pair_gates(
    graph: onnx.GraphProto,
    computable: Callable[[onnx.NodeProto], bool],
    alike: Callable[[onnx.NodeProto, onnx.NodeProto], bool],
) -> dict[str, onnx.NodeProto]:
    """Find products whose results gate each other, and let the product that follows do that.

    The nodes in between go, and so does the second of the two products. The one that reads their
    result gets the first one's name as its input and an attribute `input`.

    Args:
        graph: with its products as MatMulNBits.
        computable: whether a node is a product that our kernels compute.
        alike: whether two of them may become one, their columns behind each other.

    Returns:
        By the output of the product that stays the one to put behind it.
    """
    wiring = Wiring(graph)
    gone: set[str] = set()
    pairs: dict[str, onnx.NodeProto] = {}
    for mul in graph.node:
        if mul.op_type != "Mul":
            continue
        readers = wiring.readers.get(mul.output[0], [])
        if mul.output[0] in wiring.outputs or len(readers) != 1 or not computable(readers[0]):
            continue
        for opened, other in (tuple(mul.input), tuple(mul.input)[::-1]):
            found = _activation(opened, wiring)
            up = wiring.makers.get(other)
            if found is None or up is None:
                continue
            kind, gate, between = found
            between = [*between, mul]
            hidden = (gate.output[0], other, *(node.output[0] for node in between[:-1]))
            if (
                computable(gate)
                and computable(up)
                and alike(gate, up)
                and all(wiring.only_read_by(name, between) for name in hidden)
            ):
                readers[0].input[0] = gate.output[0]
                readers[0].attribute.append(helper.make_attribute("input", int(kind)))
                pairs[gate.output[0]] = up
                gone.update(node.output[0] for node in (*between, up))
                break
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])
    return pairs


def _activation(
    name: str, wiring: Wiring
) -> tuple[Made, onnx.NodeProto, list[onnx.NodeProto]] | None:
    """Which function of a product a tensor is, the product, and the nodes of the function."""
    last = wiring.makers.get(name)
    if last is None:
        return None
    nodes, kind = [last], Made.SILU_GATE
    if last.op_type == "Mul":  # x * Sigmoid(x)
        sigmoids = [
            maker
            for item in last.input
            if (maker := wiring.makers.get(item)) and maker.op_type == "Sigmoid"
        ]
        if len(sigmoids) != 1 or sigmoids[0].input[0] not in last.input:
            return None
        nodes = [*sigmoids, last]
    elif last.domain == MICROSOFT and last.op_type == "FastGelu" and len(last.input) == 1:
        kind = Made.GELU_GATE
    elif last.op_type != "QuickGelu" or attributes_of(last).get("alpha") != 1.0:
        return None
    product = wiring.makers.get(nodes[0].input[0])
    return None if product is None else (kind, product, nodes)


def take_norms_in(graph: onnx.GraphProto) -> None:
    """Let the first product that reads an RMS norm compute it, with the sum before it.

    Args:
        graph: with products as `specops.QuantizedMatMul`.
    """
    wiring = Wiring(graph)
    floats = {
        tensor.name: list(tensor.dims)
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT
    }
    nodes: list[onnx.NodeProto] = []
    moved: set[str] = set()
    for node in graph.node:  # a norm stands before the product, and what the product needs does too
        if (product := _product_of(node, wiring, floats)) is not None:
            moved.add(product.output[0])
            nodes.append(_with_norm(product, node, wiring))
        elif node.output[0] not in moved:
            nodes.append(node)
    set_nodes(graph, nodes)


def _product_of(
    norm: onnx.NodeProto, wiring: Wiring, floats: dict[str, list[int]]
) -> onnx.NodeProto | None:
    """The product that a node, if it is an RMS norm over the last axis, can be taken into."""
    if norm.op_type not in _EPSILONS or attributes_of(norm).get("axis", -1) != -1:
        return None
    skip = norm.op_type == _SKIP_NORM
    if skip and (len(norm.input) > _SKIP_OUTPUTS or any(norm.output[1:_SKIP_OUTPUTS])):
        return None
    weight = floats.get(norm.input[2 if skip else 1])
    for node in wiring.readers.get(norm.output[0], ()):
        if node.domain != kernels.DOMAIN or node.op_type != kernels.MATMUL:
            continue
        given = attributes_of(node)
        if given["input"] == Made.AS_IT_IS and weight == [given["K"]]:
            return node
    return None


def _with_norm(product: onnx.NodeProto, norm: onnx.NodeProto, wiring: Wiring) -> onnx.NodeProto:
    skip = norm.op_type == _SKIP_NORM
    bias = product.input[_BIAS] if len(product.input) > _BIAS else ""
    inputs = [norm.input[0], product.input[1], bias, norm.input[2 if skip else 1]]
    total = norm.output[_SKIP_OUTPUTS] if len(norm.output) > _SKIP_OUTPUTS else ""
    made = norm.output[0]
    outputs = [
        product.output[0],
        total if total in wiring.readers or total in wiring.outputs else "",
        "" if wiring.only_read_by(made, [product]) else made,
    ]
    while not outputs[-1]:
        outputs.pop()
    given = attributes_of(product) | {
        "input": int(Made.NORM),
        "epsilon": attributes_of(norm).get("epsilon", _EPSILONS[norm.op_type]),
    }
    return helper.make_node(
        kernels.MATMUL,
        [*inputs, norm.input[1]] if skip else inputs,
        outputs,
        name=product.name,
        domain=kernels.DOMAIN,
        **given,
    )
