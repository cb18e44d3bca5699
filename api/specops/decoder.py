"""Forward passes over an ONNX graph whose KV cache is written in place.

Binding a tensor costs tens of microseconds and a graph
has four per layer, so the bindings of a step's shape are made once and kept; all of them share
the same token, mask and logits memory, since one step runs at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.kv_cache import CacheShape, KvCache
from specops.session import ModelLoadError

Logits = npt.NDArray[np.float32]

# The mask's length is rounded up to this many tokens, so that a binding outlives 64 tokens.
MASK_BUCKET = 64
_KEPT_BINDINGS = 256

_LOGITS_START = "logits_start"  # what `specops.export` calls the first position with logits

WIDEST_ALIGN = 8  # spare tokens round a pass up to a multiple of at most this


def cache_shape(session: ort.InferenceSession) -> CacheShape:
    """What a loaded graph's cache is like.

    Raises:
        ModelLoadError: the graph has no such inputs, or leaves their sizes open.
    """
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


class _Shape(NamedTuple):
    """What decides a binding: the graph, rows [first, first + batch), tokens a row and logits."""

    prefill: bool
    first: int
    batch: int
    width: int
    with_logits: int


class _Binding:
    """A step's shape bound to memory; `mask_width` of the mask are bound."""

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
        prefill_session: the graph in a form that reads prompts faster; None: the graph itself.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        *,
        rows: int,
        capacity: int,
        max_width: int,
        prefill_session: ort.InferenceSession | None = None,
    ) -> None:
        self._session = session
        self._prefill_session = prefill_session or session
        self.cache = KvCache(cache_shape(session), rows=rows, capacity=capacity)
        self.max_width = max_width
        self.vocab_size = int(session.get_outputs()[0].shape[-1])
        names = {item.name for item in session.get_inputs()}
        self._position_ids = "position_ids" in names
        optional = {item.name for item in session.get_overridable_initializers()}
        self._cuts_logits = _LOGITS_START in optional  # published graphs do not
        most = max(rows, max_width + -max_width % WIDEST_ALIGN)
        self._ids = np.zeros(most, np.int64)
        self._positions = np.zeros(most, np.int64)
        self._mask = np.zeros(rows * capacity, np.int64)
        self._logits_start = np.zeros(1, np.int64)
        self._logits: Logits = np.zeros((most, self.vocab_size), np.float32)
        self._bindings: OrderedDict[_Shape, _Binding] = OrderedDict()

    @property
    def one_graph(self) -> bool:
        """Prompts are read by the graph that decodes: keys and values are the same by either."""
        return self._prefill_session is self._session

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
        logits = self._run(first_row, tokens, lengths)
        for row in range(first_row, first_row + batch):
            self.cache.lengths[row] += 1
        return logits

    def extend(
        self, row: int, tokens: Sequence[int], *, align: int = 1, logits: int | None = None
    ) -> Logits:
        """Feed several tokens to one row.

        Args:
            row: the row.
            tokens: [S] the row's next tokens.
            align: the pass's width is rounded up to a multiple of it with spare tokens, whose
                keys and values are rolled back. See `exactness`.
            logits: how many tokens need logits, counted from the last; None: all. The graph's head
                is computed for no more than these, rounded up to `align`, where it can be.

        Returns:
            [S, V] logits, or as many as were asked for, valid until the next pass.

        Raises:
            ValueError: the tokens do not fit into the row or the pass.
        """
        return self._extend(row, tokens, align, logits, prefill=False)

    def prefill(self, row: int, tokens: Sequence[int], *, align: int = 1) -> Logits:
        """Feed a chunk of a prompt to one row, through the graph that reads prompts.

        Args:
            row: the row.
            tokens: [S] the row's next tokens.
            align: see `extend`.

        Returns:
            [1, V] logits of the last token, valid until the next pass.

        Raises:
            ValueError: the tokens do not fit into the row or the pass.
        """
        return self._extend(row, tokens, align, 1, prefill=True)

    def _extend(
        self, row: int, tokens: Sequence[int], align: int, logits: int | None, *, prefill: bool
    ) -> Logits:
        first = 0 if logits is None else max(0, len(tokens) - logits)
        # Those before it in its group of `align` stay: kernels that pair tokens pair the same ones.
        start = first // align * align if self._cuts_logits else 0
        padded = [*tokens, *([tokens[-1]] * (-len(tokens) % align))]
        length = self.cache.lengths[row]
        found = self._run(row, padded, [length], start, prefill=prefill)
        self.cache.lengths[row] = length + len(tokens)
        return found[first - start : len(tokens) - start]

    def _run(
        self,
        first: int,
        tokens: Sequence[int],
        lengths: Sequence[int],
        start: int = 0,
        *,
        prefill: bool = False,
    ) -> Logits:
        """Feed the rows from `first` on, equally many tokens to each of the lengths.

        Returns:
            [batch * (width - start), V] logits, of each row's tokens from `start` on.
        """
        count, batch = len(tokens), len(lengths)
        width = count // batch
        longest = max(lengths) + width
        if longest > self.cache.capacity:
            raise ValueError(f"{longest} tokens do not fit into {self.cache.capacity}")
        if count > len(self._ids):
            raise ValueError(f"a pass takes at most {len(self._ids)} tokens, not {count}")
        self._ids[:count] = tokens
        mask_width = self._mask_width(longest)
        mask = self._mask[: batch * mask_width].reshape(batch, mask_width)
        mask[:] = 0
        for index, length in enumerate(lengths):
            mask[index, : length + width] = 1
            if self._position_ids:
                place = index * width
                self._positions[place : place + width] = range(length, length + width)
        self._logits_start[0] = start
        binding = self._binding(_Shape(prefill, first, batch, width, width - start))
        if binding.mask_width != mask_width:
            binding.io.bind_input(
                "attention_mask", "cpu", 0, np.int64, mask.shape, self._mask.ctypes.data
            )
            binding.mask_width = mask_width
        self._of(prefill).run_with_iobinding(binding.io)
        return self._logits[: count - batch * start]

    def _mask_width(self, tokens: int) -> int:
        rounded = -(-tokens // MASK_BUCKET) * MASK_BUCKET
        return min(rounded, self.cache.capacity)

    def _of(self, prefill: bool) -> ort.InferenceSession:
        return self._prefill_session if prefill else self._session

    def _binding(self, shape: _Shape) -> _Binding:
        binding = self._bindings.get(shape)
        if binding is not None:
            self._bindings.move_to_end(shape)
            return binding
        binding = self._bindings[shape] = _Binding(self._bind(shape))
        if len(self._bindings) > _KEPT_BINDINGS:
            self._bindings.popitem(last=False)
        return binding

    def _bind(self, shape: _Shape) -> ort.IOBinding:
        """Bind everything but the mask, whose length changes."""
        io = self._of(shape.prefill).io_binding()
        tokens = (shape.batch, shape.width)
        io.bind_input("input_ids", "cpu", 0, np.int64, tokens, self._ids.ctypes.data)
        if self._position_ids:
            io.bind_input("position_ids", "cpu", 0, np.int64, tokens, self._positions.ctypes.data)
        if self._cuts_logits:
            address = self._logits_start.ctypes.data
            io.bind_input(_LOGITS_START, "cpu", 0, np.int64, (1,), address)
        for layer, buffers in enumerate(self.cache.buffers):
            for part, buffer in zip(("key", "value"), buffers, strict=True):
                extent = (shape.batch, *buffer.shape[1:])
                address = buffer[shape.first :].ctypes.data
                # The same address as past and as present: the operator writes in place.
                past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
                io.bind_input(past, "cpu", 0, buffer.dtype, extent, address)
                io.bind_output(present, "cpu", 0, buffer.dtype, extent, address)
        extent = (shape.batch, shape.with_logits, self.vocab_size)
        io.bind_output("logits", "cpu", 0, np.float32, extent, self._logits.ctypes.data)
        return io
