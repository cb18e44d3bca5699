"""Runs text through a graph while it is built, to record the inputs of each product.

A weight is rounded when it is added, so the inputs of the next product come from rounded weights,
and its rounding compensates their errors. Only tensors that later nodes read stay in memory, about
one layer's worth: the graph of an earlier conversion tells how often each tensor is read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from specops.models.convert.calibration.error_feedback import Feedback
from specops.models.convert.opset import model_of
from specops.models.errors import ExportError
from specops.runtime.session import Session, load, plain_options

Float = NDArray[np.float32]

_CHUNK_TOKENS = 2048  # tokens in one run
_PANEL = 1024  # rows of a moment in one addition


class Activations:
    """The tensors of a graph for a text.

    Args:
        tokens: [samples, length].
        earlier: the finished graph of the same model with any quantization.
    """

    def __init__(self, tokens: NDArray[np.int64], earlier: onnx.ModelProto) -> None:
        self._readers = Counter(name for node in earlier.graph.node for name in _read(node))
        samples = max(1, _CHUNK_TOKENS // tokens.shape[1])
        self._values = [
            _inputs(tokens[start : start + samples], earlier)
            for start in range(0, len(tokens), samples)
        ]
        self._done = 0  # number of nodes that have run
        self._last: tuple[str, Feedback] | None = None

    def feedback(
        self,
        name: str,
        nodes: Sequence[onnx.NodeProto],
        initializers: Sequence[onnx.TensorProto],
        folder: Path,
        block: int,
    ) -> Feedback:
        """The error feedback for weights that the tensor `name` [batch, sequence, K] multiplies.

        Args:
            name: an output of one of the nodes.
            nodes: all nodes so far.
            initializers: all that these nodes read; there may be more.
            folder: the folder of the weight file.
            block: weights per scale.
        """
        if self._last is not None and self._last[0] == name:  # gate and up read the same tensor
            return self._last[1]
        self._last = None
        self._run(nodes[self._done :], initializers, folder, name)
        self._done = len(nodes)
        feedback = Feedback(self._moment(name), block)
        self._last = name, feedback
        return feedback

    def _moment(self, name: str) -> Float:
        """The mean [K, K] of x x^T over the rows x of a tensor."""
        rows = [values[name].reshape(-1, values[name].shape[-1]) for values in self._values]
        moment: Float = rows[0].T @ rows[0]
        parts = [slice(start, start + _PANEL) for start in range(0, len(moment), _PANEL)]
        for x in rows[1:]:  # symmetric: the upper half is enough
            for part in parts:
                moment[part, part.start :] += x[:, part].T @ x[:, part.start :]
        for part in parts:
            moment[part.stop :, part] = moment[part, part.stop :].T
        moment /= sum(len(x) for x in rows)
        return moment

    def _run(
        self,
        nodes: Sequence[onnx.NodeProto],
        initializers: Sequence[onnx.TensorProto],
        folder: Path,
        wanted: str,
    ) -> None:
        read = Counter(name for node in nodes for name in _read(node))
        made = {name for node in nodes for name in node.output}
        self._readers.subtract(read)
        weights = [tensor for tensor in initializers if tensor.name in read]
        given = read.keys() - made - {tensor.name for tensor in weights} - {""}
        kept = [name for name in made - {""} if self._readers[name] > 0 or name == wanted]
        session = _session(
            nodes, weights, {name: self._values[0][name] for name in given}, kept, folder
        )
        for values in self._values:
            found = _computed(session, kept, {name: values[name] for name in given})
            values.update(zip(kept, found, strict=True))
            for name in given:
                if self._readers[name] <= 0 and name != wanted:
                    del values[name]


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that a node and its branches read."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from inner.input


def _inputs(tokens: NDArray[np.int64], earlier: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """The graph inputs for whole texts without a past."""
    found: dict[str, NDArray[Any]] = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
    }
    for item in earlier.graph.input:
        if item.name not in found:  # past keys or values: [batch, heads, capacity, head]
            _, heads, _, size = (dim.dim_value for dim in item.type.tensor_type.shape.dim)
            found[item.name] = np.zeros((len(tokens), heads, 0, size), np.float32)
    return found


def _computed(
    session: Session, kept: Sequence[str], given: dict[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    """Runs a part; ExportError if ONNX Runtime, unlike the service, has no kernel for it."""
    try:
        found: list[NDArray[Any]] = session.run(kept, given)
    except Exception as error:  # onnxruntime raises classes without a common base
        raise ExportError(
            "ONNX Runtime cannot run this model over text for calibration: ask for int8, or for "
            f"int4-128-rtn, which rounds without it ({str(error).splitlines()[0]})"
        ) from error
    return found


def _session(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto],
    given: dict[str, NDArray[Any]],
    kept: Sequence[str],
    folder: Path,
) -> Session:
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
        )
        for name, value in given.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in kept]
    graph = helper.make_graph(nodes, "part", inputs, outputs, weights)
    return load(model_of(graph).SerializeToString(), plain_options(folder))
