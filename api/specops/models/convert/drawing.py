"""A graph in the making: its nodes, and functions that go element by element.

Methods take and return the names of tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from specops.models.convert.opset import MICROSOFT
from specops.models.convert.weights import WeightStore


class Drawing:
    """Collects nodes; `weights` collects what they read."""

    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []

    def silu(self, name: str, x: str) -> str:
        """x * sigmoid(x), element by element."""
        # QuickGelu is x * sigmoid(alpha * x): at alpha = 1 the fused kernel of SiLU.
        return self._node("QuickGelu", [x], name, domain=MICROSOFT, alpha=1.0)

    def multiply(self, name: str, x: str, y: str) -> str:
        """x * y, element by element."""
        return self._node("Mul", [x, y], name)

    def scaled(self, name: str, x: str, factor: float) -> str:
        """x times a number."""
        if factor == 1:
            return x
        return self._node("Mul", [x, self._number(f"{name}.factor", factor)], name)

    def add(self, name: str, x: str, y: str) -> str:
        """x + y, element by element."""
        return self._node("Add", [x, y], name)

    def relu(self, name: str, x: str) -> str:
        """max(x, 0), element by element."""
        return self._node("Relu", [x], name)

    def gelu_tanh(self, name: str, x: str) -> str:
        """GELU by the approximation with tanh, element by element."""
        return self._node("FastGelu", [x], name, domain=MICROSOFT)

    def _number(self, name: str, value: float) -> str:
        return self._weights.constant(name, np.array(value, np.float32))

    def _node(self, op: str, inputs: list[str], output: str, *more: str, **attributes: Any) -> str:
        """Draws a node that is named after its first output; returns that."""
        outputs = [output, *more]
        self._nodes.append(helper.make_node(op, inputs, outputs, name=output, **attributes))
        return output
