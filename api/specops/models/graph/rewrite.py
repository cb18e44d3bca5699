"""Turns a decoder's graph, as it was exported, into the graph that the engine runs.

An export follows ONNX Runtime's contract: its inputs are one row of tokens, a mask and the past
keys and values, and it gives the present ones. The engine runs a flat batch of tokens of any
requests over a KV cache in blocks. So GroupQueryAttention becomes `specops.Attention`; the mask,
the pasts and all nodes that only feed them go. A short convolution or a recurrence over whole
sequences becomes one that goes on after what is kept of a slot's tokens.

Inputs of the new graph: `input_ids` int64 [1, T]; `position_ids` int64 [1, T], if positions are
learned or rotated outside of attention; `spans` int64 [S, 3]; `block_tables` int64 [slots, blocks];
`cache` int64 [4]; `logit_rows` int64 [L]; with layers without attention `kept_inputs` int64 [5],
and if these have states `progress` int64 [S, 2]; where the last layers read the keys and values of
others `logit_spans` int64 [S, 3], the spans of the rows `logit_rows`: no other token goes through
these layers. Outputs: `logits` float32 [1, L, vocabulary], and `hidden` float32 [1, L, size], the
last hidden state, which is the input of the product that gives the logits. Where there is `hidden`,
`scored_rows` int64 [N] are places in `logit_rows`: the logits are theirs alone, [1, N, vocabulary].
An output that the caller does not ask for costs nothing. For a draft head there are also
`state_rows` int64 [R] and `states` float32 [1, R, size of all]: what enters some layers. For the
model's own MTP block there are instead `final_rows` int64 [R] and `states` [1, R, size], the last
hidden states of these tokens; `logit_rows` then are places in `final_rows`.

A draft head's own graph takes the tokens and `states` float32 [1, T, size], and gives
`next_states` float32 [1, L, size], which take the place of `states` for its next guess.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.contract import FUSED, GGUF_GATHER, GGUF_MATMUL
from specops.models.graph.head_norms import NORM_INPUTS, move_head_norms
from specops.models.graph.nodes import (
    ATTENTION,
    RefusedGraphError,
    attributes_of,
    input_of,
    named,
    trimmed,
)
from specops.models.graph.outputs import (
    CONTROL,
    LOGIT_ROWS,
    RECURRENCE,
    declare,
    gather_logit_rows,
    keep_what_gives_logits,
    output_final_states,
    output_states,
)
from specops.models.graph.tokenwise import check_tokenwise
from specops.runtime import kernels
from specops.runtime.layer_shapes import (
    Attention,
    GatedDelta,
    LayerShape,
    Recurrent,
    SharedAttention,
    ShortConv,
    StateSpace,
)

# Of the engine's own operators that exports may have, in their form over whole sequences: their
# inputs, and the further ones over the spans of a pass.
_RECURRENCES = {
    kernels.SHORT_CONV: (3, ("spans", "kept_inputs")),
    kernels.GATED_DELTA: (7, ("spans", "progress", "kept_inputs")),
    kernels.STATE_SPACE: (6, ("spans", "progress", "kept_inputs")),
}

# GroupQueryAttention's inputs by place, and the values that they may have
_PAST_KEY, _PAST_VALUE = 3, 4
_COS, _SIN, _POSITIONS = 7, 8, 9
_UNKNOWN_INPUTS = {10: "an attention bias", 11: "attention sinks", 12: "a quantized cache"}
_UNKNOWN_INPUTS[13] = _UNKNOWN_INPUTS[12]
_READ_ATTRIBUTES = {
    *("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size"),
    *("do_rotary", "rotary_interleaved", "qk_norm_epsilon"),
}
_HARMLESS: dict[str, tuple[Any, ...]] = {  # attributes that have no effect at these values
    "smooth_softmax": (-1, 0),
    "qk_output": (0,),
    "causal": (1,),
    "kv_cache_bit_width": (0,),
    "k_quant_type": (b"NONE",),
    "v_quant_type": (b"NONE",),
    "sliding_window_cache": (0,),
}


def rewrite(
    model: onnx.ModelProto, states: Sequence[int] = (), *, final: bool = False
) -> list[LayerShape]:
    """Rewrite a graph in place, without reading its weights.

    Args:
        model: the graph.
        states: the layers whose inputs become an output, see `output_states`.
        final: whether the last states become that output, see `output_final_states`.

    Returns:
        What each layer keeps of tokens.

    Raises:
        RefusedGraphError: the engine does not understand a node; the message names it and says why.
    """
    graph = model.graph
    _refuse_own_operators(model)
    _constants_to_initializers(graph)
    move_head_norms(graph)
    attention = _replace_attention(graph)
    recurrent = _replace_recurrences(graph)
    keep_what_gives_logits(graph)
    check_tokenwise(graph, (*CONTROL, *RECURRENCE, LOGIT_ROWS))
    if states:
        output_states(graph, states)
    if final:
        output_final_states(graph)
    else:
        shared = {name for name, kept in attention.items() if isinstance(kept, SharedAttention)}
        # A draft head may read states of all tokens in these layers, too.
        gather_logit_rows(graph, reading=() if states else shared)
    declare(graph)
    if all(opset.domain != kernels.DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(kernels.DOMAIN, 1))
    kept = attention | recurrent
    return [kept[node.output[0]] for node in graph.node if node.output[0] in kept]


def is_fusion(model: onnx.ModelProto) -> bool:
    """Return whether a graph joins states for a draft head; it has no cache and runs as it is.

    Raises:
        RefusedGraphError: the head has nodes that no export has.
    """
    if [item.name for item in model.graph.output] != [FUSED]:
        return False
    _refuse_own_operators(model)
    return True


def _refuse_own_operators(model: onnx.ModelProto) -> None:
    """Refuse the engine's own operators in an export: they trust the cache address in their input.

    Functions and graphs in a node's attribute are refused too, since they could hide such
    operators. Three things are allowed: graphs that only choose between tensors
    (`_rotary_tables`), the operators for a GGUF's weights, which nothing runs as they are, and
    recurrences over whole sequences, which have no such input.
    """
    for node in model.graph.node:
        harmless = node.op_type in (GGUF_GATHER, GGUF_MATMUL) or _is_whole(node)
        if node.domain == kernels.DOMAIN and not harmless:
            raise RefusedGraphError(f"{named(node)} is an operator of the engine's own")
        graphs = [graph for item in node.attribute for graph in (item.g, *item.graphs)]
        inner = [item for graph in graphs for item in graph.node]
        if any(item.op_type != "Identity" or item.domain or item.attribute for item in inner):
            raise RefusedGraphError(f"{named(node)} has a graph of its own")
    if model.functions:
        raise RefusedGraphError(f"it defines a function, {model.functions[0].name}")


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Make constants weights, and remove weights from the inputs, where they could be replaced."""
    for node in list(graph.node):
        if node.op_type == "Constant" and not node.domain:
            (name, value), *_ = attributes_of(node).items()
            if name != "value":  # value_int, value_floats and so on
                kind = TensorProto.FLOAT if name.startswith("value_float") else TensorProto.INT64
                dims, values = ([len(value)], value) if name.endswith("s") else ([], [value])
                value = helper.make_tensor("", kind, dims, values)
            value.name = node.output[0]
            graph.initializer.append(value)
            graph.node.remove(node)
    constants = {tensor.name for tensor in graph.initializer}
    for item in list(graph.input):
        if item.name in constants:
            graph.input.remove(item)


# -- attention -------------------------------------------------------------------------------------


def _replace_attention(graph: onnx.GraphProto) -> dict[str, LayerShape]:
    """Replace attention; returns what each layer keeps, by the name of its output.

    A layer with exactly the keys and values of an earlier layer reads the earlier layer's.
    """
    found = [node for node in graph.node if node.op_type == ATTENTION]
    if not found:
        raise RefusedGraphError(
            "it has no node GroupQueryAttention, which is what attention is in exports of this "
            "project and of onnxruntime-genai"
        )
    shapes: dict[str, LayerShape] = {}
    pasts: set[str] = set()
    cache: dict[tuple[Any, ...], Attention] = {}  # its layers, by the written tensors
    numbers: list[int] = []
    for node in found:
        _check_attention(graph, node, pasts)
        shape, written = _cache_shape(graph, node), _written(node)
        shared = written in cache
        cache.setdefault(written, shape)
        numbers.append(list(cache).index(written))
        shapes[node.output[0]] = SharedAttention(numbers[-1]) if shared else shape
    for node, number in zip(found, numbers, strict=True):
        reads = isinstance(shapes[node.output[0]], SharedAttention)
        node.CopyFrom(_attention(graph, node, number, list(cache.values()), reads=reads))
    return shapes


def _written(node: onnx.NodeProto) -> tuple[Any, ...]:
    """Return what identifies the keys and values that a layer writes."""
    if not node.input[1]:  # they are one tensor with the queries
        return (node.output[0],)
    places, given = (1, 2, _COS, _SIN, NORM_INPUTS[1], NORM_INPUTS[2]), attributes_of(node)
    keys = "do_rotary", "rotary_interleaved", "qk_norm_epsilon", "kv_num_heads"
    return *(input_of(node, place) for place in places), *(given.get(key) for key in keys)


def _is_whole(node: onnx.NodeProto) -> bool:
    """Whether a node is a recurrence over whole sequences, without the engine's inputs."""
    most, _ = _RECURRENCES.get(node.op_type, (0, ()))
    return node.domain == kernels.DOMAIN and 0 < len(node.input) <= most


def _replace_recurrences(graph: onnx.GraphProto) -> dict[str, LayerShape]:
    """Let recurrences go on after earlier passes; returns what each keeps, by its output's name."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    found = {node.output[0]: node for node in graph.node if _is_whole(node)}
    shapes = {name: _recurrence(node, weights) for name, node in found.items()}
    total = sum(shape.ring_floats_per_token for shape in shapes.values())
    state_total = sum(shape.state_floats for shape in shapes.values())
    first = state_first = 0
    for name, node in found.items():
        shape, given = shapes[name], attributes_of(node)
        given |= {"first": first, "total": total}
        if shape.state_floats:
            given |= {"state_first": state_first, "state_total": state_total}
        first, state_first = first + shape.ring_floats_per_token, state_first + shape.state_floats
        count, more = _RECURRENCES[node.op_type]
        operands = [*node.input, *[""] * (count - len(node.input)), *more]
        made = helper.make_node(
            node.op_type, operands, [name], node.name or name, domain=kernels.DOMAIN, **given
        )
        node.CopyFrom(made)
    return dict(shapes)


def _recurrence(node: onnx.NodeProto, weights: Mapping[str, TensorProto]) -> Recurrent:
    """Return the sizes of a recurrence, from its weights."""

    def dims(place: int, rank: int, what: str) -> Sequence[int]:
        weight = weights.get(input_of(node, place))
        known = weight is not None and weight.data_type == TensorProto.FLOAT
        if weight is None or not known or len(weight.dims) != rank or not all(weight.dims):
            raise RefusedGraphError(f"{named(node)} has no {what} of float32")
        return list(weight.dims)

    if node.op_type == kernels.SHORT_CONV:
        taps, channels = dims(1, 2, "weight [taps, channels]")
        return ShortConv(channels, taps)
    given = attributes_of(node)
    if node.op_type == kernels.STATE_SPACE:
        (heads,), state_size = dims(3, 1, "decay [heads]"), given["state_size"]
        size = given["state_total"] // (heads * state_size)
        alone = StateSpace(heads, 0, size, state_size).ring_floats_per_token
        return StateSpace(heads, (given["total"] - alone) // state_size, size, state_size)
    (heads,), (size,) = dims(4, 1, "decay [heads]"), dims(6, 1, "norm [value_size]")
    key_size = given["state_total"] // (heads * size)
    return GatedDelta(given["key_heads"], heads, key_size, size)


def _check_attention(graph: onnx.GraphProto, node: onnx.NodeProto, pasts: set[str]) -> None:
    """Refuse what `specops.Attention` cannot do; add the layer's pasts to `pasts`."""
    for place, what in _UNKNOWN_INPUTS.items():
        if input_of(node, place):
            raise RefusedGraphError(f"{named(node)} has {what}, input {place}")
    if (positions := input_of(node, _POSITIONS)) not in ("", "position_ids"):
        raise RefusedGraphError(f"{named(node)} takes its positions from {positions}")
    for key, value in attributes_of(node).items():
        if key not in _READ_ATTRIBUTES and value not in _HARMLESS.get(key, ()):
            raise RefusedGraphError(f"{named(node)} has the attribute {key}={value!r}")
    inputs = {item.name for item in graph.input}
    for place in (_PAST_KEY, _PAST_VALUE):
        past = input_of(node, place)
        if past not in inputs or past in pasts:
            raise RefusedGraphError(
                f"{named(node)} has no past of its own among the graph's inputs"
            )
        pasts.add(past)
    presents = set(node.output[1:]) - {""}
    for other in graph.node:
        if used := presents.intersection(other.input):
            raise RefusedGraphError(f"{named(other)} reads the cache, {used.pop()}")


def _cache_shape(graph: onnx.GraphProto, node: onnx.NodeProto) -> Attention:
    """Return the number of key heads and their size, from the declared input for past keys."""
    past = next(item for item in graph.input if item.name == node.input[_PAST_KEY])
    dims = [dim.dim_value for dim in past.type.tensor_type.shape.dim]
    if past.type.tensor_type.elem_type != TensorProto.FLOAT:
        raise RefusedGraphError(
            f"the input {past.name} is not float32: the graph was made for a GPU, and there is "
            "often one for CPUs next to it"
        )
    if len(dims) != 4 or dims[1] != attributes_of(node)["kv_num_heads"] or dims[3] < 1:
        raise RefusedGraphError(
            f"the input {past.name} does not say the cache's heads and their size"
        )
    return Attention(dims[1], dims[3])


def _attention(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    number: int,
    cache: Sequence[Attention],
    *,
    reads: bool,
) -> onnx.NodeProto:
    """Return the same attention over the KV cache in blocks, as its layer `number`.

    If it `reads`, an earlier node has written the keys and values.
    """
    given = attributes_of(node)
    rotary = [input_of(node, place) for place in (_COS, _SIN)]
    rotary, long_rotary = _rotary_tables(graph, rotary if given.get("do_rotary") else ["", ""])
    turns = [_frequencies(graph, *pair) for pair in (rotary, long_rotary)]
    rotary, long_rotary = (
        turn.operands if turn else pair
        for turn, pair in zip(turns, (rotary, long_rotary), strict=True)
    )
    norms = [input_of(node, place) for place in NORM_INPUTS.values()]
    for what, pair in (
        ("a rotary table", rotary[:1] * 2 if turns[0] else rotary),
        ("a rotary table", long_rotary[:1] * 2 if turns[1] else long_rotary),
        ("norms of queries and keys", norms[:2]),
        ("norms of values", norms[2:] * 2),
    ):
        if bool(pair[0]) != bool(pair[1]) or not _are_floats(graph, filter(None, pair)):
            raise RefusedGraphError(
                f"{named(node)} has {what} that is not a pair of float32 weights"
            )
    if given.get("do_rotary") and not rotary[0]:
        raise RefusedGraphError(f"{named(node)} rotates without a table")
    projections = node.input[:3]
    if reads:
        projections, norms = [node.input[0], "", ""], [norms[0], "", ""]
    return helper.make_node(
        kernels.ATTENTION,
        trimmed(*projections, *CONTROL, *rotary, *norms[:2], *long_rotary, norms[2]),
        [node.output[0]],
        name=node.name or node.output[0],
        domain=kernels.DOMAIN,
        layer=number,
        num_heads=given["num_heads"],
        kv_num_heads=[shape.kv_heads for shape in cache],
        head_size=[shape.head_size for shape in cache],
        rotary_interleaved=given.get("rotary_interleaved", 0),
        rotary_factor=turns[0].factor if turns[0] else 1.0,
        rotary_within=turns[0].positions if turns[0] and turns[1] else 0,
        window=max(0, given.get("local_window_size", -1)),
        scale=float(given.get("scale", 0.0) or cache[number].head_size ** -0.5),
        softcap=float(given.get("softcap", 0.0)),
        epsilon=float(given.get("qk_norm_epsilon", 1e-6)),
    )


def _rotary_tables(graph: onnx.GraphProto, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the cos and sin tables, and the ones that replace them in longer contexts, if any.

    Our exports choose by `If(total_length > positions of the first table)`, because LongRoPE reads
    long prompts with other frequencies. Each branch's nodes are identities of its two tables.
    """
    alone = names, ["", ""]
    makers = {name: node for node in graph.node for name in node.output}
    choice = makers.get(names[0])
    if choice is None or choice.op_type != "If" or list(choice.output) != names:
        return alone
    branches = attributes_of(choice)
    long, short = (
        [node.input[0] for node in branches[key].node if node.op_type == "Identity"]
        for key in ("then_branch", "else_branch")
    )
    asked = makers.get(choice.input[0])
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    if not len(long) == len(short) == 2 or asked is None or asked.op_type != "Greater":
        return alone
    turn, most = _frequencies(graph, *short), tensors.get(asked.input[1])
    if turn is None or most is None or numpy_helper.to_array(most) != turn.positions:
        return alone
    return short, long


class _Turn(NamedTuple):
    """A rotation by frequencies: attention's operands, and the tables that they replace."""

    operands: list[str]
    positions: int
    factor: float


def _frequencies(graph: onnx.GraphProto, cos: str, sin: str) -> _Turn | None:
    """Return the rotation of a pair of tables that our exports compute; None: it is another pair.

    They are cos and sin of Unsqueeze(Range(0, positions, 1)) * frequencies, times a factor.
    """
    makers = {name: node for node in graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    found = set[tuple[str, ...]]()
    for name, function in ((cos, "Cos"), (sin, "Sin")):
        names = [name]
        for op in ("Mul", function, "Mul", "Unsqueeze", "Range"):
            node = makers.get(names[0])
            if node is None or (node.domain, node.op_type) != ("", op):
                return None
            names = [*node.input, *names[1:]]
        found.add(tuple(names))
    if len(found) > 1:
        return None
    start, stop, step, _, frequencies, factor = found.pop()
    numbers = [numpy_helper.to_array(tensors[name]).item() for name in (start, stop, step, factor)]
    if (numbers[0], numbers[2]) != (0, 1):
        return None
    return _Turn([frequencies, ""], int(numbers[1]), numbers[3])


def _are_floats(graph: onnx.GraphProto, names: Iterable[str]) -> bool:
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    return all(kinds.get(name) == TensorProto.FLOAT for name in names)
