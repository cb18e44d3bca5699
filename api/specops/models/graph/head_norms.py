"""Moves the norms of queries, keys and values into the attention node that reads them.

onnxruntime-genai's model builder writes these norms (Qwen3, Gemma 3 and 4) as a reshape to one row
per token and head, an RMS norm, and a reshape back. In between, tokens and heads share an axis, so
the check that each token is computed by itself cannot follow them. Attention can apply the same
norms itself.
"""

from collections.abc import Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.graph.nodes import RefusedGraphError, attributes_of, named

# GroupQueryAttention: input of queries, keys, values → input of their norm. ONNX Runtime's operator
# has none for values.
NORM_INPUTS = {0: 14, 1: 15, 2: 16}
_NORM = "SimplifiedLayerNormalization"


class _HeadNorm(NamedTuple):
    x: str
    weight: str
    epsilon: float


def move_head_norms(graph: onnx.GraphProto) -> None:
    """Rewrite every GroupQueryAttention whose queries and keys or values are normalized before it.

    Raises:
        RefusedGraphError: only queries or only keys are normalized, or epsilons differ.
    """
    makers = {name: node for node in graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "GroupQueryAttention" or not all(node.input[:2]):
            continue
        found = {place: _head_norm(node.input[place], makers, tensors) for place in NORM_INPUTS}
        norms = {place: norm for place, norm in found.items() if norm is not None}
        if not norms:
            continue
        epsilons = {norm.epsilon for norm in norms.values()}
        if (0 in norms) != (1 in norms) or len(epsilons) > 1:
            raise RefusedGraphError(f"{named(node)} has different norms for queries and keys")
        node.input.extend([""] * (max(NORM_INPUTS.values()) + 1 - len(node.input)))
        for place, norm in norms.items():
            node.input[place], node.input[NORM_INPUTS[place]] = norm.x, norm.weight
        node.attribute.append(helper.make_attribute("qk_norm_epsilon", epsilons.pop()))


def _head_norm(
    name: str, makers: Mapping[str, onnx.NodeProto], tensors: Mapping[str, TensorProto]
) -> _HeadNorm | None:
    """Return the norm that produces a tensor: reshape, norm over the heads, reshape back."""
    back = makers.get(name)
    norm = makers.get(back.input[0]) if back else None
    there = makers.get(norm.input[0]) if norm else None
    if not (back and norm and there) or norm.op_type != _NORM:
        return None
    weight = tensors.get(norm.input[1])
    split, joined = (_shape(node, tensors) for node in (there, back))
    if weight is None or len(weight.dims) != 1:
        return None
    given = attributes_of(norm)
    if split != [0, -1, weight.dims[0]] or given.get("axis", -1) not in (-1, 2):
        return None
    if joined[:2] not in ([0, -1], [0, 0]):
        return None
    return _HeadNorm(there.input[0], weight.name, given.get("epsilon", 1e-5))


def _shape(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> list[int]:
    """Return the shape that a Reshape gives; empty if the shape is not a constant in the graph."""
    tensor = tensors.get(node.input[1]) if node.op_type == "Reshape" else None
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return []
    return [int(size) for size in numpy_helper.to_array(tensor)]
