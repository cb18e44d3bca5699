"""Runs an exported graph with ONNX Runtime alone; one buffer holds past and present."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specops.models.convert import ExportedModel
from specops.runtime import kernels
from specops.runtime.session import load, plain_options

Float = NDArray[np.float32]


class Runner:
    """One row of an exported model; `past` is the number of tokens in its cache."""

    def __init__(self, model: ExportedModel, capacity: int = 256) -> None:
        shape = model.shape
        self._open(model.graph_file, shape.num_kv_heads, shape.head_dim, shape.num_layers, capacity)
        self.vocab = shape.vocab_size

    @classmethod
    def of_graph(
        cls, graph: Path, *, kv_heads: int, head_dim: int, layers: int, vocab: int
    ) -> Runner:
        """A runner for a graph with these sizes."""
        runner = cls.__new__(cls)
        runner._open(graph, kv_heads, head_dim, layers, 256)
        runner.vocab = vocab
        return runner

    def _open(self, graph: Path, kv_heads: int, head_dim: int, layers: int, capacity: int) -> None:
        self.session = open_model(str(graph))
        self.past = 0
        # NaN shows every read of a position before it is written.
        self.cache = {
            f"{layer}.{kind}": np.full((1, kv_heads, capacity, head_dim), np.nan, np.float32)
            for layer in range(layers)
            for kind in ("key", "value")
        }

    def step(self, tokens: Sequence[int], mask_length: int | None = None) -> Float:
        """Logits [len(tokens), vocab] after the past; the mask is padded to `mask_length`."""
        ids = np.array([tokens], np.int64)
        used = self.past + len(tokens)
        mask = np.zeros((1, mask_length or used), np.int64)
        mask[:, :used] = 1
        logits = np.empty((1, len(tokens), self.vocab), np.float32)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        for name, buffer in self.cache.items():
            place = ("cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_input(f"past_key_values.{name}", *place)
            binding.bind_output(f"present.{name}", *place)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self.session.run_with_iobinding(binding)
        self.past = used
        return logits[0]

    def rewind(self, past: int) -> None:
        """Forgets all but the first `past` tokens."""
        self.past = past


def embedded(graph: Path, tokens: Sequence[int]) -> Float:
    """The embeddings [len(tokens), hidden] that a graph, prepared or not, looks up."""
    model = onnx.load(graph)
    (node,) = (node for node in model.graph.node if "embedding" in node.output)
    weights = [tensor for tensor in model.graph.initializer if tensor.name in node.input]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "tokens"])
    found = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, None)
    lookup = helper.make_model(
        helper.make_graph([node], "lookup", [ids], [found], weights),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    session = load(lookup.SerializeToString(), plain_options())
    (rows,) = session.run(["embedding"], {"input_ids": np.array([tokens], np.int64)})
    return rows[0]


def is_tied(graph: Path) -> bool:
    """Whether a prepared graph's embedding reads the tiles of its head."""
    nodes = onnx.load(graph, load_external_data=False).graph.node
    made = {name: node for node in nodes for name in node.output}
    embedding, head = made["embedding"], made["logits"]
    assert (embedding.op_type, head.op_type) == (kernels.GATHER, kernels.MATMUL)
    return embedding.input[1] == head.input[1]


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of a checkpoint's config.json; None removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def open_model(model: str | bytes) -> onnxruntime.InferenceSession:
    """A session for a graph's path or content, on this process's one pool of threads."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
