"""The operators that drawn graphs are made of: their versions, and a model of a graph of them."""

from __future__ import annotations

import onnx
from onnx import helper

MICROSOFT = "com.microsoft"
_OPSET = 17
_IR_VERSION = 10  # onnxruntime refuses an IR newer than it knows; 10 is ample for this opset


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    """The model that a graph of such operators is."""
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="specops"
    )
