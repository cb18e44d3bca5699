"""Takes norms of queries and keys, head by head, into the attention that reads them.

onnxruntime-genai's model builder draws them (Qwen3, Gemma 3) as a reshape to one row per token and
head, an RMS norm, and a reshape back. In between tokens and heads share an axis; attention itself
can do the same where each token's heads are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.graph.tokenwise import RefusedGraphError, attributes_of, named

_QUERY, _KEY = 0, 1
_NORM_INPUTS = {_QUERY: 14, _KEY: 15}  # GroupQueryAttention's own places for the norms' weights
_NORM = "SimplifiedLayerNormalization"


class _HeadNorm(NamedTuple):
    """What is normalized, by which weight."""

    x: str
    weight: str
    epsilon: float


def take_norms_in(graph: onnx.GraphProto) -> None:
    """Rewrite every GroupQueryAttention whose queries and keys are normalized before it.

    Raises:
        RefusedGraphError: only one of the two is, or by other epsilons.
    """
    producers = {name: node for node in graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "GroupQueryAttention" or not all(node.input[:2]):
            continue
        found = {place: _head_norm(node.input[place], producers, tensors) for place in _NORM_INPUTS}
        norms = {place: norm for place, norm in found.items() if norm is not None}
        if not norms:
            continue
        epsilons = {norm.epsilon for norm in norms.values()}
        if len(norms) < len(found) or len(epsilons) > 1:
            raise RefusedGraphError(f"{named(node)} has other norms for queries than for keys")
        node.input.extend([""] * (_NORM_INPUTS[_KEY] + 1 - len(node.input)))
        for place, norm in norms.items():
            node.input[place], node.input[_NORM_INPUTS[place]] = norm.x, norm.weight
        node.attribute.append(helper.make_attribute("qk_norm_epsilon", epsilons.pop()))


def _head_norm(
    name: str, producers: Mapping[str, onnx.NodeProto], tensors: Mapping[str, TensorProto]
) -> _HeadNorm | None:
    """The norm that ends in a tensor, if there is one: reshape, norm over the heads, reshape."""
    back = producers.get(name)
    norm = producers.get(back.input[0]) if back else None
    there = producers.get(norm.input[0]) if norm else None
    if not (back and norm and there) or norm.op_type != _NORM:
        return None
    weight = tensors.get(norm.input[1])
    shapes = [_shape(node, tensors) for node in (there, back)]
    if weight is None or len(weight.dims) != 1 or None in shapes:
        return None
    given = attributes_of(norm)
    per_head = shapes[0] == [0, -1, weight.dims[0]] and given.get("axis", -1) in (-1, 2)
    if not per_head or (shapes[1] or [])[:2] not in ([0, -1], [0, 0]):
        return None
    return _HeadNorm(there.input[0], weight.name, given.get("epsilon", 1e-5))


def _shape(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> list[int] | None:
    """What a node reshapes to; None where it is no reshape, or not to a constant."""
    if node.op_type != "Reshape" or node.input[1] not in tensors:
        return None
    tensor = tensors[node.input[1]]
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    return [int(size) for size in numpy_helper.to_array(tensor)]
