"""Checks that a graph computes each token by itself, except in attention.

Only then may several requests share a pass, and may the graph leave out the tokens that need no
logits after the last attention. Every operator that a graph may use has a rule here; the rule
follows the axis of tokens. A node of any other operator is refused by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, numpy_helper

from specops.models.contract import GGUF_GATHER, GGUF_MATMUL, MICROSOFT, STATES
from specops.models.graph.nodes import (
    DEFAULT_DOMAINS,
    MIXING,
    RefusedGraphError,
    attributes_of,
    named,
)
from specops.runtime import kernels

_TOKENS_AXIS = 1


@dataclass(frozen=True, slots=True)
class _Constant:
    """A weight, or a result of weights alone; `dims` is None if they are not known."""

    dims: tuple[int, ...] | None
    tensor: TensorProto | None = None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A number, vector or array for every token: [1, tokens, ...] of `rank` dimensions."""

    rank: int


_Operands = Sequence[_Constant | _Tokens | None]
# A rule checks a node's operands and returns the rank of its outputs, which are one per token.
_Rule = Callable[[onnx.NodeProto, _Operands], int]


class _RuleError(Exception):
    """A node breaks its operator's rule; the message says how."""


def check_tokenwise(graph: onnx.GraphProto, control: Sequence[str]) -> None:
    """Follow the tokens from `input_ids` to `logits`.

    Args:
        graph: its attention nodes are the engine's, and its nodes can run in their order.
        control: names of inputs that only attention and its like may read.

    Raises:
        RefusedGraphError: a node mixes tokens or has no rule, or the graph is not a decoder.
    """
    values: dict[str, _Constant | _Tokens] = {
        tensor.name: _Constant(tuple(tensor.dims), tensor) for tensor in graph.initializer
    }
    for item in graph.input:
        if item.name in ("input_ids", "position_ids"):
            if item.type.tensor_type.elem_type != TensorProto.INT64:
                raise RefusedGraphError(f"its input {item.name} is not int64")
            values[item.name] = _Tokens(2)
        elif item.name == STATES:  # of a draft head: a vector for each token
            values[item.name] = _Tokens(3)
    for node in graph.node:
        attends = node.domain == kernels.DOMAIN and node.op_type in MIXING
        operands: list[_Constant | _Tokens | None] = []
        for name in node.input:
            if attends and name in control:
                continue
            if name and name not in values:
                raise RefusedGraphError(
                    f"{named(node)} reads {name}, which is neither a weight nor follows from tokens"
                )
            operands.append(values.get(name))
        try:
            made = _output(node, operands, attends=attends)
        except _RuleError as reason:
            raise RefusedGraphError(
                f"{named(node)} cannot be part of a pass over several requests' tokens: {reason}"
            ) from None
        values.update(dict.fromkeys(filter(None, node.output), made))
    if values.get("logits") != _Tokens(3):
        raise RefusedGraphError("its logits are not [1, tokens, vocabulary]")


def _output(node: onnx.NodeProto, operands: _Operands, *, attends: bool) -> _Constant | _Tokens:
    if attends:
        _the_only_tokens(operands[: MIXING[node.op_type]], 3)
        return _Tokens(3)
    if operands and all(isinstance(value, _Constant) for value in operands if value):
        return _folded(node, operands[0])
    domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
    rule = _RULES.get((domain, node.op_type))
    if rule is None:
        raise _RuleError("it may not compute each token by itself")
    return _Tokens(rule(node, operands))


def _folded(node: onnx.NodeProto, first: _Constant | _Tokens | None) -> _Constant:
    """Return the result of weights alone."""
    dims = first.dims if isinstance(first, _Constant) else None
    if node.op_type == "Transpose" and dims is not None:
        perm = attributes_of(node).get("perm", range(len(dims))[::-1])
        return _Constant(tuple(dims[axis] for axis in perm))
    keeps_shape = node.op_type in ("Cast", "Identity", "DequantizeLinear")
    return _Constant(dims if keeps_shape else None)


# -- the rules -------------------------------------------------------------------------------------


def _elementwise(node: onnx.NodeProto, operands: _Operands) -> int:
    """Each element by itself; a weight must be the same for every token."""
    ranks = {value.rank for value in operands if isinstance(value, _Tokens)}
    if len(ranks) > 1:
        raise _RuleError("its operands have different numbers of dimensions")
    (rank,) = ranks
    for value in operands:
        if isinstance(value, _Constant):
            if value.dims is None:
                raise _RuleError("a weight's shape is not known")
            leading = value.dims[: max(0, len(value.dims) - (rank - _TOKENS_AXIS - 1))]
            if len(value.dims) > rank or any(size != 1 for size in leading):
                raise _RuleError("a weight differs between tokens")
    return rank


def _norm(node: onnx.NodeProto, operands: _Operands) -> int:
    """Along one axis, with or without weights; this includes a softmax."""
    rank = _tokens(operands[0]).rank
    _all_constant(operands[1:])
    return _behind_tokens([attributes_of(node).get("axis", -1)], rank)


def _skip_norm(node: onnx.NodeProto, operands: _Operands) -> int:
    _the_only_tokens(operands[:2], 3)
    _all_constant(operands[2:])
    return 3


def _embedding(node: onnx.NodeProto, operands: _Operands) -> int:
    """Rows of a table, one for each token's id."""
    given = attributes_of(node)
    table, indices = operands[0], _tokens(operands[1])
    _all_constant([table, *operands[2:]])
    rows = given.get("axis", given.get("gather_axis", 0)) == 0 and indices.rank == 2
    if not rows or not isinstance(table, _Constant) or len(table.dims or ()) != 2:
        raise _RuleError("it does not look up rows of a table")
    return 3


def _product(node: onnx.NodeProto, operands: _Operands) -> int:
    rank = _tokens(operands[0]).rank
    _all_constant(operands[1:])
    weight = operands[1]
    if node.op_type == "MatMul" and isinstance(weight, _Constant) and len(weight.dims or ()) != 2:
        raise _RuleError("its weight is not a matrix")
    if rank < 3:
        raise _RuleError("its tokens have no vectors")
    return rank


def _rotary(node: onnx.NodeProto, operands: _Operands) -> int:
    if _tokens(operands[0]).rank != 3 or _tokens(operands[1]).rank != 2:
        raise _RuleError("it does not rotate one vector per token")
    if attributes_of(node).get("is_packed_batching"):
        raise _RuleError("its tokens are packed")
    _all_constant(operands[2:])
    return 3


def _split(node: onnx.NodeProto, operands: _Operands) -> int:
    return _behind_tokens([attributes_of(node).get("axis", 0)], _tokens(operands[0]).rank)


def _concat(node: onnx.NodeProto, operands: _Operands) -> int:
    rank = _tokens(operands[0]).rank
    _the_only_tokens(operands, rank)
    return _behind_tokens([attributes_of(node)["axis"]], rank)


def _slice(node: onnx.NodeProto, operands: _Operands) -> int:
    rank = _tokens(operands[0]).rank
    _all_constant(operands[1:])
    return _behind_tokens(_integers(operands, 3), rank)


def _reshape(node: onnx.NodeProto, operands: _Operands) -> int:
    _tokens(operands[0])
    shape = _integers(operands, 1)
    if attributes_of(node).get("allowzero") or shape[:2] not in ([0, 0], [1, 0]):
        raise _RuleError("the new shape does not begin with 0, 0: rows and tokens as they are")
    return len(shape)


def _transpose(node: onnx.NodeProto, operands: _Operands) -> int:
    if list(attributes_of(node).get("perm", ()))[:2] != [0, 1]:
        raise _RuleError("it moves the token axis")
    return _tokens(operands[0]).rank


def _reduce(node: onnx.NodeProto, operands: _Operands) -> int:
    given = attributes_of(node)
    axes = _integers(operands, 1) if len(operands) > 1 else list(given.get("axes", ()))
    rank = _behind_tokens(axes, _tokens(operands[0]).rank)
    return rank if given.get("keepdims", 1) else rank - len(axes)


# -- conditions on operands ------------------------------------------------------------------------


def _tokens(value: _Constant | _Tokens | None) -> _Tokens:
    if not isinstance(value, _Tokens):
        raise _RuleError("an operand has no token axis")
    return value


def _the_only_tokens(operands: _Operands, rank: int) -> None:
    if any(value != _Tokens(rank) for value in operands if value is not None):
        raise _RuleError(f"not all of its operands have tokens and {rank} dimensions")


def _all_constant(operands: _Operands) -> None:
    if any(isinstance(value, _Tokens) for value in operands):
        raise _RuleError("an operand that should be a weight depends on the tokens")


def _behind_tokens(axes: Sequence[int], rank: int) -> int:
    """Check that all axes come after the axis of tokens; return `rank`."""
    if not axes or any(axis % rank <= _TOKENS_AXIS for axis in axes):
        raise _RuleError("it goes along the token axis")
    return rank


def _integers(operands: _Operands, place: int) -> list[int]:
    """Return the values of an operand that must be a constant of integers in the graph itself."""
    value = operands[place] if len(operands) > place else None
    tensor = value.tensor if isinstance(value, _Constant) else None
    if (
        tensor is None
        or tensor.data_location == TensorProto.EXTERNAL
        or tensor.data_type not in (TensorProto.INT64, TensorProto.INT32)
    ):
        raise _RuleError(f"its input {place} is not a constant")
    return [int(number) for number in numpy_helper.to_array(tensor).reshape(-1)]


_ELEMENTWISE = (
    *("Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish"),
    *("Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow"),
    *("Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Swish"),
    *("Tanh", "Where"),
)
_RULES: dict[tuple[str, str], _Rule] = {
    **{("", op): _elementwise for op in _ELEMENTWISE},
    **{(MICROSOFT, op): _elementwise for op in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")},
    **{("", op): _reduce for op in ("ReduceMax", "ReduceMean", "ReduceSum", "ReduceSumSquare")},
    ("", "LayerNormalization"): _norm,
    ("", "RMSNormalization"): _norm,
    ("", "SimplifiedLayerNormalization"): _norm,  # onnxruntime's, and yet in the default domain
    (MICROSOFT, "SkipLayerNormalization"): _skip_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_norm,
    ("", "Gather"): _embedding,
    (MICROSOFT, "GatherBlockQuantized"): _embedding,
    (kernels.DOMAIN, GGUF_GATHER): _embedding,
    ("", "MatMul"): _product,
    (MICROSOFT, "MatMulNBits"): _product,
    (kernels.DOMAIN, GGUF_MATMUL): _product,
    (MICROSOFT, "RotaryEmbedding"): _rotary,
    ("", "Split"): _split,
    ("", "Concat"): _concat,
    ("", "Slice"): _slice,
    ("", "Reshape"): _reshape,
    ("", "Transpose"): _transpose,
    ("", "Softmax"): _norm,
}
