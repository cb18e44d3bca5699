"""The fastest greedy loop over a graph that we know how to write: what the engine is held against.

ONNX Runtime used directly, nothing of the engine: bindings made once, keys and values written in
place, one stream, one token a step, no text, no stop, no statistics. Whatever the engine adds to
this loop's time is the engine's overhead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from bench.models import GraphFile
from specops.session import load

_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True, slots=True)
class BareRun:
    """Tokens that one run generated, and the seconds until the first and from there to the last."""

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float


class BareLoop:
    """Greedy continuation of prompts of one length, to one number of new tokens.

    Runs on the process's shared threads: `ort.set_global_thread_pool_sizes` comes before.

    Args:
        graph: an exported model's ONNX file. Where ONNX Runtime has optimized and saved it before,
            a second time would undo that.
        prompt_tokens: tokens per prompt.
        new_tokens: tokens to generate, at least 1.
        align: the prompt's pass is filled up to a multiple of it with spare tokens, which later
            ones overwrite. With the engine's own figure both compute the same to the last bit.
    """

    def __init__(
        self,
        graph: GraphFile,
        *,
        prompt_tokens: int,
        new_tokens: int,
        align: int = 1,
    ) -> None:
        options = ort.SessionOptions()
        # Within a process all sessions share a pool or none does; the engine's choice is to share.
        options.use_per_session_threads = False
        options.log_severity_level = 3
        if graph.prepacked:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = load(graph.path, options, whole_scores=graph.whole_scores)
        self._prompt_tokens, self._new_tokens = prompt_tokens, new_tokens
        self._width = width = prompt_tokens + -prompt_tokens % align
        # One mask as wide as the whole sequence: its length never changes, its ones do.
        self._mask = np.zeros((1, width + new_tokens), np.int64)
        self._ids = np.zeros(width, np.int64)
        self._positions = np.zeros(width, np.int64)
        vocab = self._session.get_outputs()[0].shape[-1]
        self._logits = np.zeros((width, vocab), np.float32)
        self._cache = self._allocate()
        self._prefill = self._bind(width)
        self._decode = self._bind(1)

    def run(self, prompt: Sequence[int]) -> BareRun:
        """Continue a prompt of the length that the loop was made for."""
        session, binding, ids, mask = self._session, self._decode, self._ids, self._mask
        positions, logits = self._positions, self._logits[0]
        length, width = self._prompt_tokens, self._width
        start = time.perf_counter()
        ids[:length] = prompt
        positions[:] = range(width)
        mask[:] = 0
        mask[0, :width] = 1
        session.run_with_iobinding(self._prefill)
        token = int(self._logits[length - 1].argmax())
        mask[0, length:] = 0
        first = time.perf_counter()
        tokens = [token]
        for position in range(length, length + self._new_tokens - 1):
            ids[0] = token
            positions[0] = position
            mask[0, position] = 1
            session.run_with_iobinding(binding)
            token = int(logits.argmax())
            tokens.append(token)
        return BareRun(tokens, first - start, time.perf_counter() - first)

    def _allocate(self) -> dict[str, npt.NDArray[Any]]:
        """Zeros for every past tensor, [1, kv_heads, the mask's width, head_dim]."""
        cache: dict[str, npt.NDArray[Any]] = {}
        for item in self._session.get_inputs():
            if item.name.startswith("past_key_values."):
                _, heads, _, head_dim = item.shape
                extent = (1, heads, self._mask.shape[1], head_dim)
                cache[item.name] = np.zeros(extent, _FLOATS[item.type])
        return cache

    def _bind(self, width: int) -> ort.IOBinding:
        binding = self._session.io_binding()
        fed = {"input_ids": self._ids, "position_ids": self._positions}
        for name in {item.name for item in self._session.get_inputs()} & fed.keys():
            binding.bind_input(name, "cpu", 0, np.int64, (1, width), fed[name].ctypes.data)
        binding.bind_input(
            "attention_mask", "cpu", 0, np.int64, self._mask.shape, self._mask.ctypes.data
        )
        for past, buffer in self._cache.items():
            present = past.replace("past_key_values", "present")
            place = ("cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)
        shape = (1, width, self._logits.shape[1])
        binding.bind_output("logits", "cpu", 0, np.float32, shape, self._logits.ctypes.data)
        return binding
