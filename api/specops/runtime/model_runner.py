"""The one entry to a model: a batch of tokens in, logits of those that need them out.

ONNX Runtime runs the graph; its tensors lie in arrays made once. The KV cache is reached through
its block tables and its address, so that between two passes only those tensors are bound again
whose size has changed: the token ids and the logits, 0.4 us each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.runtime.batch import Batch
from specops.runtime.kernels import KV_DTYPES
from specops.runtime.kv_cache import CacheShape, KvCache
from specops.runtime.session import ModelLoadError, Session

Logits = npt.NDArray[np.float32]

_INPUTS = frozenset(("input_ids", "spans", "block_tables", "cache", "logit_rows"))
_POSITIONS = "position_ids"  # only of models that learn a vector per position
_SIZES = ("specops.layers", "specops.kv_heads", "specops.head_size")


def cache_shape(session: Session, dtype: str) -> CacheShape:
    """What a rewritten graph's cache is like, by its metadata.

    Args:
        session: a loaded graph.
        dtype: of the cache's elements, one of `kernels.KV_DTYPES`.

    Raises:
        ModelLoadError: the metadata are missing, or are no sizes.
        ValueError: there is no such type.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"a cache's elements are {', '.join(KV_DTYPES)}, not {dtype}")
    metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
    try:
        layers, kv_heads, head_size = (int(metadata[name]) for name in _SIZES)
    except (KeyError, ValueError) as error:
        raise ModelLoadError(
            f"the graph's metadata do not say {', '.join(_SIZES)} ({error!r}): it was not rewritten"
        ) from error
    return CacheShape(layers, kv_heads, head_size, dtype)


class ModelRunner:
    """Forward passes of one model over its KV cache.

    Args:
        session: a rewritten graph.
        cache: the model's own.
        max_tokens: most tokens of one pass.

    Attributes:
        vocab_size: entries of the logits.

    Raises:
        ModelLoadError: the graph has other inputs, or does not fix its vocabulary.
    """

    def __init__(self, session: Session, cache: KvCache, *, max_tokens: int) -> None:
        self.cache = cache
        self.max_tokens = max_tokens
        self._session = session
        self._has_positions = _check_inputs(session)
        self.vocab_size = _vocabulary(session)
        self._ids = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int64)
        # Always all slots: the operator skips spans of no token.
        self._spans = np.zeros((cache.num_slots, 3), np.int64)
        self._logit_rows = np.zeros(max_tokens, np.int64)
        # As many as there can be: pages that no pass writes take no memory.
        self._logits: Logits = np.empty((max_tokens, self.vocab_size), np.float32)
        self._io = session.io_binding()
        for name, array in (
            ("spans", self._spans),
            ("block_tables", cache.block_tables),
            ("cache", cache.descriptor),
        ):
            self._io.bind_ortvalue_input(name, _shared(array))
        self._by_tokens: dict[int, list[tuple[str, ort.OrtValue]]] = {}
        self._by_logits: dict[int, tuple[ort.OrtValue, ort.OrtValue]] = {}
        self._bound_tokens = self._bound_logits = -1

    def forward(self, batch: Batch) -> Logits:
        """Compute a batch: its keys and values go into the cache, whose lengths stay as they are.

        Args:
            batch: spans of different slots; their positions are reserved.

        Returns:
            [batch.num_logits, vocab_size] logits in the order of the spans, valid until the next
            pass.

        Raises:
            ValueError: there are no tokens or too many, or a position is not the slot's to write.
        """
        count, wanted = len(batch.tokens), len(batch.logit_rows)
        if not 0 < count <= self.max_tokens:
            raise ValueError(f"a pass takes 1 to {self.max_tokens} tokens, not {count}")
        self._fill(batch)
        self._ids[:count] = batch.tokens
        self._logit_rows[:wanted] = batch.logit_rows
        if count != self._bound_tokens:
            self._bind_tokens(count)
        if wanted != self._bound_logits:
            self._bind_logits(wanted)
        self._session.run_with_iobinding(self._io)
        return self._logits[:wanted]

    def _fill(self, batch: Batch) -> None:
        """Write spans, and positions where the graph asks for them."""
        rows: list[int] = []
        positions: list[int] = []
        for span in batch.spans:
            slot, start, count = span.slot, span.start, len(span.tokens)
            low, high = self.cache.writable(slot)
            if not low <= start <= high - count:
                raise ValueError(
                    f"positions {start} to {start + count - 1} of slot {slot} are not reserved: "
                    f"a pass may write {low} to {high - 1}"
                )
            rows += (slot, start, count)
            if self._has_positions:
                positions += range(start, start + count)
        spans = self._spans.reshape(-1)
        spans[: len(rows)] = rows
        spans[len(rows) :] = 0
        if self._has_positions:
            self._positions[: len(positions)] = positions

    def _bind_tokens(self, count: int) -> None:
        values = self._by_tokens.get(count)
        if values is None:
            values = [("input_ids", _shared(self._ids[None, :count]))]
            if self._has_positions:
                values.append((_POSITIONS, _shared(self._positions[None, :count])))
            self._by_tokens[count] = values
        for name, value in values:
            self._io.bind_ortvalue_input(name, value)
        self._bound_tokens = count

    def _bind_logits(self, wanted: int) -> None:
        values = self._by_logits.get(wanted)
        if values is None:
            values = _shared(self._logit_rows[:wanted]), _shared(self._logits[None, :wanted])
            self._by_logits[wanted] = values
        self._io.bind_ortvalue_input("logit_rows", values[0])
        self._io.bind_ortvalue_output("logits", values[1])
        self._bound_logits = wanted


def _shared(array: npt.NDArray[np.generic]) -> ort.OrtValue:
    """A tensor in the array's own memory."""
    value = ort.OrtValue.ortvalue_from_numpy(array)
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError("ONNX Runtime has copied an array that passes write to")
    return value


def _check_inputs(session: Session) -> bool:
    """Whether the graph asks for positions.

    Raises:
        ModelLoadError: it does not ask for what a runner gives.
    """
    names = {item.name for item in session.get_inputs()}
    if names - {_POSITIONS} != _INPUTS:
        raise ModelLoadError(
            f"the graph's inputs are {', '.join(sorted(names))}, not {', '.join(sorted(_INPUTS))}"
        )
    return _POSITIONS in names


def _vocabulary(session: Session) -> int:
    """Entries of the graph's logits.

    Raises:
        ModelLoadError: it has other outputs, or leaves their number open.
    """
    outputs = session.get_outputs()
    if [item.name for item in outputs] != ["logits"] or not isinstance(outputs[0].shape[-1], int):
        found = ", ".join(f"{item.name} {item.shape}" for item in outputs)
        raise ModelLoadError(f"the graph's output must be logits of a fixed size, not {found}")
    return int(outputs[0].shape[-1])
