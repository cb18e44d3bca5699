"""Moves the node before a product into the product: a gate, an activation, a norm.

`specops.QuantizedMatMul` computes its own input: from a residual and a summand it makes the norm of
their sum; from the two halves of a feed-forward's first product it makes the gated product; from
attention and a gate it makes the gated output. A layer is then five nodes instead of ten. A norm
that no product reads becomes `specops.Norm`, our own node with the same bits on every processor.
"""

from collections.abc import Callable
from enum import IntEnum
from math import isclose
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.contract import MICROSOFT
from specops.models.graph.nodes import (
    Wiring,
    attributes_of,
    input_of,
    set_nodes,
    trimmed,
)
from specops.runtime import kernels


class Made(IntEnum):
    """What a product makes of its input: the values of the operator's attribute `input`."""

    AS_IT_IS = 0
    NORM = 1
    LAYER_NORM = 2
    GELU = 3
    SILU_GATE = 4
    GELU_GATE = 5
    OUTPUT_GATE = 6
    SOFT_CAP = 7  # of `specops.Norm` alone


class _Operator(NamedTuple):
    """An ONNX operator that normalizes; `epsilon` is its default, `inputs` are in their order."""

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
_SUM = 3  # the output with the sum, of the two Skip operators; outputs 1 and 2 are statistics
_BIAS = 2  # the product's input with its bias

Computable = Callable[[onnx.NodeProto], bool]


def pair_gates(
    graph: onnx.GraphProto,
    computable: Computable,
    alike: Callable[[onnx.NodeProto, onnx.NodeProto], bool],
    width: Callable[[onnx.NodeProto], int],
) -> dict[str, onnx.NodeProto]:
    """Find two products where one gates the other, and let the product that follows apply the gate.

    The nodes in between and the second of the two products go. The product that follows reads the
    first one's output and gets the attribute `input`. Where the two cannot become one, a Concat
    joins their outputs; it does the same with a part of a vector.

    Args:
        graph: its products are still MatMulNBits.
        computable: tells whether a node is a product that our kernels compute.
        alike: tells whether two products may become one, with the columns of both.
        width: numbers that a node gives for each token; 0: they are not known.

    Returns:
        Output of the product that stays → the product whose columns follow its own.
    """
    wiring = Wiring(graph)
    gone: set[str] = set()
    pairs: dict[str, onnx.NodeProto] = {}
    for mul in graph.node:
        reader = _only_reader(mul.output[0], wiring, computable) if mul.op_type == "Mul" else None
        if reader is None:
            continue
        for opened, other in (tuple(mul.input), tuple(mul.input)[::-1]):
            found, up = _activation(opened, wiring), wiring.makers.get(other)
            if found is None or up is None:
                continue
            kind, gate, between = found
            between = [*between, mul]
            if not all(wiring.only_read_by(node.output[0], between) for node in between[:-1]):
                continue
            alone = all(wiring.only_read_by(name, between) for name in (gate.output[0], other))
            if alone and computable(gate) and computable(up) and alike(gate, up):
                _give_input(reader, gate.output[0], kind)
                pairs[gate.output[0]] = up
                gone.update(node.output[0] for node in (*between, up))
            elif width(gate) == width(up) == attributes_of(reader)["K"]:
                both = [gate.output[0], other]
                mul.CopyFrom(helper.make_node("Concat", both, mul.output, mul.name, axis=-1))
                _give_input(reader, mul.output[0], kind)
                gone.update(node.output[0] for node in between[:-1])
            else:
                continue
            break
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])
    return pairs


def take_gelus_in(graph: onnx.GraphProto, computable: Computable) -> None:
    """Let a product compute a GELU that no other node reads.

    Args:
        graph: its products are still MatMulNBits.
        computable: tells whether a node is a product that our kernels compute.
    """
    wiring = Wiring(graph)
    gone: set[str] = set()
    for gelu in filter(_is_gelu, graph.node):
        reader = _only_reader(gelu.output[0], wiring, computable)
        if reader is not None:
            _give_input(reader, gelu.input[0], Made.GELU)
            gone.add(gelu.output[0])
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])


def take_output_gates_in(graph: onnx.GraphProto) -> None:
    """Let a product multiply attention by the sigmoid of a gate, which another product gives.

    Args:
        graph: its products are `specops.QuantizedMatMul`.
    """
    wiring = Wiring(graph)
    gone: set[str] = set()
    for mul in [node for node in graph.node if node.op_type == "Mul"]:
        opened = [name for name in mul.input if _made_by(name, "Sigmoid", wiring)]
        attended = [name for name in mul.input if _made_by(name, kernels.ATTENTION, wiring)]
        readers = wiring.readers.get(mul.output[0], [])
        if not opened or not attended or len(readers) != 1:
            continue
        (product,), sigmoid = readers, _made_by(opened[0], "Sigmoid", wiring)
        gate = sigmoid.input[0] if sigmoid is not None else ""
        given, maker = attributes_of(product), _made_by(gate, kernels.MATMUL, wiring)
        rows = wiring.makers[opened[0]]  # the sigmoid, or the choice of rows with logits after it
        if (
            sigmoid is not None
            and maker is not None
            and (product.domain, product.op_type) == (kernels.DOMAIN, kernels.MATMUL)
            and given["input"] == Made.AS_IT_IS
            and sum(attributes_of(maker)["N"]) == given["K"]
            and wiring.only_read_by(sigmoid.output[0], [rows, mul])
            and wiring.only_read_by(opened[0], [mul])
            and wiring.only_read_by(mul.output[0], [product])
        ):
            if rows.op_type == "Gather":
                rows.input[0], gate = gate, opened[0]
            _give_gate(product, attended[0], gate)
            gone |= {sigmoid.output[0], mul.output[0]}
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])


def _made_by(name: str, operator: str, wiring: Wiring) -> onnx.NodeProto | None:
    """Return the node of this operator that makes a tensor, or the tensor that it has rows of."""
    node = wiring.makers.get(name)
    if node is not None and node.op_type == "Gather":
        node = wiring.makers.get(node.input[0])
    return node if node is not None and node.op_type == operator else None


def _give_gate(product: onnx.NodeProto, x: str, gate: str) -> None:
    operands = [x, product.input[1], input_of(product, _BIAS), "", gate]
    product.CopyFrom(_remade(product, operands, list(product.output), Made.OUTPUT_GATE))


def _remade(
    product: onnx.NodeProto, inputs: list[str], outputs: list[str], kind: Made, **changes: float
) -> onnx.NodeProto:
    """Return the same product with another input."""
    given = attributes_of(product) | {"input": int(kind), **changes}
    return helper.make_node(
        kernels.MATMUL, inputs, outputs, name=product.name, domain=kernels.DOMAIN, **given
    )


def _only_reader(name: str, wiring: Wiring, computable: Computable) -> onnx.NodeProto | None:
    """Return the product of our kernels that alone reads a tensor."""
    readers = wiring.readers.get(name, [])
    alone = name not in wiring.outputs and len(readers) == 1 and computable(readers[0])
    return readers[0] if alone else None


def _give_input(product: onnx.NodeProto, x: str, kind: Made) -> None:
    product.input[0] = x
    product.attribute.append(helper.make_attribute("input", int(kind)))


def _activation(
    name: str, wiring: Wiring
) -> tuple[Made, onnx.NodeProto, list[onnx.NodeProto]] | None:
    """Return a gate's kind, the product that opens it, and the nodes of its activation."""
    last = wiring.makers.get(name)
    if last is None:
        return None
    nodes, kind = [last], Made.SILU_GATE
    if last.op_type == "Mul":  # x * Sigmoid(x)
        makers = [wiring.makers[item] for item in last.input if item in wiring.makers]
        sigmoids = [maker for maker in makers if maker.op_type == "Sigmoid"]
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
    """Return whether a node is GELU, approximated with tanh, without a bias."""
    return node.domain == MICROSOFT and node.op_type == "FastGelu" and len(node.input) == 1


def own_softcaps(graph: onnx.GraphProto) -> None:
    """Let our operator compute cap * tanh(x / cap): ONNX Runtime's has other bits by processor."""
    wiring, gone = Wiring(graph), set[str]()
    numbers = {
        tensor.name: float(numpy_helper.to_array(tensor).item())
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and list(tensor.dims) in ([], [1])
    }
    for tanh in [node for node in graph.node if node.op_type == "Tanh"]:
        readers, before = wiring.readers.get(tanh.output[0], []), wiring.makers.get(tanh.input[0])
        if before is None or len(readers) != 1 or tanh.output[0] in wiring.outputs:
            continue
        x, factor = _scaled(before, numbers)
        capped, cap = _scaled(readers[0], numbers)
        alone = wiring.only_read_by(before.output[0], [tanh])
        if not alone or capped != tanh.output[0] or not isclose(factor * cap, 1, rel_tol=1e-6):
            continue
        name = f"{readers[0].output[0]}.softcap"
        graph.initializer.append(numpy_helper.from_array(np.array([cap], np.float32), name))
        made = _alone(_Norm(Made.SOFT_CAP, 0.0, 1, x, name, readers[0].output[0]))
        readers[0].CopyFrom(made)
        gone.update((before.output[0], tanh.output[0]))
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])


def _scaled(node: onnx.NodeProto, numbers: dict[str, float]) -> tuple[str, float]:
    """Return a node's factors, a tensor and a number; 0 if it does something else."""
    if node.op_type == "Div" and numbers.get(node.input[1]):
        return node.input[0], 1 / numbers[node.input[1]]
    for one, other in (tuple(node.input), tuple(node.input)[::-1]) if node.op_type == "Mul" else ():
        if other in numbers:
            return one, numbers[other]
    return "", 0.0


class _Norm(NamedTuple):
    """A norm over the last axis: the names of its tensors, empty for those that it lacks."""

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
        graph: its products are `specops.QuantizedMatMul`.
    """
    wiring = Wiring(graph)
    floats = {
        tensor.name: list(tensor.dims)
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT
    }
    nodes: list[onnx.NodeProto] = []
    moved: set[str] = set()
    for node in graph.node:  # the product takes the norm's place: nothing may need it earlier
        if (norm := _norm_of(node, floats, wiring)) is not None:
            product = _product_of(norm, wiring)
            nodes.append(_alone(norm) if product is None else _with_norm(product, norm, wiring))
            moved.update(() if product is None else product.output[:1])
        elif node.output[0] not in moved:
            nodes.append(node)
    set_nodes(graph, nodes)


def _norm_of(node: onnx.NodeProto, floats: dict[str, list[int]], wiring: Wiring) -> _Norm | None:
    """Return the norm that a node is, if it is one over the last axis with weights of its size."""
    operator, attributes = _OPERATORS.get(node.op_type), attributes_of(node)
    if operator is None or attributes.get("axis", -1) != -1:
        return None
    if any(node.input[len(operator.inputs) :]) or any(node.output[1:_SUM]):
        return None
    given = dict(zip(operator.inputs, node.input, strict=False))
    shape = floats.get(given["weight"], [])
    if len(shape) != 1 or shape == [1]:  # one number would mean a whole row of weights
        return None
    if given.get("shift") and floats.get(given["shift"]) != shape:
        return None
    total = node.output[_SUM] if len(node.output) > _SUM else ""
    return _Norm(
        operator.kind,
        attributes.get("epsilon", operator.epsilon),
        shape[0],
        made=node.output[0],
        total=total if total in wiring.readers or total in wiring.outputs else "",
        **given,
    )


def _product_of(norm: _Norm, wiring: Wiring) -> onnx.NodeProto | None:
    """Return the first product that reads the norm's output unchanged."""
    for node in wiring.readers.get(norm.made, ()):
        if (node.domain, node.op_type) == (kernels.DOMAIN, kernels.MATMUL):
            given = attributes_of(node)
            if given["input"] == Made.AS_IT_IS and given["K"] == norm.size:
                return node
    return None


def _with_norm(product: onnx.NodeProto, norm: _Norm, wiring: Wiring) -> onnx.NodeProto:
    alone = wiring.only_read_by(norm.made, [product])
    tiles, bias = product.input[1], input_of(product, _BIAS)
    inputs = trimmed(norm.x, tiles, bias, norm.weight, norm.residual, norm.shift)
    outputs = trimmed(product.output[0], norm.total, "" if alone else norm.made)
    return _remade(product, inputs, outputs, norm.kind, epsilon=norm.epsilon)


def _alone(norm: _Norm) -> onnx.NodeProto:
    return helper.make_node(
        kernels.NORM,
        trimmed(norm.x, norm.weight, norm.residual, norm.shift),
        trimmed(norm.made, norm.total),
        name=norm.made,
        domain=kernels.DOMAIN,
        input=int(norm.kind),
        epsilon=norm.epsilon,
    )
