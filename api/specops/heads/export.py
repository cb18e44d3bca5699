"""Writes a trained head as a graph for the engine, with weights in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specops.models.convert.opset import MICROSOFT, model_of
from specops.models.convert.quantize import quantize_blockwise
from specops.models.head_folder import EPSILON, HEAD_GRAPH, HeadFolder
from specops.runtime.sampling import Floats

_BITS, _BLOCK = 8, 64
_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level


def write_head(head: HeadFolder, weights: Mapping[str, Floats]) -> None:
    """Write graph and manifest.

    Args:
        head: the manifest; its folder exists.
        weights: the weights of `HeadNetwork` by name, with its table as `table`.
    """
    graph = _Graph(weights, head.hidden_size, len(head.tokens))
    onnx.save(graph.draw(), head.path / HEAD_GRAPH)
    head.write()


class _Graph:
    """Builds the graph of `HeadNetwork.forward`."""

    def __init__(self, weights: Mapping[str, Floats], size: int, table_size: int) -> None:
        self._weights, self._size, self._table_size = weights, size, table_size
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []

    def draw(self) -> onnx.ModelProto:
        """Return the graph."""
        logits_of = self._quantized("table")
        token = self._norm("token_norm", self._rows(*logits_of))
        state = self._norm("state_norm", "states")
        x = self._linear("mix", self._node("Concat", [token, state], "both", axis=-1))
        inner = self._norm("inner_norm", x)
        gate, up = self._linear("gate", inner), self._linear("up", inner)
        act = self._node("QuickGelu", [gate], "act", domain=MICROSOFT, alpha=1.0)  # SiLU
        down = self._linear("down", self._node("Mul", [act, up], "gated"))
        self._norm("last_norm", self._node("Add", [x, down], "sum"), "next_states")
        self._product("next_states", "table", logits_of, "logits")
        floats, size = TensorProto.FLOAT, self._size
        graph = helper.make_graph(
            self._nodes,
            "draft head",
            [
                helper.make_tensor_value_info("codes", TensorProto.INT64, ["rows"]),
                helper.make_tensor_value_info("states", floats, ["rows", size]),
            ],
            [
                helper.make_tensor_value_info("logits", floats, ["rows", self._table_size + 1]),
                helper.make_tensor_value_info("next_states", floats, ["rows", size]),
            ],
            self._constants,
        )
        return model_of(graph)

    def _rows(self, codes: str, scales: str) -> str:
        """Add the lookup of table rows at `codes`; the result is [rows, size]."""
        middle = self._constant("middle", np.array(1 << (_BITS - 1), np.float32))
        width = self._constant("width", np.array([0, -1], np.int64))
        within = self._constant("within", np.array([self._size], np.int64))
        last = self._constant("last", np.array([-1], np.int64))
        first = self._constant("first", np.array([0], np.int64))
        factors = self._node("Gather", [scales, "codes"], "row_scales", axis=0)
        factors = self._node("Unsqueeze", [factors, last], "row_factors")
        rows = self._node("Gather", [codes, "codes"], "row_codes", axis=0)
        numbers = self._node("Cast", [rows], "row_numbers", to=TensorProto.FLOAT)
        centred = self._node("Sub", [numbers, middle], "row_centred")
        values = self._node("Mul", [centred, factors], "row_blocks")
        whole = self._node("Reshape", [values, width], "row_whole")  # padded to whole blocks
        return self._node("Slice", [whole, first, within, last], "row_values")

    def _norm(self, name: str, x: str, output: str = "") -> str:
        weight = self._constant(f"{name}.weight", self._weights[f"{name}.weight"])
        return self._node(
            "SimplifiedLayerNormalization", [x, weight], output or name, axis=-1, epsilon=EPSILON
        )

    def _linear(self, name: str, x: str) -> str:
        return self._product(x, f"{name}.weight", self._quantized(f"{name}.weight"), name)

    def _quantized(self, name: str) -> tuple[str, str]:
        """Store a matrix [N, K] as codes [N, blocks, block] and scales [N, blocks]."""
        found = quantize_blockwise(self._weights[name], _BITS, _BLOCK)
        return (
            self._constant(f"{name}.codes", found.packed),
            self._constant(f"{name}.scales", found.scales),
        )

    def _product(self, x: str, name: str, stored: Sequence[str], output: str) -> str:
        columns, depth = self._weights[name].shape
        return self._node(
            "MatMulNBits",
            [x, *stored],
            output,
            domain=MICROSOFT,
            K=depth,
            N=columns,
            bits=_BITS,
            block_size=_BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _constant(self, name: str, values: np.ndarray[Any, Any]) -> str:
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output
