"""Checks that a graph computes each token by itself, attention apart.

Only then may tokens of several requests stand beside each other in a pass, and may the tokens that
need no logits be left out behind the last attention. Every operator that may stand in a graph has a
rule here, which follows where the axis of tokens is; what has none is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.folder import ModelError
from specops.runtime import kernels

MICROSOFT = "com.microsoft"
_DEFAULT_DOMAINS = ("", "ai.onnx")
_TOKENS_AXIS = 1


class RefusedGraphError(ModelError):
    """A graph with something in it that is not understood."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A weight, or what follows from weights alone; `dims` is None where they are not known."""

    dims: tuple[int, ...] | None
    tensor: TensorProto | None = None

    def integers(self) -> list[int] | None:
        """Its values, where it is small and integer."""
        if self.tensor is None or self.tensor.data_location == TensorProto.EXTERNAL:
            return None
        if self.tensor.data_type not in (TensorProto.INT64, TensorProto.INT32):
            return None
        return [int(value) for value in numpy_helper.to_array(self.tensor).reshape(-1)]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One value, vector or array for every token: [1, T, ...] of `rank` dimensions."""

    rank: int


Value = Constant | Tokens
Operands = Sequence[Value | None]
Rule = Callable[[onnx.NodeProto, Operands], Sequence[Value | None]]


class _RuleError(Exception):
    """A rule that does not hold; the message says what was met."""


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by their names."""
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def named(node: onnx.NodeProto) -> str:
    """How messages call a node."""
    domain = "" if node.domain in _DEFAULT_DOMAINS else f"{node.domain}."
    return f"node {node.name or node.output[0]} ({domain}{node.op_type})"


def check_tokenwise(graph: onnx.GraphProto, control: Sequence[str]) -> None:
    """Follow the tokens from `input_ids` to `logits`.

    Args:
        graph: with attention replaced; its nodes in an order in which they can run.
        control: inputs that only attention may read.

    Raises:
        RefusedGraphError: a node mixes tokens, or is not known; or this is no decoder.
    """
    values: dict[str, Value] = {
        tensor.name: Constant(tuple(tensor.dims), tensor) for tensor in graph.initializer
    }
    kinds = {item.name: item.type.tensor_type.elem_type for item in graph.input}
    for name in ("input_ids", "position_ids"):
        if name in kinds and kinds[name] != TensorProto.INT64:
            raise RefusedGraphError(f"its input {name} is not int64")
        if name in kinds:
            values[name] = Tokens(2)
    for node in graph.node:
        _follow(node, values, control)
    if values.get("logits") != Tokens(3):
        raise RefusedGraphError("its logits are not [1, tokens, vocabulary]")


def _follow(node: onnx.NodeProto, values: dict[str, Value], control: Sequence[str]) -> None:
    domain = "" if node.domain in _DEFAULT_DOMAINS else node.domain
    rule = _RULES.get((domain, node.op_type))
    attends = node.domain == kernels.DOMAIN and node.op_type == kernels.ATTENTION
    operands: list[Value | None] = []
    for name in node.input:
        if attends and name in control:
            continue
        if name and name not in values:
            raise RefusedGraphError(
                f"{named(node)} reads {name}, which is neither of a token nor a weight"
            )
        operands.append(values[name] if name else None)
    try:
        if attends:
            outputs: Sequence[Value | None] = _attention(node, operands)
        elif operands and all(isinstance(value, Constant) for value in operands if value):
            outputs = _folded(node, operands)
        elif rule is None:
            raise _RuleError("it is not known to compute each token by itself")
        else:
            outputs = rule(node, operands)
    except _RuleError as reason:
        raise RefusedGraphError(
            f"{named(node)} cannot stand in a pass over several requests' tokens: {reason}"
        ) from None
    for name, value in zip(node.output, outputs, strict=False):
        if name and value is not None:
            values[name] = value


# -- the rules: from a node's operands to its outputs ----------------------------------------------


def _attention(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    _the_only_tokens(operands[:3], 3)
    return [Tokens(3)]


def _folded(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    """What follows from weights alone is a weight."""
    first = operands[0]
    dims = first.dims if isinstance(first, Constant) else None
    if node.op_type == "Transpose" and dims is not None:
        perm = attributes_of(node).get("perm", range(len(dims))[::-1])
        return [Constant(tuple(dims[axis] for axis in perm))]
    keeps = node.op_type in ("Cast", "Identity", "DequantizeLinear")
    return [Constant(dims if keeps else None) for _ in node.output]


def _elementwise(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    """Element by element; weights are the same for every token."""
    ranks = {value.rank for value in operands if isinstance(value, Tokens)}
    if len(ranks) > 1:
        raise _RuleError("its operands have different numbers of dimensions")
    (rank,) = ranks
    for value in operands:
        if isinstance(value, Constant):
            _same_for_all_tokens(value, rank)
    return [Tokens(rank)]


def _same_for_all_tokens(value: Constant, rank: int) -> None:
    if value.dims is None:
        raise _RuleError("a weight's shape is not known")
    leading = value.dims[: max(0, len(value.dims) - (rank - _TOKENS_AXIS - 1))]
    if len(value.dims) > rank or any(size != 1 for size in leading):
        raise _RuleError("a weight differs between tokens")


def _norm(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    """Along one axis, with weights or without: a softmax, too."""
    rank = _tokens(operands[0]).rank
    _all_constant(operands[1:])
    _behind_tokens([attributes_of(node).get("axis", -1)], rank)
    return [Tokens(rank)]


def _skip_norm(node: onnx.NodeProto, operands: Operands) -> Sequence[Value | None]:
    """Outputs: the norm, two statistics that no node reads, the sum."""
    _the_only_tokens(operands[:2], 3)
    _all_constant(operands[2:])
    return [Tokens(3), None, None, Tokens(3)]


def _embedding(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    """Rows of a table at the tokens' numbers."""
    given = attributes_of(node)
    table, indices = operands[0], _tokens(operands[1])
    _all_constant([table, *operands[2:]])
    rows = given.get("axis", given.get("gather_axis", 0)) == 0 and indices.rank == 2
    if not rows or not isinstance(table, Constant) or len(table.dims or ()) != 2:
        raise _RuleError("it takes no rows of a table")
    return [Tokens(3)]


def _product(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    rank = _tokens(operands[0]).rank
    _all_constant(operands[1:])
    weight = operands[1]
    if node.op_type == "MatMul" and isinstance(weight, Constant) and len(weight.dims or ()) != 2:
        raise _RuleError("its weight is no matrix")
    if rank < 3:
        raise _RuleError("its tokens have no vectors")
    return [Tokens(rank)]


def _rotary(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    if _tokens(operands[0]).rank != 3 or _tokens(operands[1]).rank != 2:
        raise _RuleError("it does not rotate one vector per token")
    if attributes_of(node).get("is_packed_batching"):
        raise _RuleError("its tokens are packed")
    _all_constant(operands[2:])
    return [Tokens(3)]


def _split(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    rank = _tokens(operands[0]).rank
    _behind_tokens([attributes_of(node).get("axis", 0)], rank)
    return [Tokens(rank)] * len(node.output)


def _concat(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    rank = _tokens(operands[0]).rank
    _the_only_tokens(operands, rank)
    _behind_tokens([attributes_of(node)["axis"]], rank)
    return [Tokens(rank)]


def _slice(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    rank = _tokens(operands[0]).rank
    _all_constant(operands[1:])
    _behind_tokens(_integers(operands, 3), rank)
    return [Tokens(rank)]


def _reshape(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    _tokens(operands[0])
    shape = _integers(operands, 1)
    if attributes_of(node).get("allowzero") or shape[:2] not in ([0, 0], [1, 0]):
        raise _RuleError("the new shape does not begin with 0, 0: rows and tokens as they are")
    return [Tokens(len(shape))]


def _transpose(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    rank = _tokens(operands[0]).rank
    if list(attributes_of(node).get("perm", ()))[:2] != [0, 1]:
        raise _RuleError("it moves the axis of tokens")
    return [Tokens(rank)]


def _reduce(node: onnx.NodeProto, operands: Operands) -> Sequence[Value]:
    given = attributes_of(node)
    rank = _tokens(operands[0]).rank
    axes = _integers(operands, 1) if len(operands) > 1 else list(given.get("axes", ()))
    _behind_tokens(axes, rank)
    return [Tokens(rank if given.get("keepdims", 1) else rank - len(axes))]


# -- what they ask of operands ---------------------------------------------------------------------


def _tokens(value: Value | None) -> Tokens:
    if not isinstance(value, Tokens):
        raise _RuleError("an operand that should be the tokens' is none")
    return value


def _the_only_tokens(operands: Operands, rank: int) -> None:
    if any(value != Tokens(rank) for value in operands if value is not None):
        raise _RuleError(f"its operands are not all of tokens, with {rank} dimensions")


def _all_constant(operands: Operands) -> None:
    if any(isinstance(value, Tokens) for value in operands):
        raise _RuleError("an operand that should be a weight is the tokens'")


def _behind_tokens(axes: Sequence[int], rank: int) -> None:
    if not axes or any(axis % rank <= _TOKENS_AXIS for axis in axes):
        raise _RuleError("it goes along the axis of tokens")


def _integers(operands: Operands, place: int) -> list[int]:
    value = operands[place] if len(operands) > place else None
    found = value.integers() if isinstance(value, Constant) else None
    if found is None:
        raise _RuleError(f"its input {place} is no constant")
    return found


_ELEMENTWISE = (
    *("Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish"),
    *("Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow"),
    *("Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Swish"),
    *("Tanh", "Where"),
)
_RULES: dict[tuple[str, str], Rule] = {
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
    ("", "MatMul"): _product,
    (MICROSOFT, "MatMulNBits"): _product,
    (MICROSOFT, "RotaryEmbedding"): _rotary,
    ("", "Split"): _split,
    ("", "Concat"): _concat,
    ("", "Slice"): _slice,
    ("", "Reshape"): _reshape,
    ("", "Transpose"): _transpose,
    ("", "Softmax"): _norm,
}
