"""Runs an exported graph in the simplest way: one sequence and one cache, with plain onnxruntime.

The figures of the model card serve to judge the engine, so they must not depend on it.
"""

from collections.abc import Sequence

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specops.models.convert import ExportedModel


class OnnxModel:
    """One sequence of an exported model.

    Args:
        model: the model.
        threads: number of threads.
        capacity: maximum number of tokens.

    Attributes:
        length: number of tokens; reduce it to forget the last ones.
    """

    def __init__(self, model: ExportedModel, *, threads: int, capacity: int = 1024) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            str(model.graph_file), options, providers=["CPUExecutionProvider"]
        )
        shape = (1, model.shape.num_kv_heads, capacity, model.shape.head_dim)
        self._cache = {
            f"{layer}.{kind}": np.zeros(shape, np.float32)
            for layer in range(model.shape.num_layers)
            for kind in ("key", "value")
        }
        self._vocab = model.shape.vocab_size
        self.length = 0

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append `tokens` [S] to the sequence; return their logits [S, V]."""
        ids = np.array([tokens], np.int64)
        mask = np.ones((1, self.length + len(tokens)), np.int64)
        logits: NDArray[np.float32] = np.empty((1, len(tokens), self._vocab), np.float32)
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        for name, buffer in self._cache.items():
            place = ("cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_input(f"past_key_values.{name}", *place)
            binding.bind_output(f"present.{name}", *place)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        self.length += len(tokens)
        return logits[0]  # type: ignore[no-any-return]

    def afresh(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Start a new sequence with `tokens` [S]; return their logits [S, V]."""
        self.length = 0
        return self(tokens)
