"""Reads a target's output matrix from its graph, with any quantization.

The rows of a GGUF are looked up. Else the product that computes the logits is run alone on the rows
of the identity matrix. Its results are the columns of the output matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from specops.models.contract import GGUF_GATHER, GGUF_MATMUL
from specops.models.convert.opset import model_of
from specops.models.folder import ModelError
from specops.models.graph.nodes import attributes_of
from specops.models.graph.outputs import output_product
from specops.models.graph.tiles import look_up
from specops.runtime.kernels import DOMAIN
from specops.runtime.sampling import Floats
from specops.runtime.session import load, plain_options

_ENTRIES = 1 << 25  # most numbers in the result of one run: 128 MiB


def output_rows(path: Path, tokens: Sequence[int], size: int) -> Floats:
    """Return rows of the matrix that turns hidden states into logits.

    Args:
        path: the exported graph of the target.
        tokens: tokens of the rows.
        size: size of a hidden state.

    Returns:
        [len(tokens), size].

    Raises:
        ModelError: the logits of the graph are no product with weights.
    """
    graph = onnx.load(path, load_external_data=False).graph
    product = output_product(graph)
    if product is None:
        raise ModelError(
            f"the logits of {path} are not a product with weights: a head cannot be made"
        )
    weights = [tensor for tensor in graph.initializer if tensor.name in product.input]
    if product.op_type == GGUF_MATMUL:
        return _looked_up(product, weights, path.parent, tokens)
    state, logits = product.input[0], product.output[0]
    alone = helper.make_graph(
        [product],
        "output",
        [helper.make_tensor_value_info(state, TensorProto.FLOAT, [1, "rows", size])],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, None)],
        weights,
    )
    session = load(model_of(alone).SerializeToString(), plain_options(path.parent))
    nothing = session.run(None, {state: np.zeros((1, 1, size), np.float32)})[0][0]
    rows = np.empty((len(tokens), size), np.float32)
    step = max(1, _ENTRIES // nothing.shape[-1])
    for start in range(0, size, step):
        ones = np.eye(size, dtype=np.float32)[None, start : start + step]
        columns = session.run(None, {state: ones})[0][0] - nothing
        rows[:, start : start + step] = columns[:, list(tokens)].T
    return rows


def _looked_up(
    product: onnx.NodeProto,
    weights: Sequence[TensorProto],
    folder: Path,
    tokens: Sequence[int],
) -> Floats:
    """Return rows of a GGUF's only matrix in a product."""
    given = attributes_of(product)
    (kind,) = given["types"]
    gather = helper.make_node(
        GGUF_GATHER, [product.input[1], "ids"], ["rows"], domain=DOMAIN, type=kind, K=given["K"]
    )
    table = look_up(gather, {tensor.name: tensor for tensor in weights}, folder, {})
    graph = helper.make_graph(
        [gather],
        "rows",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [len(tokens)])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)],
        [table],
    )
    session = load(model_of(graph).SerializeToString(), plain_options(folder))
    rows: Floats = session.run(None, {"ids": np.array(tokens, np.int64)})[0]
    return rows
