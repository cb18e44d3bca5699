"""The operator versions of exported graphs, and a model from a graph of these operators."""

import onnx
from onnx import helper

from specops.models.contract import MICROSOFT
from specops.runtime.kernels import DOMAIN

_OPSET = 17
_IR_VERSION = 10  # ONNX Runtime refuses a newer IR than it knows; this opset needs no newer one


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    """Wraps `graph` in a model with the operator versions."""
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
    if any(node.domain == DOMAIN for node in graph.node):
        opsets.append(helper.make_opsetid(DOMAIN, 1))
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="specops"
    )
