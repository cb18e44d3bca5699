"""Turns a decoder's graph, as it was exported, into the one that the engine runs.

Exports speak onnxruntime's contract: one row of tokens, a mask, a past that goes in and a present
that comes out. The engine runs a flat batch of tokens of any requests over a cache of blocks. So
GroupQueryAttention becomes `specops.Attention`, and the mask, the pasts and all that only fed them
go. What the graph then gives is `outputs`' business.

Inputs: `input_ids` int64 [1, T], where positions are learned or rotated outside of attention
`position_ids` int64 [1, T], `spans` int64 [S, 3], `block_tables` int64 [slots, blocks], `cache`
int64 [4], `logit_rows` int64 [L]. Outputs: `logits` float32 [1, L, vocabulary], and `hidden`
float32 [1, L, size], which the product that gives the logits reads: the last hidden state. An
output that is not asked for costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.graph.head_norms import take_norms_in
from specops.models.graph.outputs import (
    CONTROL,
    LOGIT_ROWS,
    declare,
    gather_logit_rows,
    keep_what_gives_logits,
)
from specops.models.graph.tokenwise import RefusedGraphError, attributes_of, check_tokenwise, named
from specops.runtime import kernels

_ATTENTION = "GroupQueryAttention"
_LOGITS_START = "logits_start"  # exports of format 2 cut the tokens that get logits at it

# GroupQueryAttention's inputs by place, and what may stand there
_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE = range(5)
_COS, _SIN, _POSITIONS, _Q_NORM, _K_NORM = 7, 8, 9, 14, 15
_UNKNOWN_INPUTS = {10: "an attention bias", 11: "attention sinks", 12: "a quantized cache"}
_UNKNOWN_INPUTS[13] = _UNKNOWN_INPUTS[12]
_READ_ATTRIBUTES = {
    *("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size"),
    *("do_rotary", "rotary_interleaved", "qk_norm_epsilon"),
}
_HARMLESS: dict[str, tuple[Any, ...]] = {  # attributes that say nothing as long as they are these
    "smooth_softmax": (-1, 0),
    "qk_output": (0,),
    "causal": (1,),
    "kv_cache_bit_width": (0,),
    "k_quant_type": (b"NONE",),
    "v_quant_type": (b"NONE",),
    "sliding_window_cache": (0,),
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the KV cache of a graph follows from."""

    layers: int
    kv_heads: int
    head_size: int


def rewrite(model: onnx.ModelProto) -> AttentionShape:
    """Rewrite a graph in place; its weights are not looked at.

    Raises:
        RefusedGraphError: a node is not understood; the message names it and says why.
    """
    graph = model.graph
    _refuse_own_operators(model)
    _constants_to_initializers(graph)
    _drop_logits_start(graph)
    take_norms_in(graph)
    shape = _replace_attention(graph)
    keep_what_gives_logits(graph)
    check_tokenwise(graph, (*CONTROL, LOGIT_ROWS))
    gather_logit_rows(graph)
    declare(graph)
    if all(opset.domain != kernels.DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(kernels.DOMAIN, 1))
    return shape


def is_head(model: onnx.ModelProto) -> bool:
    """Whether a graph is a draft head's, which is run as it is: it has no cache.

    Raises:
        RefusedGraphError: it has nodes that no export has.
    """
    if [item.name for item in model.graph.output] != ["logits", "next_states"]:
        return False
    _refuse_own_operators(model)
    return True


def _refuse_own_operators(model: onnx.ModelProto) -> None:
    """Refuse the engine's operators in an export: they trust the cache's address.

    And whatever they could hide in: functions, and graphs that are a node's attribute, unless these
    only choose between tensors (`_rotary_tables`).
    """
    for node in model.graph.node:
        if node.domain == kernels.DOMAIN:
            raise RefusedGraphError(f"{named(node)} is an operator of the engine's own")
        graphs = [graph for item in node.attribute for graph in (item.g, *item.graphs)]
        inner = [item for graph in graphs for item in graph.node]
        if any(item.op_type != "Identity" or item.domain or item.attribute for item in inner):
            raise RefusedGraphError(f"{named(node)} has a graph of its own")
    if model.functions:
        raise RefusedGraphError(f"it defines a function, {model.functions[0].name}")


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Constants become weights like any other; a weight is no input, which could be overridden."""
    for node in list(graph.node):
        if node.op_type == "Constant" and not node.domain:
            (name, value), *_ = attributes_of(node).items()
            if name != "value":  # value_int, value_floats and so on
                kind = TensorProto.FLOAT if name.startswith("value_float") else TensorProto.INT64
                many = name.endswith("s")
                value = helper.make_tensor("", kind, [len(value)] if many else [], _list(value))
            value.name = node.output[0]
            graph.initializer.append(value)
            graph.node.remove(node)
    constants = {tensor.name for tensor in graph.initializer}
    for item in list(graph.input):
        if item.name in constants:
            graph.input.remove(item)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _drop_logits_start(graph: onnx.GraphProto) -> None:
    """The slices of format 2 give way to `logit_rows`."""
    renamed: dict[str, str] = {}
    for node in list(graph.node):
        if node.op_type == "Slice" and _LOGITS_START in node.input:
            renamed[node.output[0]] = node.input[0]
            graph.node.remove(node)
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)


# -- attention -------------------------------------------------------------------------------------


def _replace_attention(graph: onnx.GraphProto) -> AttentionShape:
    found = [place for place, node in enumerate(graph.node) if node.op_type == _ATTENTION]
    if not found:
        raise RefusedGraphError(
            "it has no node GroupQueryAttention, which is what attention is in exports of this "
            "project and of onnxruntime-genai"
        )
    shapes = set()
    pasts: set[str] = set()
    for layer, place in enumerate(found):
        node = graph.node[place]
        _check_attention(graph, node, pasts)
        kv_heads, head_size = _cache_shape(graph, node)
        shapes.add((kv_heads, head_size))
        graph.node[place].CopyFrom(_attention(graph, node, layer, len(found), head_size))
    if len(shapes) > 1:
        raise RefusedGraphError(
            f"its layers' caches differ, (heads, size of one): {sorted(shapes)}"
        )
    ((kv_heads, head_size),) = shapes
    return AttentionShape(len(found), kv_heads, head_size)


def _check_attention(graph: onnx.GraphProto, node: onnx.NodeProto, pasts: set[str]) -> None:
    """Refuse whatever the operator has no counterpart for; `pasts` collects the layers' inputs."""
    for place, what in _UNKNOWN_INPUTS.items():
        if _input(node, place):
            raise RefusedGraphError(f"{named(node)} has {what}, input {place}")
    if (positions := _input(node, _POSITIONS)) not in ("", "position_ids"):
        raise RefusedGraphError(f"{named(node)} takes its positions from {positions}")
    for key, value in attributes_of(node).items():
        if key not in _READ_ATTRIBUTES and value not in _HARMLESS.get(key, ()):
            raise RefusedGraphError(f"{named(node)} has the attribute {key}={value!r}")
    inputs = {item.name for item in graph.input}
    for place in (_PAST_KEY, _PAST_VALUE):
        past = _input(node, place)
        if past not in inputs or past in pasts:
            raise RefusedGraphError(
                f"{named(node)} has no past of its own among the graph's inputs"
            )
        pasts.add(past)
    presents = set(node.output[1:]) - {""}
    for other in graph.node:
        if used := presents.intersection(other.input):
            raise RefusedGraphError(f"{named(other)} reads the cache, {used.pop()}")


def _cache_shape(graph: onnx.GraphProto, node: onnx.NodeProto) -> tuple[int, int]:
    """Heads of keys and the size of one, as the input for the past has them."""
    past = next(item for item in graph.input if item.name == _input(node, _PAST_KEY))
    dims = [dim.dim_value for dim in past.type.tensor_type.shape.dim]
    if past.type.tensor_type.elem_type != TensorProto.FLOAT:
        raise RefusedGraphError(
            f"the input {past.name} is not float32: the graph was made for a GPU, and there is "
            "often one for CPUs beside it"
        )
    if len(dims) != 4 or dims[1] != attributes_of(node)["kv_num_heads"] or dims[3] < 1:
        raise RefusedGraphError(
            f"the input {past.name} does not say the cache's heads and their size"
        )
    return dims[1], dims[3]


def _attention(
    graph: onnx.GraphProto, node: onnx.NodeProto, layer: int, layers: int, head_size: int
) -> onnx.NodeProto:
    """The same attention over the cache of blocks."""
    given = attributes_of(node)
    rotary = [_input(node, place) for place in (_COS, _SIN)] if given.get("do_rotary") else ["", ""]
    rotary, long_rotary = _rotary_tables(graph, rotary)
    norms = [_input(node, place) for place in (_Q_NORM, _K_NORM)]
    for what, pair in (
        ("a rotary table", rotary),
        ("a rotary table", long_rotary),
        ("norms of queries and keys", norms),
    ):
        if bool(pair[0]) != bool(pair[1]) or not _are_floats(graph, filter(None, pair)):
            raise RefusedGraphError(f"{named(node)} has {what} that is no pair of float32 weights")
    if given.get("do_rotary") and not rotary[0]:
        raise RefusedGraphError(f"{named(node)} rotates without a table")
    operands = [_input(node, place) for place in (_QUERY, _KEY, _VALUE)]
    inputs = [*operands, *CONTROL, *rotary, *norms, *long_rotary]
    while not inputs[-1]:
        inputs.pop()
    return helper.make_node(
        kernels.ATTENTION,
        inputs,
        [node.output[0]],
        name=node.name or node.output[0],
        domain=kernels.DOMAIN,
        layer=layer,
        layers=layers,
        num_heads=given["num_heads"],
        kv_num_heads=given["kv_num_heads"],
        head_size=head_size,
        rotary_interleaved=given.get("rotary_interleaved", 0),
        window=max(0, given.get("local_window_size", -1)),
        scale=float(given.get("scale", 0.0) or head_size**-0.5),
        softcap=float(given.get("softcap", 0.0)),
        epsilon=float(given.get("qk_norm_epsilon", 1e-6)),
    )


def _rotary_tables(graph: onnx.GraphProto, names: list[str]) -> tuple[list[str], list[str]]:
    """cos and sin, and those that take their place in contexts beyond them, where there are such.

    Our exports choose by `If(total_length > positions of the first)`, as long prompts are read with
    other frequencies. What the branches give is found by the names of their only nodes' inputs.
    """
    producers = {name: node for node in graph.node for name in node.output}
    choice = producers.get(names[0])
    if choice is None or choice.op_type != "If" or list(choice.output) != names:
        return names, ["", ""]
    branches = attributes_of(choice)
    long, short = (
        [node.input[0] for node in branches[key].node if node.op_type == "Identity"]
        for key in ("then_branch", "else_branch")
    )
    asked = producers.get(choice.input[0])
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    known = len(long) == len(short) == 2 and tensors.keys() >= {*long, *short}
    if not known or asked is None or asked.op_type != "Greater":
        return names, ["", ""]
    most = tensors.get(asked.input[1])
    if most is None or numpy_helper.to_array(most) != tensors[short[0]].dims[0]:
        return names, ["", ""]
    return short, long


def _input(node: onnx.NodeProto, place: int) -> str:
    """The name of an input; empty where the node leaves it out."""
    return str(node.input[place]) if len(node.input) > place else ""


def _are_floats(graph: onnx.GraphProto, names: Iterable[str]) -> bool:
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    return all(kinds.get(name) == TensorProto.FLOAT for name in names)
