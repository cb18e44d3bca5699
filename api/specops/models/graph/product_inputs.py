"""Takes what stands in front of a product into it: a gate, an activation, and a norm.

`specops.QuantizedMatMul` makes what it multiplies: from a residual and what is added to it the norm
of both, from the halves of a feed-forward's first product what one lets through of the other. A
layer then is five nodes where it was ten. A norm that no product reads is a node of our own,
`specops.Norm`, so that it has the same bits on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import onnx
from onnx import TensorProto, helper

from specops.models.graph.tokenwise import MICROSOFT, attributes_of
from specops.models.graph.wiring import Wiring, set_nodes
from specops.runtime import kernels


class Made(IntEnum):
    """What a product makes of its input, by the value of its operator's attribute."""

    AS_IT_IS = 0
    NORM = 1
    LAYER_NORM = 2
    GELU = 3
    SILU_GATE = 4
    GELU_GATE = 5


class _Operator(NamedTuple):
    """An operator that normalizes: how, its epsilon where a node has none, its inputs by place."""

    kind: Made
    epsilon: float
    inputs: tuple[str, ...]


_OPERATORS = {
    "SimplifiedLayerNormalization": _Operator(Made.NORM, 1e-5, ("x", "weight")),
    "RMSNormalization": _Operator(Made.NORM, 1e-5, ("x", "weight")),
    "LayerNormalization": _Operator(Made.LAYER_NORM, 1e-5, ("x", "weight", "shift")),
    "SkipSimplifiedLayerNormalization": _Operator(Made.NORM, 1e-12, ("x", "residual", "weight")),
    "SkipLayerNormalization": _Operator(
        Made.LAYER_NORM, 1e-12, ("x", "residual", "weight", "shift")
    ),
}
_SUM = 3  # its place among the outputs of the last two; what stands before it are statistics
_BIAS = 2


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
    elif _is_gelu(last):
        kind = Made.GELU_GATE
    elif last.op_type != "QuickGelu" or attributes_of(last).get("alpha") != 1.0:
        return None
    product = wiring.makers.get(nodes[0].input[0])
    return None if product is None else (kind, product, nodes)


def _is_gelu(node: onnx.NodeProto) -> bool:
    """Whether a node is GELU by its approximation with tanh, and nothing else."""
    return node.domain == MICROSOFT and node.op_type == "FastGelu" and len(node.input) == 1


def take_gelus_in(graph: onnx.GraphProto, computable: Callable[[onnx.NodeProto], bool]) -> None:
    """Let a product that alone reads a GELU compute it: it gets an attribute `input`.

    Args:
        graph: with its products as MatMulNBits.
        computable: whether a node is a product that our kernels compute.
    """
    wiring = Wiring(graph)
    gone: set[str] = set()
    for gelu in filter(_is_gelu, graph.node):
        (made,) = gelu.output
        readers = wiring.readers.get(made, [])
        if made not in wiring.outputs and len(readers) == 1 and computable(readers[0]):
            readers[0].input[0] = gelu.input[0]
            readers[0].attribute.append(helper.make_attribute("input", int(Made.GELU)))
            gone.add(made)
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])


class _Norm(NamedTuple):
    """A norm over the last axis, by the names of its tensors; empty where it has none."""

    kind: Made
    epsilon: float
    size: int
    x: str
    weight: str
    made: str
    residual: str = ""
    shift: str = ""
    total: str = ""


def take_norms_in(graph: onnx.GraphProto) -> None:
    """Let the first product that reads a norm compute it, with the sum before it.

    A norm that no product reads becomes `specops.Norm`.

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
        if (norm := _norm_of(node, floats, wiring)) is not None:
            product = _product_of(norm, wiring)
            nodes.append(_alone(norm) if product is None else _with_norm(product, norm, wiring))
            moved.update(() if product is None else product.output[:1])
        elif node.output[0] not in moved:
            nodes.append(node)
    set_nodes(graph, nodes)


def _norm_of(node: onnx.NodeProto, floats: dict[str, list[int]], wiring: Wiring) -> _Norm | None:
    """What a node normalizes, if it does so over the last axis, by weights of its size."""
    operator = _OPERATORS.get(node.op_type)
    if operator is None or attributes_of(node).get("axis", -1) != -1:
        return None
    if any(node.input[len(operator.inputs) :]) or any(node.output[1:_SUM]):
        return None
    given = dict(zip(operator.inputs, node.input, strict=False))
    shape = floats.get(given["weight"], [])
    if len(shape) != 1 or shape == [1]:  # a single number stands for as many as there are
        return None
    if given.get("shift") and floats.get(given["shift"]) != shape:
        return None
    total = node.output[_SUM] if len(node.output) > _SUM else ""
    return _Norm(
        operator.kind,
        attributes_of(node).get("epsilon", operator.epsilon),
        shape[0],
        made=node.output[0],
        total=total if total in wiring.readers or total in wiring.outputs else "",
        **given,
    )


def _product_of(norm: _Norm, wiring: Wiring) -> onnx.NodeProto | None:
    """The first product that multiplies what a norm makes, as it is."""
    for node in wiring.readers.get(norm.made, ()):
        if (node.domain, node.op_type) != (kernels.DOMAIN, kernels.MATMUL):
            continue
        given = attributes_of(node)
        if given["input"] == Made.AS_IT_IS and given["K"] == norm.size:
            return node
    return None


def _with_norm(product: onnx.NodeProto, norm: _Norm, wiring: Wiring) -> onnx.NodeProto:
    bias = product.input[_BIAS] if len(product.input) > _BIAS else ""
    alone = wiring.only_read_by(norm.made, [product])
    given = attributes_of(product) | {"input": int(norm.kind), "epsilon": norm.epsilon}
    return helper.make_node(
        kernels.MATMUL,
        _trimmed(norm.x, product.input[1], bias, norm.weight, norm.residual, norm.shift),
        _trimmed(product.output[0], norm.total, "" if alone else norm.made),
        name=product.name,
        domain=kernels.DOMAIN,
        **given,
    )


def _alone(norm: _Norm) -> onnx.NodeProto:
    return helper.make_node(
        kernels.NORM,
        _trimmed(norm.x, norm.weight, norm.residual, norm.shift),
        _trimmed(norm.made, norm.total),
        name=norm.made,
        domain=kernels.DOMAIN,
        input=int(norm.kind),
        epsilon=norm.epsilon,
    )


def _trimmed(*names: str) -> list[str]:
    """Names of inputs or outputs, without those that are missing at the end."""
    last = max(place for place, name in enumerate(names) if name)
    return list(names[: last + 1])
