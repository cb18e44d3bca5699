"""Draws a decoder as an ONNX graph under the contract that onnxruntime-genai publishes in.

A family calls these methods in the order of its forward pass; each weight is quantized and
written the moment it is drawn, so that no more than a slab of it is ever in memory.

Inputs: `input_ids` [batch, sequence] int64, `attention_mask` [batch, total] int64, where positions
are learned `position_ids` [batch, sequence] int64, and
`past_key_values.{l}.key|value` [batch, kv_heads, capacity, head] float32. Outputs: `logits`
[batch, sequence, vocab] float32, `present.{l}.key|value`, meant to be bound to the past's buffers.
The mask may be padded with zeros on the right, to keep its shape the same between steps.

Any program that knows the contract can run such a graph; the engine rewrites it
(`specops.models.graph.rewrite`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specops.models.convert.calibration import Activations
from specops.models.convert.checkpoint import Matrix
from specops.models.convert.drawing import Drawing
from specops.models.convert.model_config import ModelShape
from specops.models.convert.opset import MICROSOFT, model_of
from specops.models.convert.quantization import Quantization
from specops.models.convert.rope import Rotary
from specops.models.convert.weights import WeightStore

Float = NDArray[np.float32]

_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: activations quantized to int8 per block


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys, before they are rotated: weights [head]."""

    weights: tuple[Float, Float]
    epsilon: float


class DecoderGraph(Drawing):
    """Collects the nodes of one decoder; methods take and return the names of tensors."""

    def __init__(
        self,
        shape: ModelShape,
        quantization: Quantization,
        weights: WeightStore,
        activations: Activations | None = None,
    ) -> None:
        """With `activations`, products of 4 bits are rounded by what comes into them."""
        super().__init__(weights)
        self.shape = shape
        self.quantization = quantization
        self._activations = activations
        self._inputs = [
            _value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            _value("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        self._outputs = [
            _value("logits", TensorProto.FLOAT, ["batch", "sequence", shape.vocab_size])
        ]
        self._draw_lengths()

    # -- the pieces of a forward pass ---------------------------------------------------------

    def embedding(self, matrix: Matrix) -> str:
        """The rows of `matrix` [vocab, hidden] at `input_ids`: [batch, sequence, hidden]."""
        if matrix.has_codes:
            return self._embedding_of_codes(matrix)
        if self.quantization.embedding_bits == 32:
            table = self._weights.dense_table("embedding.weight", matrix)
            return self._node("Gather", [table, "input_ids"], "embedding", axis=0)
        stored = self.quantization.blocks(self.quantization.embedding_bits)
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
        """The rows of `matrix` [context, hidden] at the positions, which become an input."""
        self._inputs.append(_value("position_ids", TensorProto.INT64, ["batch", "sequence"]))
        table = self._weights.dense_table("positions.weight", matrix)
        return self._node("Gather", [table, "position_ids"], "positions", axis=0)

    def linear(self, name: str, x: str, matrix: Matrix, bias: Float | None = None) -> str:
        """x [batch, sequence, K] times the transpose of `matrix` [N, K], plus `bias` [N]."""
        added = None if bias is None else self._weights.vector(f"{name}.bias", bias)
        return self._linear(name, x, matrix, self.quantization.bits, added)

    def head(self, x: str, matrix: Matrix) -> None:
        """The graph's output `logits`: x times the transpose of `matrix` [vocab, hidden]."""
        self._linear("logits", x, matrix, self.quantization.head_bits)

    def rms_norm(self, name: str, x: str, weight: Float, epsilon: float) -> str:
        """x / rms(x) * weight over the last axis."""
        scale = self._weights.vector(f"{name}.weight", weight)
        return self._node(
            "SimplifiedLayerNormalization", [x, scale], name, axis=-1, epsilon=epsilon
        )

    def add_rms_norm(
        self, name: str, x: str, residual: str, weight: Float, epsilon: float
    ) -> tuple[str, str]:
        """The sum of x and `residual` normalized, and the sum itself, the next residual."""
        return self._add_norm(
            "SkipSimplifiedLayerNormalization", name, [x, residual], weight, epsilon
        )

    def add_layer_norm(
        self, name: str, x: str, residual: str, weight: Float, bias: Float, *, epsilon: float
    ) -> tuple[str, str]:
        """The sum of x and `residual` normalized, and the sum itself.

        A norm is (x - mean) / sqrt(variance + epsilon) * weight + bias over the last axis.
        """
        operands = [x, residual, self._weights.vector(f"{name}.bias", bias)]
        return self._add_norm("SkipLayerNormalization", name, operands, weight, epsilon)

    def rotary(self, name: str, rotary: Rotary) -> tuple[str, str]:
        """Stores the tables of a rotation once for all layers that have it; cos and sin."""
        for kind, table in (("", rotary.table), ("long_", rotary.long)):
            for function, values in table._asdict().items() if table else ():
                self._weights.constant(f"{name}{kind}{function}_cache", values)
        if rotary.long is not None:
            return self._chosen(name, len(rotary.table.cos))
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
        head_norms: HeadNorms | None = None,
    ) -> str:
        """Causal grouped-query attention over the past and itself.

        `query`, `key` and `value` are [batch, sequence, heads * head]; without the last two, as
        where heads have norms, the first has all three behind each other. `rotary` are cos and
        sin: queries and keys are rotated by the halves of what these cover of a head. A position
        sees itself and the `window - 1` before it, or all where there is none. `scale` is of
        scores, without one the root of a head's size divides them. Adds the layer's past inputs and
        present outputs.
        """
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        cache: list[str | int] = ["batch", self.shape.num_kv_heads, "capacity", self.shape.head_dim]
        self._inputs += [_value(name, TensorProto.FLOAT, cache) for name in past]
        self._outputs += [_value(name, TensorProto.FLOAT, cache) for name in present]
        lengths = ["past_and_new_minus_one", "total_length"]
        if head_norms is not None:
            query, key, value = self._normed_heads(layer, query, head_norms)
        operands = [query, key, value, *past, *lengths, *(rotary or ())]
        attributes: dict[str, Any] = {} if scale is None else {"scale": scale}
        return self._node(
            "GroupQueryAttention",
            operands,
            *(f"layers.{layer}.attention", *present),
            domain=MICROSOFT,
            num_heads=self.shape.num_heads,
            kv_num_heads=self.shape.num_kv_heads,
            do_rotary=int(rotary is not None),
            rotary_interleaved=0,
            local_window_size=window or -1,
            **attributes,
        )

    def finish(self, name: str) -> onnx.ModelProto:
        """The drawn model, its large initializers pointing into the weight file."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, self._weights.initializers
        )
        return model_of(graph)

    # -- how they are drawn -------------------------------------------------------------------

    def _add_norm(
        self, op: str, name: str, operands: list[str], weight: Float, epsilon: float
    ) -> tuple[str, str]:
        operands.insert(2, self._weights.vector(f"{name}.weight", weight))
        total = f"{name}.residual"
        outputs = (name, "", "", total)
        return self._node(op, operands, *outputs, domain=MICROSOFT, epsilon=epsilon), total

    def _normed_heads(self, layer: int, packed: str, norms: HeadNorms) -> list[str]:
        """Queries, keys and values, each head of the first two with its norm before it rotates."""
        size, name = self.shape.head_dim, f"layers.{layer}"
        widths = [self.shape.num_heads * size, *[self.shape.num_kv_heads * size] * 2]
        found = [f"{name}.{part}" for part in ("queries", "keys", "values")]
        split = self._weights.constant(f"{name}.widths", np.array(widths, np.int64))
        self._node("Split", [packed, split], *found, axis=-1)
        for place, weight in enumerate(norms.weights):
            called = found[place]
            shapes = [
                self._weights.constant(f"{called}.{to}", np.array([0, -1, width], np.int64))
                for to, width in (("heads", size), ("together", widths[place]))
            ]
            apart = self._node("Reshape", [called, shapes[0]], f"{called}.apart")
            normed = self.rms_norm(f"{called}.norm", apart, weight, norms.epsilon)
            found[place] = self._node("Reshape", [normed, shapes[1]], f"{called}.normed")
        return found

    def _chosen(self, name: str, most: int) -> tuple[str, str]:
        """The tables `name` while all tokens are among the first `most`, then the long ones."""
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
        """What every attention layer needs from the mask, computed once."""
        axis = self._weights.constant("axis_1", np.array([1], np.int64))
        one = self._weights.constant("one", np.array(1, np.int64))
        last = self._weights.constant("index_1", np.array(1, np.int64))
        ones = self._node("ReduceSum", ["attention_mask", axis], "mask_sum", keepdims=0)
        minus_one = self._node("Sub", [ones, one], "mask_sum_minus_one")
        self._node("Cast", [minus_one], "past_and_new_minus_one", to=TensorProto.INT32)
        size = self._node("Shape", ["attention_mask"], "mask_shape")
        width = self._node("Gather", [size, last], "mask_width", axis=0)
        self._node("Cast", [width], "total_length", to=TensorProto.INT32)

    def _embedding_of_codes(self, matrix: Matrix) -> str:
        """The same numbers that a table in float32 would have, in a third of its bytes."""
        codes, scales, offsets, zero, blocks = self._weights.code_table("embedding", matrix)
        in_blocks = self._weights.constant("in_blocks", np.array([0, 0, -1, 1], np.int64))
        like_scales = self._node("Gather", [scales, "input_ids"], "embedding.scales.rows", axis=0)
        factors = self._node("Reshape", [like_scales, in_blocks], "embedding.factors")
        rows = self._node("Gather", [codes, "input_ids"], "embedding.rows", axis=0)
        x = self._node("Cast", [rows], "embedding.numbers", to=TensorProto.FLOAT)
        if zero:
            middle = self._weights.constant("embedding.zero", np.array(zero, np.float32))
            x = self._node("Sub", [x, middle], "embedding.centred")
        shape = np.array([0, 0, blocks, matrix.shape[1] // blocks], np.int64)
        shape_of_codes = self._weights.constant("embedding.blocks", shape)
        x = self._node("Reshape", [x, shape_of_codes], "embedding.codes.blocks")
        x = self._node("Mul", [x, factors], "embedding.scaled")
        if offsets:
            rows = self._node("Gather", [offsets, "input_ids"], "embedding.offsets.rows", axis=0)
            added = self._node("Reshape", [rows, in_blocks], "embedding.added")
            x = self._node("Add", [x, added], "embedding.shifted")
        whole = self._weights.constant(
            "embedding.width", np.array([0, 0, matrix.shape[1]], np.int64)
        )
        return self._node("Reshape", [x, whole], "embedding")

    def _linear(self, name: str, x: str, matrix: Matrix, bits: int, bias: str | None = None) -> str:
        if bits == 32:
            weight = self._weights.dense_transposed(f"{name}.weight", matrix)
            if bias is None:
                return self._node("MatMul", [x, weight], name)
            product = self._node("MatMul", [x, weight], f"{name}.product")
            return self._node("Add", [product, bias], name)
        features, inputs = matrix.shape
        stored = matrix.own_format or self.quantization.blocks(bits)
        feedback = None
        if self._activations is not None and bits == 4:
            place = self._weights.initializers, self._weights.folder
            feedback = self._activations.feedback(x, self._nodes, *place, stored.block)
        blocks = self._weights.matmul_blocks(name, matrix, stored, feedback)
        operands = [x, *blocks, "", bias or ""]
        while not operands[-1]:  # an absent input at the end is left out
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
            accuracy_level=_INT8_ACTIVATIONS,
        )


def _value(name: str, kind: int, dims: Sequence[str | int | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)
