"""Reads rows of a target's embedding and output matrix from its graph, with any quantization.

The rows of a GGUF and of an embedding are looked up, and a GGUF's rows can also be copied as they
are. Otherwise the product that computes the logits runs alone on the rows of the identity matrix:
its results are the columns of the output matrix.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from specops.models.contract import GGUF_GATHER, GGUF_MATMUL
from specops.models.convert.gguf.block_types import TYPES
from specops.models.convert.gguf.header import GgufTensor
from specops.models.convert.gguf.rows import GgufRows
from specops.models.convert.opset import model_of
from specops.models.errors import ModelError
from specops.models.graph.nodes import attributes_of
from specops.models.graph.outputs import LOGITS, output_product
from specops.models.graph.tensors import locate, values_of
from specops.models.graph.tiles import look_up
from specops.runtime.kernels import DOMAIN
from specops.runtime.sampling import Floats
from specops.runtime.session import load, plain_options

_IDS = "input_ids"
_LOOK_UPS = ("Gather", "GatherBlockQuantized", GGUF_GATHER)
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
    graph = _graph(path)
    product = output_product(graph)
    if product is None:
        raise ModelError(
            f"the logits of {path} are not a product with weights: a head cannot be made"
        )
    weights = [tensor for tensor in graph.initializer if tensor.name in product.input]
    if product.op_type == GGUF_MATMUL:
        given = attributes_of(product)
        place = [product.input[1], _IDS]
        (kind,) = given["types"]
        node = helper.make_node(
            GGUF_GATHER, place, ["rows"], domain=DOMAIN, type=kind, K=given["K"]
        )
        return _row_reader(node, weights, path)(tokens)
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


def output_blocks(path: Path, tokens: Sequence[int]) -> GgufRows | None:
    """Rows of the matrix that turns hidden states into logits, as a GGUF has them.

    Args:
        path: the exported graph of the target.
        tokens: tokens of the rows.

    Returns:
        None where the matrix is not one of a GGUF.
    """
    graph = _graph(path)
    product = output_product(graph)
    if product is None or product.op_type != GGUF_MATMUL:
        return None
    given = attributes_of(product)
    (kind,) = given["types"]
    stored = next(item for item in graph.initializer if item.name == product.input[1])
    rows: Any = values_of(stored, path.parent)  # a `memmap`
    place = Path(rows.filename), "", (len(rows), given["K"]), rows.offset, rows.nbytes
    return GgufRows(GgufTensor(stored.name, *place, type=TYPES[kind]))[np.array(tokens)]


class Embedding:
    """The embedding of a target, [V, size], whose rows are computed where it is sliced.

    Args:
        path: the exported graph of the target.

    Raises:
        ModelError: no node of the graph looks tokens up.
    """

    has_blocks = False  # as a part of a `Matrix`: rows are plain numbers

    def __init__(self, path: Path) -> None:
        graph = _graph(path)
        weights = list(graph.initializer)
        for node in graph.node:
            if node.op_type in _LOOK_UPS and _IDS in node.input:
                break
        else:
            raise ModelError(f"{path} has no table of embeddings: no draft head can run with it")
        self._rows = _row_reader(node, [item for item in weights if item.name in node.input], path)
        logits = next(item for item in graph.output if item.name == LOGITS)
        vocab_size: int = logits.type.tensor_type.shape.dim[-1].dim_value
        self.shape = vocab_size, len(self._rows([0])[0])
        self.nbytes = 4 * self.shape[0] * self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Floats:
        return self._rows(range(*rows.indices(len(self))))


def _graph(path: Path) -> onnx.GraphProto:
    """Return a target's graph, whose weights say where they are."""
    graph = onnx.load(path, load_external_data=False).graph
    locate(graph, path.parent)
    return graph


def _row_reader(
    node: onnx.NodeProto, weights: Sequence[TensorProto], path: Path
) -> Callable[[Sequence[int]], Floats]:
    """Return a function from tokens [n] to rows [n, size], which a node looks up."""
    if node.op_type == GGUF_GATHER:
        table = look_up(node, {tensor.name: tensor for tensor in weights}, path.parent, {})
        weights = [table]
    graph = helper.make_graph(
        [node],
        "rows",
        [helper.make_tensor_value_info(_IDS, TensorProto.INT64, [1, "tokens"])],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)],
        weights,
    )
    session = load(model_of(graph).SerializeToString(), plain_options(path.parent))

    def read(tokens: Sequence[int]) -> Floats:
        rows: Floats = session.run(None, {_IDS: np.array([tokens], np.int64)})[0][0]
        return rows

    return read
