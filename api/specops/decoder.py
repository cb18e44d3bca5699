"""Forward passes over an ONNX graph whose KV cache is written in place.

Binding a tensor costs tens of microseconds and a graph
has four per layer, so the bindings of a step's shape are made once and kept; all of them share
the same token, mask and logits memory, since one step runs at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.kv_cache import CacheShape, KvCache
from specops.session import ModelLoadError

Logits = npt.NDArray[np.float32]

# The mask's length is rounded up to this many tokens, so that a binding outlives 64 tokens.
MASK_BUCKET = 64
_KEPT_BINDINGS = 256

WIDEST_ALIGN = 8  # spare tokens round a pass up to a multiple of at most this


def _cache_shape(session: ort.InferenceSession) -> CacheShape:
    keys = [item for item in session.get_inputs() if item.name.endswith(".key")]
    if not keys:
        raise ModelLoadError("the graph has no past_key_values.{layer}.key inputs")
    _, kv_heads, _, head_dim = keys[0].shape
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int):
        raise ModelLoadError(f"{keys[0].name} must fix its heads and head size: {keys[0].shape}")
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}.get(keys[0].type)
    if dtype is None:
        raise ModelLoadError(f"{keys[0].name} is {keys[0].type}; float and float16 are supported")
    return CacheShape(len(keys), kv_heads, head_dim, np.dtype(dtype))


class _Binding:
    """A step's shape bound to memory: rows [first, first + batch), `width` tokens each."""

    def __init__(self, io: ort.IOBinding) -> None:
        self.io = io
        self.mask_width = 0


class Decoder:
    """Runs a graph over the rows of its cache.

    Two kinds of pass: `decode`, one token for each of several adjacent rows, and `extend`,
    several tokens of one row (GroupQueryAttention allows no other on the CPU). Both return
    logits in memory that the next pass overwrites.

    Args:
        session: a loaded graph.
        rows: rows of the cache.
        capacity: tokens per row.
        max_width: most tokens that one `extend` may take.
    """

    def __init__(
        self, session: ort.InferenceSession, *, rows: int, capacity: int, max_width: int
    ) -> None:
        self._session = session
        self.cache = KvCache(_cache_shape(session), rows=rows, capacity=capacity)
        self.max_width = max_width
        self.vocab_size = int(session.get_outputs()[0].shape[-1])
        names = {item.name for item in session.get_inputs()}
        self._position_ids = "position_ids" in names
        most = max(rows, max_width + -max_width % WIDEST_ALIGN)
        self._ids = np.zeros(most, np.int64)
        self._positions = np.zeros(most, np.int64)
        self._mask = np.zeros(rows * capacity, np.int64)
        self._logits: Logits = np.zeros((most, self.vocab_size), np.float32)
        self._bindings: OrderedDict[tuple[int, int, int], _Binding] = OrderedDict()

    def decode(self, first_row: int, tokens: Sequence[int]) -> Logits:
        """Feed one token to each of the rows from `first_row` on.

        Args:
            first_row: the first row of the batch.
            tokens: [B] the token that each row goes on with.

        Returns:
            [B, V] logits, valid until the next pass.

        Raises:
            ValueError: a row is full.
        """
        batch = len(tokens)
        lengths = self.cache.lengths[first_row : first_row + batch]
        logits = self._run(first_row, batch, 1, tokens, lengths)
        for row in range(first_row, first_row + batch):
            self.cache.lengths[row] += 1
        return logits

    def extend(self, row: int, tokens: Sequence[int], *, align: int = 1) -> Logits:
        """Feed several tokens to one row.

        Args:
            row: the row.
            tokens: [S] the row's next tokens.
            align: the pass's width is rounded up to a multiple of it with spare tokens, whose
                keys and values are rolled back. See `exactness`.

        Returns:
            [S, V] logits, valid until the next pass.

        Raises:
            ValueError: the tokens do not fit into the row or the pass.
        """
        spare = -len(tokens) % align
        padded = [*tokens, *([tokens[-1]] * spare)]
        length = self.cache.lengths[row]
        logits = self._run(row, 1, len(padded), padded, [length])
        self.cache.lengths[row] = length + len(tokens)
        return logits[: len(tokens)]

    def _run(
        self, first: int, batch: int, width: int, tokens: Sequence[int], lengths: Sequence[int]
    ) -> Logits:
        longest = max(lengths) + width
        if longest > self.cache.capacity:
            raise ValueError(f"{longest} tokens do not fit into {self.cache.capacity}")
        if batch * width > len(self._ids):
            raise ValueError(f"a pass takes at most {len(self._ids)} tokens, not {batch * width}")
        count = batch * width
        self._ids[:count] = tokens
        mask_width = self._mask_width(longest)
        mask = self._mask[: batch * mask_width].reshape(batch, mask_width)
        mask[:] = 0
        for index, length in enumerate(lengths):
            mask[index, : length + width] = 1
            if self._position_ids:
                start = index * width
                self._positions[start : start + width] = range(length, length + width)
        binding = self._binding(first, batch, width)
        if binding.mask_width != mask_width:
            binding.io.bind_input(
                "attention_mask", "cpu", 0, np.int64, mask.shape, self._mask.ctypes.data
            )
            binding.mask_width = mask_width
        self._session.run_with_iobinding(binding.io)
        return self._logits[:count]

    def _mask_width(self, tokens: int) -> int:
        rounded = -(-tokens // MASK_BUCKET) * MASK_BUCKET
        return min(rounded, self.cache.capacity)

    def _binding(self, first: int, batch: int, width: int) -> _Binding:
        key = (first, batch, width)
        binding = self._bindings.get(key)
        if binding is not None:
            self._bindings.move_to_end(key)
            return binding
        binding = self._bindings[key] = _Binding(self._bind(first, batch, width))
        if len(self._bindings) > _KEPT_BINDINGS:
            self._bindings.popitem(last=False)
        return binding

    def _bind(self, first: int, batch: int, width: int) -> ort.IOBinding:
        """Bind everything but the mask, whose length changes."""
        io = self._session.io_binding()
        tokens = (batch, width)
        io.bind_input("input_ids", "cpu", 0, np.int64, tokens, self._ids.ctypes.data)
        if self._position_ids:
            io.bind_input("position_ids", "cpu", 0, np.int64, tokens, self._positions.ctypes.data)
        for layer, buffers in enumerate(self.cache.buffers):
            for part, buffer in zip(("key", "value"), buffers, strict=True):
                shape = (batch, *buffer.shape[1:])
                address = buffer[first:].ctypes.data
                # The same address as past and as present: the operator writes in place.
                past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
                io.bind_input(past, "cpu", 0, buffer.dtype, shape, address)
                io.bind_output(present, "cpu", 0, buffer.dtype, shape, address)
        shape = (batch, width, self.vocab_size)
        io.bind_output("logits", "cpu", 0, np.float32, shape, self._logits.ctypes.data)
        return io
