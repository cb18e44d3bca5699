"""The fastest greedy loop over a graph that we know how to write: what the engine is held against.

ONNX Runtime used directly, nothing of the engine: bindings made once, keys and values written in
place, one stream, one token a step, no text, no stop, no statistics. Whatever the engine adds to
this loop's time is the engine's overhead.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.kernels import BLOCK_TOKENS, KV_DTYPES, block_bytes


@dataclass(frozen=True, slots=True)
class BareRun:
    """Tokens that one run generated, and the seconds until the first and from there to the last."""

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float


class BareLoop:
    """Greedy continuation of prompts of one length, to one number of new tokens.

    Args:
        session: of a graph as `specops.graphs.load_graph` opens it.
        prompt_tokens: tokens per prompt, computed in one pass.
        new_tokens: tokens to generate, at least 1.
        kv_dtype: elements of the KV cache, a key of `KV_DTYPES`.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        *,
        prompt_tokens: int,
        new_tokens: int,
        kv_dtype: str,
    ) -> None:
        self._session = session
        self._prompt_tokens, self._new_tokens = prompt_tokens, new_tokens
        blocks = -(-(prompt_tokens + new_tokens) // BLOCK_TOKENS)
        told = session.get_modelmeta().custom_metadata_map
        shape = [int(told[f"specops.{name}"]) for name in ("layers", "kv_heads", "head_size")]
        size = block_bytes(*shape, kv_dtype)
        self._pool = np.frombuffer(mmap.mmap(-1, blocks * size), np.uint8)
        self._fixed = {
            "block_tables": np.arange(blocks, dtype=np.int64)[None],
            "cache": np.array(
                [self._pool.ctypes.data, blocks, size, KV_DTYPES[kv_dtype]], np.int64
            ),
        }
        vocab = session.get_outputs()[0].shape[-1]
        self._logits = np.zeros(vocab, np.float32)
        self._prefill = _Pass(session, prompt_tokens, self._fixed, self._logits)
        self._decode = _Pass(session, 1, self._fixed, self._logits)

    def run(self, prompt: Sequence[int]) -> BareRun:
        """Continue a prompt of the length that the loop was made for."""
        session, decode, logits = self._session, self._decode, self._logits
        binding, ids, positions, span = decode.binding, decode.ids, decode.positions, decode.span
        start = time.perf_counter()
        self._prefill.ids[0] = prompt
        session.run_with_iobinding(self._prefill.binding)
        token = int(logits.argmax())
        first = time.perf_counter()
        tokens = [token]
        for position in range(self._prompt_tokens, self._prompt_tokens + self._new_tokens - 1):
            ids[0, 0] = token
            positions[0, 0] = span[0, 1] = position
            session.run_with_iobinding(binding)
            token = int(logits.argmax())
            tokens.append(token)
        return BareRun(tokens, first - start, time.perf_counter() - first)


class _Pass:
    """The buffers of passes of one width, bound for good; the last token's logits are wanted."""

    def __init__(
        self,
        session: ort.InferenceSession,
        width: int,
        fixed: dict[str, npt.NDArray[np.int64]],
        logits: npt.NDArray[np.float32],
    ) -> None:
        self.ids = np.zeros((1, width), np.int64)
        self.positions = np.arange(width, dtype=np.int64)[None]
        self.span = np.array([[0, 0, width]], np.int64)
        self._held: dict[str, npt.NDArray[Any]] = {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "spans": self.span,
            "logit_rows": np.array([width - 1], np.int64),
            **fixed,
        }
        self.binding = session.io_binding()
        for item in session.get_inputs():
            array = self._held[item.name]
            self.binding.bind_input(item.name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        shape = (1, 1, len(logits))
        self.binding.bind_output("logits", "cpu", 0, np.float32, shape, logits.ctypes.data)
