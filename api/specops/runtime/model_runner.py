"""The one entry to a model: a batch of tokens in, logits of those that need them out.

A draft head, which reads the target's hidden states, is run here likewise.

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
from specops.runtime.session import ModelLoadError, Session, shared_value

Floats = npt.NDArray[np.float32]

_INPUTS = frozenset(("input_ids", "spans", "block_tables", "cache", "logit_rows"))
_LOGITS, _HIDDEN = "logits", "hidden"
_HEAD_INPUTS, _HEAD_OUTPUTS = ["codes", "states"], ["logits", "next_states"]
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


class HiddenStates:
    """One row per slot, of the last token that its cache holds.

    Args:
        num_slots: rows.
        size: of a hidden state.

    Attributes:
        rows: [num_slots, size].
        chosen: [num_slots], the tokens that were chosen by them.
        fresh: the slots whose states are new to the one that reads, who takes them out.
    """

    def __init__(self, num_slots: int, size: int) -> None:
        self.rows: Floats = np.zeros((num_slots, size), np.float32)
        self.chosen = [0] * num_slots
        self.fresh: set[int] = set()
        self._lengths = [0] * num_slots

    def keep(self, slot: int, state: Floats, length: int, chosen: int) -> None:
        """Take over the state [size] after the first `length` tokens, and the token behind it."""
        self.rows[slot] = state
        self.chosen[slot] = chosen
        self.fresh.add(slot)
        self._lengths[slot] = length

    def has(self, slot: int, length: int) -> bool:
        """Whether a slot's row is that after the first `length` tokens of its sequence."""
        return self._lengths[slot] == length

    def forget(self, slot: int) -> None:
        """The slot's sequence has ended."""
        self._lengths[slot] = 0
        self.fresh.discard(slot)


class ModelRunner:
    """Forward passes of one model over its KV cache.

    Args:
        session: a rewritten graph.
        cache: the model's own.
        max_tokens: most tokens of one pass.

    Attributes:
        vocab_size: entries of the logits.
        hidden_size: entries of a hidden state; 0 where the graph does not give them.

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
        self._logits: Floats = np.empty((max_tokens, self.vocab_size), np.float32)
        self._io = session.io_binding()
        for name, array in (
            ("spans", self._spans),
            ("block_tables", cache.block_tables),
            ("cache", cache.descriptor),
        ):
            self._io.bind_ortvalue_input(name, shared_value(array))
        self.hidden_size = _hidden_size(session)
        self._hidden: Floats = np.empty((max_tokens, self.hidden_size), np.float32)
        self._kept: HiddenStates | None = None
        self._by_tokens: dict[int, list[tuple[str, ort.OrtValue]]] = {}
        self._by_logits: dict[int, list[ort.OrtValue]] = {}
        self._bound_tokens, self._bound_logits = -1, (-1, False)

    def forward(self, batch: Batch) -> Floats:
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
        if (wanted, hidden := batch.hidden or self._kept is not None) != self._bound_logits:
            self._bind_logits(wanted, hidden)
        self._session.run_with_iobinding(self._io)
        return self._logits[:wanted]

    def give_hidden(self) -> HiddenStates:
        """Have all passes from now on give the last hidden states, too.

        Returns:
            Where `keep_hidden` keeps them.

        Raises:
            ModelLoadError: the graph does not give them.
        """
        if not self.hidden_size:
            raise ModelLoadError(
                "the model's graph does not give its last hidden states, which a draft head reads"
            )
        if self._kept is None:
            self._kept = HiddenStates(self.cache.num_slots, self.hidden_size)
        return self._kept

    def hidden_states(self, row: int, count: int) -> Floats:
        """[count, hidden_size] of rows of the last pass's logits, where its batch wanted them."""
        return self._hidden[row : row + count]

    def keep_hidden(self, slot: int, row: int, length: int, chosen: int) -> None:
        """Keep what the product read that gave a row of the last pass's logits, if that is wanted.

        Args:
            slot: whose it is.
            row: of the logits.
            length: tokens of the slot's sequence up to the one that the row is of.
            chosen: the token that was chosen by the row.
        """
        if self._kept is not None:
            self._kept.keep(slot, self._hidden[row], length, chosen)

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
            values = [("input_ids", shared_value(self._ids[None, :count]))]
            if self._has_positions:
                values.append((_POSITIONS, shared_value(self._positions[None, :count])))
            self._by_tokens[count] = values
        for name, value in values:
            self._io.bind_ortvalue_input(name, value)
        self._bound_tokens = count

    def _bind_logits(self, wanted: int, hidden: bool) -> None:
        values = self._by_logits.get(wanted)
        if values is None:
            values = [
                shared_value(self._logit_rows[:wanted]),
                shared_value(self._logits[None, :wanted]),
            ]
            if self.hidden_size:
                values.append(shared_value(self._hidden[None, :wanted]))
            self._by_logits[wanted] = values
        if not hidden:
            self._io.clear_binding_outputs()
        self._io.bind_ortvalue_input("logit_rows", values[0])
        for name, value in zip((_LOGITS, _HIDDEN)[: 1 + hidden], values[1:], strict=False):
            self._io.bind_ortvalue_output(name, value)
        self._bound_logits = (wanted, hidden)


class DraftHead:
    """Runs a head.

    Args:
        session: its laid out graph.
        num_slots: most guesses of one pass.
        hidden_size: of the target's states.
        table_size: tokens that it can guess; one entry more stands for all others.

    Attributes:
        codes: [num_slots], the last tokens' places in the table; the table's size for all others.
        states: [num_slots, hidden_size], that they were chosen by.
        next_states: [num_slots, hidden_size], that the guesses follow from.

    Raises:
        ModelLoadError: the graph is none of a head for such a target.
    """

    def __init__(
        self, session: Session, *, num_slots: int, hidden_size: int, table_size: int
    ) -> None:
        self._session = session
        found = {item.name: item.shape[-1] for item in session.get_outputs()}
        inputs = [item.name for item in session.get_inputs()]
        sizes = [table_size + 1, hidden_size]
        if inputs != _HEAD_INPUTS or found != dict(zip(_HEAD_OUTPUTS, sizes, strict=True)):
            raise ModelLoadError(
                f"the head's graph takes {inputs} and gives {found}, not {sizes}: make it again "
                "with `specops draft make`"
            )
        self.codes: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.states: Floats = np.zeros((num_slots, hidden_size), np.float32)
        self.next_states: Floats = np.zeros_like(self.states)
        self._logits: Floats = np.zeros((num_slots, table_size + 1), np.float32)
        self._bindings: dict[int, ort.IOBinding] = {}

    def guess(self, count: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Guess what follows the first `count` of `codes` and `states`.

        `next_states` then has the guesses' own.

        Returns:
            [count] places of the likeliest tokens in the table, and their probabilities.
        """
        binding = self._bindings.get(count)
        if binding is None:
            binding = self._bindings[count] = self._bind(count)
        self._session.run_with_iobinding(binding)
        logits = self._logits[:count]
        best = logits[:, :-1].argmax(1)
        top = logits.max(1, keepdims=True)
        shares = np.exp(logits - top)
        return best, shares[np.arange(count), best] / shares.sum(1)

    def _bind(self, count: int) -> ort.IOBinding:
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("codes", shared_value(self.codes[:count]))
        binding.bind_ortvalue_input("states", shared_value(self.states[:count]))
        binding.bind_ortvalue_output("logits", shared_value(self._logits[:count]))
        binding.bind_ortvalue_output("next_states", shared_value(self.next_states[:count]))
        return binding


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
    names = [item.name for item in outputs]
    if names not in ([_LOGITS], [_LOGITS, _HIDDEN]) or not isinstance(outputs[0].shape[-1], int):
        found = ", ".join(f"{item.name} {item.shape}" for item in outputs)
        raise ModelLoadError(f"the graph's output must be logits of a fixed size, not {found}")
    return int(outputs[0].shape[-1])


def _hidden_size(session: Session) -> int:
    """Entries of the graph's hidden states; 0 where it does not give them."""
    outputs = session.get_outputs()
    return next((int(item.shape[-1]) for item in outputs if item.name == _HIDDEN), 0)
