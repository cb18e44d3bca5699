"""Builds a decoder as an ONNX graph under the contract of onnxruntime-genai.

A family calls these methods in the order of its forward pass. Each weight is quantized and written
as soon as it is added, so only a slab of it is in memory at a time.

Inputs: `input_ids` [batch, sequence] int64, `attention_mask` [batch, total] int64, `position_ids`
[batch, sequence] int64 if a table has a row for each position, and `past_key_values.{l}.key|value`
[batch, kv_heads, capacity, head] float32. Outputs: `logits` [batch, sequence, vocab] float32 and
`present.{l}.key|value`, which are meant to share the buffers of the past. The mask may have zeros
on the right, so that its shape can stay the same between steps.

Any program that knows the contract can run the graph of a checkpoint. Only the engine can run that
of a GGUF: its weights are blocks as they are in the file, rows uint8 [N, bytes of a row], which two
operators of the domain `specops` read. `GgufMatMul(x, rows_1, ..., rows_n, bias)` multiplies with
all rows, whose columns stand side by side; its attributes are `types`, the file's number of each,
`K`, and `order_0` and so on where a matrix has other rows than its tensor; it may have no bias.
`GgufGather(rows, ids)` looks rows up; attributes are `type` and `K`. Rows may stay in the GGUF.
A checkpoint's table that is meant to stay on disk has such rows, too, in 8 bits.
`ShortConv`, `GatedDelta` and `StateSpace` of that domain, in graphs with such layers, compute whole
sequences.

The engine rewrites graphs (`specops.models.graph.rewrite`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specops.models.contract import GGUF_GATHER, GGUF_MATMUL, INT8_ACTIVATIONS, MICROSOFT
from specops.models.convert.calibration import Activations
from specops.models.convert.checkpoint import Matrix
from specops.models.convert.gguf.block_types import Q8_0
from specops.models.convert.model_config import ModelShape
from specops.models.convert.opset import model_of
from specops.models.convert.quantization import BlockFormat, Quantization
from specops.models.convert.rope import Rotary, Table
from specops.models.convert.weights import WeightStore
from specops.runtime.kernels import DOMAIN, SHORT_CONV
from specops.runtime.layer_shapes import Recurrent

Float = NDArray[np.float32]

_ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # QuickGelu is x * sigmoid(alpha * x): with alpha = 1 it is the fused kernel of SiLU.
    "silu": ("QuickGelu", {"domain": MICROSOFT, "alpha": 1.0}),
    "gelu_tanh": ("FastGelu", {"domain": MICROSOFT}),
    "sigmoid": ("Sigmoid", {}),
    "relu": ("Relu", {}),
}


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys, before they are rotated: weights [head]."""

    weights: tuple[Float, Float]
    epsilon: float


class DecoderGraph:
    """Collects the nodes of one decoder; methods take and return the names of tensors.

    Args of methods:
        name: of the node that is added, and of its output.
        x: name of the input [batch, sequence, size].
        y: name of another one, of the same shape.
        epsilon: of a norm.
        bias: [size] to add; None: nothing.

    Args:
        shape: of the model.
        quantization: the formats of weights.
        weights: the file that they are written to.
        activations: calibrates 4-bit weights on the inputs of their products; None: they are
            rounded alone.
    """

    def __init__(
        self,
        shape: ModelShape,
        quantization: Quantization,
        weights: WeightStore,
        activations: Activations | None = None,
    ) -> None:
        self.shape = shape
        self.quantization = quantization
        self._weights = weights
        self._activations = activations
        self._nodes: list[onnx.NodeProto] = []
        self._inputs = [
            _value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            _value("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        self._outputs = [
            _value("logits", TensorProto.FLOAT, ["batch", "sequence", shape.vocab_size])
        ]
        self._draw_lengths()

    def finish(self, name: str) -> onnx.ModelProto:
        """The finished model; its large initializers refer to the weight file."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, self._weights.initializers
        )
        return model_of(graph)

    def also_takes(self, name: str, size: int) -> None:
        """One more input: a vector [size] for each token."""
        self._inputs.append(_value(name, TensorProto.FLOAT, ["batch", "sequence", size]))

    def also_gives(self, name: str, x: str, size: int) -> None:
        """One more output: the vectors [size] of x.

        Args:
            size: of its vectors.
        """
        self._node("Identity", [x], name)
        self._outputs.append(_value(name, TensorProto.FLOAT, ["batch", "sequence", size]))

    def nodes_for(self, output: str) -> list[onnx.NodeProto]:
        """The nodes that one of their tensors depends on, but not the nodes of its inputs."""
        needed, kept = {output}, list[onnx.NodeProto]()
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.insert(0, node)
        return kept

    # -- element by element -------------------------------------------------------------------

    def activation(self, function: str, name: str, x: str) -> str:
        """`silu`, `gelu_tanh` (GELU by the approximation with tanh), `sigmoid` or `relu` of x.

        Args:
            function: one of the four.
        """
        op, attributes = _ACTIVATIONS[function]
        return self._node(op, [x], name, **attributes)

    def multiply(self, name: str, x: str, y: str) -> str:
        """x * y."""
        return self._node("Mul", [x, y], name)

    def add(self, name: str, x: str, y: str) -> str:
        """x + y."""
        return self._node("Add", [x, y], name)

    def concatenate(self, name: str, parts: list[str]) -> str:
        """Vectors side by side."""
        return self._node("Concat", parts, name, axis=-1)

    def split(self, name: str, x: str, sizes: list[int]) -> list[str]:
        """The parts of vectors, of these sizes.

        Args:
            sizes: they sum up to the input's.
        """
        parts = [f"{name}.{index}" for index in range(len(sizes))]
        self._node("Split", [x, self._integers(f"{name}.widths", *sizes)], *parts, axis=-1)
        return parts

    def part(self, name: str, x: str, start: int, stop: int) -> str:
        """Numbers [start, stop) of vectors.

        Args:
            start: the first number.
            stop: the number after the last one.
        """
        places = (("start", start), ("stop", stop), ("axis", -1))
        operands = [self._integers(f"{name}.{key}", place) for key, place in places]
        return self._node("Slice", [x, *operands], name)

    def scaled(self, name: str, x: str, factor: float) -> str:
        """x times a number.

        Args:
            factor: 1: no node is added.
        """
        if factor == 1:
            return x
        number = self._weights.constant(f"{name}.factor", np.array(factor, np.float32))
        return self._node("Mul", [x, number], name)

    # -- tables and products ------------------------------------------------------------------

    def embedding(self, matrix: Matrix) -> str:
        """The rows of `matrix` [vocab, hidden] at `input_ids`: [batch, sequence, hidden]."""
        bits = self.quantization.embedding_bits
        if bits == 32:
            return self._plain_rows("embedding", matrix, "input_ids")
        stored = BlockFormat(bits, self.quantization.block)
        codes, scales, zero_points = self._weights.table_blocks("embedding", matrix, stored)
        return self._node(
            "GatherBlockQuantized",
            [codes, "input_ids", scales, *([zero_points] if zero_points else [])],
            "embedding",
            domain=MICROSOFT,
            bits=stored.bits,
            block_size=stored.block,
            gather_axis=0,
            quantize_axis=1,
        )

    def learned_positions(self, matrix: Matrix) -> str:
        """The rows of `matrix` [context, hidden] at the positions, which become a graph input."""
        self._read_positions()
        return self._plain_rows("positions", matrix, "position_ids")

    def position_factors(self, name: str, factors: Float) -> str:
        """The number of `factors` [context] for each token's position: [batch, sequence, 1]."""
        self._read_positions()
        table = self._weights.constant(f"{name}.table", factors.reshape(-1, 1))
        return self._node("Gather", [table, "position_ids"], name, axis=0)

    def rows_on_disk(self, name: str, matrix: Matrix) -> str:
        """The rows of `matrix` at `input_ids`; no pass reads the others, so they stay on disk."""
        return self._plain_rows(name, matrix, "input_ids", blocks=self.quantization.bits != 32)

    def linear(
        self,
        name: str,
        x: str,
        matrix: Matrix,
        bias: Float | None = None,
        value_size: int | None = None,
        *,
        least_bits: int = 0,
    ) -> str:
        """x [batch, sequence, K] times the transpose of `matrix` [N, K], plus `bias` [N].

        `name` ends with `.qkv` for queries, keys and values together, with `.v` for values. The
        last rows of `.qkv` are the values'.

        Args:
            matrix: the weight [N, K].
            value_size: rows of `.qkv` that are values; None: as the model's shape says.
            least_bits: of weights that are few and matter much.
        """
        own, values = self.quantization.bits, self.quantization.value_bits
        if value_size is None:
            value_size = self.shape.num_kv_heads * self.shape.head_dim
        if name.endswith(".qkv") and values != own and value_size:
            before = matrix.shape[0] - value_size
            biases = (None, None) if bias is None else (bias[:before], bias[before:])
            (qk, v), stem = matrix.divided(before), name.removesuffix("qkv")
            both = [
                self.linear(f"{stem}qk", x, qk, biases[0]),
                self.linear(f"{stem}v", x, v, biases[1]),
            ]
            return self.concatenate(name, both)
        added = None if bias is None else self._weights.vector(f"{name}.bias", bias)
        bits = max(least_bits, values if name.endswith(".v") else own)
        return self._linear(name, x, matrix, bits, added)

    def head(
        self, x: str, matrix: Matrix, bias: Float | None = None, softcap: float | None = None
    ) -> None:
        """The graph's output `logits`: x times the transposed `matrix` [vocab, hidden], + bias.

        With a `softcap` they become softcap * tanh(logits / softcap).

        Args:
            matrix: the output rows [vocab, hidden].
            softcap: None: none.
        """
        added = None if bias is None else self._weights.vector("logits.bias", bias)
        name = "logits" if softcap is None else "logits.product"
        self._linear(name, x, matrix, self.quantization.head_bits, added)
        if softcap is not None:
            shrunk = self.scaled("logits.shrunk", name, 1 / softcap)
            self._node("Tanh", [shrunk], "logits.tanh")
            self.scaled("logits", "logits.tanh", softcap)

    # -- norms --------------------------------------------------------------------------------

    def norm(
        self, name: str, x: str, weight: Float, epsilon: float, bias: Float | None = None
    ) -> str:
        """The RMS norm x / rms(x) * weight over the last axis, or with a `bias` the layer norm.

        That is (x - mean) / sqrt(variance + epsilon) * weight + bias.

        Args:
            weight: [size].
        """
        op = "SimplifiedLayerNormalization" if bias is None else "LayerNormalization"
        operands = [x, self._weights.vector(f"{name}.weight", weight)]
        if bias is not None:
            operands.append(self._weights.vector(f"{name}.bias", bias))
        return self._node(op, operands, name, axis=-1, epsilon=epsilon)

    def head_norm(self, name: str, x: str, width: int, weight: Float, epsilon: float) -> str:
        """The RMS norm of each head, as long as `weight`, of vectors of a `width`.

        Args:
            width: of the vectors.
            weight: [size of a head].
        """
        heads = self._integers(f"{name}.heads", 0, -1, len(weight))
        together = self._integers(f"{name}.together", 0, -1, width)
        apart = self._node("Reshape", [x, heads], f"{name}.apart")
        normed = self.norm(f"{name}.norm", apart, weight, epsilon)
        return self._node("Reshape", [normed, together], f"{name}.normed")

    def part_norm(self, name: str, x: str, parts: int, weight: Float, epsilon: float) -> str:
        """The RMS norm of each part of a token's vector.

        Args:
            parts: their number.
            weight: [size].
        """
        apart = self._integers(f"{name}.parts", 0, 0, parts, len(weight))
        together = self._integers(f"{name}.together", 0, 0, parts * len(weight))
        x = self._node("Reshape", [x, apart], f"{name}.apart")
        x = self.norm(f"{name}.norm", x, weight, epsilon)
        return self._node("Reshape", [x, together], name)

    def add_norm(
        self,
        name: str,
        x: str,
        residual: str,
        weight: Float,
        *,
        epsilon: float,
        bias: Float | None = None,
    ) -> tuple[str, str]:
        """The `norm` of the sum of x and `residual`, and the sum itself.

        Args:
            residual: name of the other summand.
            weight: [size].
        """
        op, operands = "SkipSimplifiedLayerNormalization", [x, residual]
        if bias is not None:
            op = "SkipLayerNormalization"
            operands.append(self._weights.vector(f"{name}.bias", bias))
        operands.insert(2, self._weights.vector(f"{name}.weight", weight))
        total = f"{name}.residual"
        outputs = (name, "", "", total)
        return self._node(op, operands, *outputs, domain=MICROSOFT, epsilon=epsilon), total

    # -- attention ----------------------------------------------------------------------------

    def rotary(self, name: str, rotary: Rotary) -> tuple[str, str]:
        """Computes the tables of a rotation for all layers that use it; returns cos and sin.

        The engine reads the frequencies only, see `rewrite`.
        """
        for kind, table in (("", rotary.table), ("long_", rotary.long)):
            if table is not None:
                self._tables(f"{name}{kind}", table)
        if rotary.long is not None:
            return self._table_by_length(name, rotary.table.positions)
        return f"{name}cos_cache", f"{name}sin_cache"

    def attention(
        self,
        layer: int,
        query: str,
        key: str = "",
        value: str = "",
        *,
        rotary: tuple[str, str] | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        head_norms: HeadNorms | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> str:
        """Causal grouped-query attention over the past and the new tokens.

        Adds the layer's past inputs and present outputs.

        Args:
            layer: its index.
            query: [batch, sequence, heads * head]; or queries, keys and values in a row,
                without `key` and `value`. With `head_norms` only the second form is possible.
            key: [batch, sequence, kv_heads * head]. Layers with the same tensors of keys and values
                share them: the engine keeps those once.
            value: as `key`.
            rotary: cos and sin, which rotate the halves of the values of a head that they cover.
            window: a position sees itself and the `window - 1` positions before it; None: all.
            scale: factor of scores; by default 1 / sqrt(head).
            softcap: scores become softcap * tanh(scores / softcap).
            head_norms: norms of queries and keys before the rotation.
            kv_heads: number of heads of keys and values; by default as the model's shape.
            head_dim: size of a head; by default likewise.
        """
        kv_heads, head_dim = kv_heads or self.shape.num_kv_heads, head_dim or self.shape.head_dim
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        cache: list[str | int] = ["batch", kv_heads, "capacity", head_dim]
        self._inputs += [_value(name, TensorProto.FLOAT, cache) for name in past]
        self._outputs += [_value(name, TensorProto.FLOAT, cache) for name in present]
        lengths = ["past_and_new_minus_one", "total_length"]
        if head_norms is not None:
            query, key, value = self._normed_heads(layer, query, head_norms)
        operands = [query, key, value, *past, *lengths, *(rotary or ())]
        given: dict[str, Any] = {"scale": scale, "softcap": softcap}
        return self._node(
            "GroupQueryAttention",
            operands,
            *(f"layers.{layer}.attention", *present),
            domain=MICROSOFT,
            num_heads=self.shape.num_heads,
            kv_num_heads=kv_heads,
            do_rotary=int(rotary is not None),
            rotary_interleaved=0,
            local_window_size=window or -1,
            **{key: value for key, value in given.items() if value is not None},
        )

    def short_convolution(self, name: str, x: str, weight: Float, bias: Float | None = None) -> str:
        """The short convolution with `weight` [channels, taps], whose last column is the token's.

        An x of three times the channels holds B, C and x in a row: the result is C times the
        convolution of B * x. An x of the channels alone: SiLU of the convolution.

        Args:
            weight: [channels, kernel_size].
        """
        operands = [x, self._weights.vector(f"{name}.weight", np.ascontiguousarray(weight.T))]
        if bias is not None:
            operands.append(self._weights.vector(f"{name}.bias", bias))
        return self._node(SHORT_CONV, operands, name, domain=DOMAIN, first=0, total=len(weight))

    def recurrence(
        self,
        op: str,
        name: str,
        operands: Sequence[str],
        weights: Mapping[str, Float],
        shape: Recurrent,
        **attributes: float,
    ) -> str:
        """A recurrence with states, its output gated: [batch, sequence, values].

        Args:
            op: `GatedDelta`, the gated delta rule, whose output is normalized, too; `StateSpace`,
                that of Mamba-2.
            name: of the result.
            operands: input of the convolution (queries, keys and values; or x, B and C), after each
                other; the output's gate; a and b, or dt.
            weights: `decay` [heads], below 0; `bias` [heads] of a or dt; `norm` [value_size], or
                `skip` [heads], D.
            shape: of the layer.
            attributes: further ones. `tiled`: value head j reads key head j % key_heads, not
                j // (value_heads / key_heads).
        """
        stored = [self._weights.vector(f"{name}.{part}", one) for part, one in weights.items()]
        return self._node(
            op,
            [*operands, *stored],
            name,
            domain=DOMAIN,
            first=0,
            total=shape.ring_floats_per_token,
            state_first=0,
            state_total=shape.state_floats,
            **attributes,
        )

    # -----------------------------------------------------------------------------------------

    def _node(self, op: str, inputs: list[str], output: str, *more: str, **attributes: Any) -> str:
        """Adds a node with the name of its first output; returns that name."""
        outputs = [output, *more]
        self._nodes.append(helper.make_node(op, inputs, outputs, name=output, **attributes))
        return output

    def _read_positions(self) -> None:
        """Makes the tokens' positions a graph input."""
        self._inputs.append(_value("position_ids", TensorProto.INT64, ["batch", "sequence"]))

    def _integers(self, name: str, *values: int) -> str:
        return self._weights.constant(name, np.array(values, np.int64))

    def _normed_heads(self, layer: int, packed: str, norms: HeadNorms) -> list[str]:
        """Splits queries, keys and values, and normalizes each head of queries and keys."""
        size, name = self.shape.head_dim, f"layers.{layer}"
        widths = [self.shape.num_heads * size, *[self.shape.num_kv_heads * size] * 2]
        found = [f"{name}.{part}" for part in ("queries", "keys", "values")]
        split = self._integers(f"{name}.widths", *widths)
        self._node("Split", [packed, split], *found, axis=-1)
        for place, weight in enumerate(norms.weights):
            called = found[place]
            found[place] = self.head_norm(called, called, widths[place], weight, norms.epsilon)
        return found

    def _tables(self, name: str, table: Table) -> None:
        """`cos_cache` and `sin_cache` [positions, rotated / 2], from constants."""
        number = partial(np.array, dtype=np.float32)
        numbers = {"start": 0, "stop": table.positions, "step": 1, "factor": table.factor}
        given = {
            key: self._weights.constant(f"{name}{key}", number(numbers[key])) for key in numbers
        }
        axis = self._integers(f"{name}axis", 1)
        frequencies = self._weights.constant(f"{name}frequencies", table.frequencies)
        row = self._node("Range", [given["start"], given["stop"], given["step"]], f"{name}row")
        places = self._node("Unsqueeze", [row, axis], f"{name}places")
        angles = self._node("Mul", [places, frequencies], f"{name}angles")
        for function in ("Cos", "Sin"):
            values = self._node(function, [angles], f"{name}{function.lower()}_values")
            self._node("Mul", [values, given["factor"]], f"{name}{function.lower()}_cache")

    def _table_by_length(self, name: str, most: int) -> tuple[str, str]:
        """The tables `name` for up to `most` tokens in all, the long tables for more."""
        limit = self._weights.constant(f"{name}positions", np.array(most, np.int32))
        is_long = self._node("Greater", ["total_length", limit], f"{name}is_long")
        branches = [
            helper.make_graph(
                [helper.make_node("Identity", [f"{kind}_cache"], [kind]) for kind in kinds],
                kinds[0],
                [],
                [_value(kind, TensorProto.FLOAT, [None, None]) for kind in kinds],
            )
            for kinds in ((f"{name}long_cos", f"{name}long_sin"), (f"{name}cos", f"{name}sin"))
        ]
        chosen = (f"{name}chosen_cos", f"{name}chosen_sin")
        then, other = branches
        node = helper.make_node("If", [is_long], chosen, then_branch=then, else_branch=other)
        self._nodes.append(node)
        return chosen

    def _draw_lengths(self) -> None:
        """Computes once what every attention layer reads from the mask."""
        axis = self._integers("axis_1", 1)
        one = self._weights.constant("one", np.array(1, np.int64))
        last = self._weights.constant("index_1", np.array(1, np.int64))
        ones = self._node("ReduceSum", ["attention_mask", axis], "mask_sum", keepdims=0)
        minus_one = self._node("Sub", [ones, one], "mask_sum_minus_one")
        self._node("Cast", [minus_one], "past_and_new_minus_one", to=TensorProto.INT32)
        size = self._node("Shape", ["attention_mask"], "mask_shape")
        width = self._node("Gather", [size, last], "mask_width", axis=0)
        self._node("Cast", [width], "total_length", to=TensorProto.INT32)

    def _plain_rows(self, name: str, matrix: Matrix, ids: str, *, blocks: bool = False) -> str:
        """The rows of a table at `ids`: of float32, or of a GGUF's `blocks`."""
        (first, *_), (_, width) = matrix.parts, matrix.shape
        if not (blocks or (matrix.is_gguf and first.has_blocks)):
            table = self._weights.dense_table(f"{name}.weight", matrix)
            return self._node("Gather", [table, ids], name, axis=0)
        (rows,), (order,) = self._weights.file_rows(name, matrix)
        if order is not None:
            raise AssertionError("rows that are looked up keep their order")
        kind = first.kind if matrix.is_gguf else Q8_0.number
        return self._node(GGUF_GATHER, [rows, ids], name, domain=DOMAIN, type=kind, K=width)

    def _linear(self, name: str, x: str, matrix: Matrix, bits: int, bias: str | None = None) -> str:
        if bits == 32:
            weight = self._weights.dense_transposed(f"{name}.weight", matrix)
            if bias is None:
                return self._node("MatMul", [x, weight], name)
            product = self._node("MatMul", [x, weight], f"{name}.product")
            return self._node("Add", [product, bias], name)
        features, inputs = matrix.shape
        if matrix.is_gguf and inputs % 32 == 0:  # all but plain numbers of an unusual size
            rows, orders = self._weights.file_rows(name, matrix)
            return self._node(
                GGUF_MATMUL,
                [x, *rows, *filter(None, [bias])],
                name,
                domain=DOMAIN,
                types=[part.kind for part in matrix.parts],
                K=inputs,
                **{f"order_{at}": order for at, order in enumerate(orders) if order is not None},
            )
        stored = BlockFormat(bits, self.quantization.block)
        feedback = None
        if self._activations is not None and bits == 4:
            place = self._weights.initializers, self._weights.folder
            feedback = self._activations.feedback(x, self._nodes, *place, stored.block)
        blocks = self._weights.matmul_blocks(name, matrix, stored, feedback)
        operands = [x, *blocks, "", bias or ""]
        while not operands[-1]:  # absent inputs at the end are left out
            operands.pop()
        return self._node(
            "MatMulNBits",
            operands,
            name,
            domain=MICROSOFT,
            K=inputs,
            N=features,
            bits=stored.bits,
            block_size=stored.block,
            accuracy_level=INT8_ACTIVATIONS,
        )


def _value(name: str, kind: int, dims: Sequence[str | int | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)
