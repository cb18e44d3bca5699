"""Runs a model: a batch of tokens goes in, logits come out for the tokens that need them.

ONNX Runtime runs the graph on arrays that are allocated once. The graph reaches the KV cache
through block tables and an address, so tensors are bound once per size of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.runtime import layer_shapes
from specops.runtime.batch import Batch
from specops.runtime.kernels import KV_DTYPES
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.session import ModelLoadError, Session, bind

Floats = npt.NDArray[np.float32]

_INPUTS = frozenset(("input_ids", "spans", "block_tables", "cache", "logit_rows"))
_LOGITS, _HIDDEN = "logits", "hidden"
_POSITIONS = "position_ids"  # in models with position embeddings
_STATE_ROWS, _STATES = "state_rows", "states"  # in targets with layer inputs that a head reads
_FINAL_ROWS = "final_rows"  # in targets with final states that an MTP block reads
_NEXT_STATES = "next_states"  # in draft heads, whose input is `states`
_MAX_BINDINGS = 256  # more sizes than decoding has; prompts have many others
_KEPT_INPUTS = "kept_inputs"  # in models with recurrent layers
_PROGRESS = "progress"  # in models with recurrent states
_LOGIT_SPANS = "logit_spans"  # spans of the logit rows, if the last layers have no cache
_SCORED_ROWS = "scored_rows"  # in models that output hidden states: the rows that need logits


def cache_shape(session: Session, dtype: str) -> CacheShape:
    """Read the sizes of a rewritten graph's cache from its metadata.

    Args:
        session: a loaded graph.
        dtype: element type of the cache, a key of `kernels.KV_DTYPES`.

    Raises:
        ModelLoadError: the metadata are missing or wrong.
        ValueError: there is no such type.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"a cache's elements are {', '.join(KV_DTYPES)}, not {dtype}")
    try:
        return CacheShape.of(layer_shapes.parse(session.get_modelmeta().custom_metadata_map), dtype)
    except ValueError as error:
        raise ModelLoadError(f"the graph was not rewritten: {error}") from error


class AuxHiddenStates:
    """Passes the inputs of the target's layers to the draft head that follows its requests.

    Args:
        size: floats per token.

    Attributes:
        size: floats per token.
        followed: slots whose states the head needs.
        receive: called with a slot, the position of the first row, and rows [n, size] of final
            tokens, valid until the target's next pass. A row has the inputs of all layers that the
            head reads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.followed: set[int] = set()
        self.receive: Callable[[int, int, Floats], None] = lambda slot, start, rows: None


class ModelRunner:
    """Forward passes of one model over its KV cache.

    Args:
        session: a rewritten graph.
        cache: the model's cache.
        max_tokens: maximum number of tokens in a pass.

    Attributes:
        vocab_size: width of the logits.
        hidden_size: size of a hidden state; 0: the graph does not output hidden states.
        states: layer inputs that the graph outputs for a draft head; None: it outputs none.
        given_states: [max_tokens, size], the second input of a draft head; None: no draft head.
        next_states: [max_tokens, size], output of a draft head's last pass, in the order of the
            logits; None: no draft head.

    Raises:
        ModelLoadError: the graph has other inputs or outputs.
    """

    def __init__(self, session: Session, cache: KvCache, *, max_tokens: int) -> None:
        self.cache = cache
        self.max_tokens = max_tokens
        self._session = session
        self._given = _known_inputs(session)
        sizes = _output_sizes(session)
        self.vocab_size, self.hidden_size = sizes[_LOGITS], sizes.get(_HIDDEN, 0)
        self._ids = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int64)
        # There are always as many spans as slots: the operator skips empty ones.
        self._spans = np.zeros(3 * cache.num_slots, np.int64)
        self._progress = np.zeros(2 * cache.num_slots, np.int64)
        self._logit_spans = np.zeros(3 * cache.num_slots, np.int64)
        self._logit_rows = np.zeros(max_tokens, np.int64)
        self._scored_rows = np.zeros(max_tokens, np.int64)
        # Pages that no pass writes take no memory.
        self._logits: Floats = np.empty((max_tokens, self.vocab_size), np.float32)
        self._hidden: Floats = np.empty((max_tokens, self.hidden_size), np.float32)
        self.states = AuxHiddenStates(sizes[_STATES]) if _STATES in sizes else None
        # The input that selects the rows of states; the logits are computed from final rows.
        self._rows_input = next(iter(self._given & {_STATE_ROWS, _FINAL_ROWS}), "")
        self._state_rows = np.zeros(max_tokens, np.int64)
        self._states: Floats = np.empty((max_tokens, sizes.get(_STATES, 0)), np.float32)
        self._places: dict[int, tuple[int, int]] = {}  # by slot: its first row and position
        given = given_size(session)
        self.given_states, self.next_states = (
            np.zeros((max_tokens, size), np.float32) if given else None
            for size in (given, sizes.get(_NEXT_STATES, 0))
        )
        self._bindings: dict[tuple[int, int, int, int, bool], ort.IOBinding] = {}

    def forward(self, batch: Batch) -> Floats:
        """Run a batch. This writes keys and values to the cache, but does not commit tokens.

        Args:
            batch: spans of different slots, at reserved positions.

        Returns:
            [batch.num_logits, vocab_size] logits in the order of the spans, valid until the next
            pass.

        Raises:
            ValueError: there are no tokens or too many, or a position is not reserved.
        """
        count, num_rows = len(batch.tokens), len(batch.logit_rows)
        if not 0 < count <= self.max_tokens:
            raise ValueError(f"a pass takes 1 to {self.max_tokens} tokens, not {count}")
        self._fill(batch)
        self._ids[:count] = batch.tokens
        self._logit_rows[:num_rows] = batch.logit_rows
        num_logits = num_rows
        if _SCORED_ROWS in self._given:  # a graph without hidden states has no choice of rows
            num_logits = batch.num_logits
            self._scored_rows[:num_logits] = batch.scored_rows
        num_states = 0
        if self.states is not None:
            num_states = self._place_states(batch, self.states.followed)
            if self._rows_input == _FINAL_ROWS:
                places = np.searchsorted(self._state_rows[:num_states], batch.logit_rows)
                self._logit_rows[:num_rows] = places
        key = count, num_rows, num_logits, num_states, batch.hidden
        if (binding := self._bindings.get(key)) is None:
            binding = self._bind(*key)
        self._session.run_with_iobinding(binding)
        return self._logits[:num_logits]

    def publish_hidden_states(self, slot: int, length: int) -> None:
        """Pass the states of a slot's tokens in the last pass to the head that follows it.

        Args:
            slot: the slot's number.
            length: number of the slot's final tokens; later draft tokens were rejected.
        """
        if self.states is not None and (place := self._places.pop(slot, None)) is not None:
            row, start = place
            self.states.receive(slot, start, self._states[row : row + length - start])

    def hidden_states(self, row: int, count: int) -> Floats:
        """Hidden states [count, hidden_size] of the last pass, if its batch asked for them.

        `row` is an index into that batch's `logit_rows`.
        """
        return self._hidden[row : row + count]

    def _fill(self, batch: Batch) -> None:
        """Write the spans, logit rows, progress and positions that the graph reads.

        This also records the pass in `cache.recurrent`.

        Raises:
            ValueError: positions are not reserved, or the states before them are gone.
        """
        kept, given = self.cache.recurrent, self._given
        rows: list[int] = []
        last: list[int] = []
        progress: list[int] = []
        positions: list[int] = []
        for slot, start, tokens, num_logits, num_committed, _ in batch.spans:
            count, (low, high) = len(tokens), self.cache.writable(slot)
            if not low <= start <= high - count:
                raise ValueError(
                    f"positions {start} to {start + count - 1} of slot {slot} are not reserved: "
                    f"a pass may write {low} to {high - 1}"
                )
            rows += (slot, start, count)
            if _LOGIT_SPANS in given:
                last += (slot, start + count - num_logits, num_logits)
            if kept is not None:
                progress += kept.write(slot, start, count, num_committed)
            if _POSITIONS in given:
                positions += range(start, start + count)
        self._spans[:] = rows + [0] * (len(self._spans) - len(rows))
        if last:
            self._logit_spans[:] = last + [0] * (len(self._logit_spans) - len(last))
        if progress:
            self._progress[: len(progress)] = progress
        if positions:
            self._positions[: len(positions)] = positions

    def _place_states(self, batch: Batch, followed: Collection[int]) -> int:
        """Choose the rows whose states the pass outputs, and return their number."""
        self._places.clear()
        row = first = 0
        for span in batch.spans:
            end = first + len(span.tokens)
            rows = range(end - span.num_logits, end) if self._rows_input == _FINAL_ROWS else ()
            if span.slot in followed:
                self._places[span.slot], rows = (row, span.start), range(first, end)
            self._state_rows[row : row + len(rows)] = rows
            row, first = row + len(rows), end
        return row

    def _bind(
        self, count: int, num_rows: int, num_logits: int, num_states: int, hidden: bool
    ) -> ort.IOBinding:
        """Bind the tensors of a pass with these numbers of tokens, rows, logits and states."""
        inputs: dict[str, npt.NDArray[np.generic]] = {
            "spans": self._spans.reshape(-1, 3),
            "block_tables": self.cache.block_tables,
            "cache": self.cache.descriptor,
            "input_ids": self._ids[None, :count],
            "logit_rows": self._logit_rows[:num_rows],
        }
        if _SCORED_ROWS in self._given:
            inputs[_SCORED_ROWS] = self._scored_rows[:num_logits]
        if _POSITIONS in self._given:
            inputs[_POSITIONS] = self._positions[None, :count]
        if self.cache.recurrent is not None:
            inputs[_KEPT_INPUTS] = self.cache.recurrent.descriptor
        if _PROGRESS in self._given:
            inputs[_PROGRESS] = self._progress.reshape(-1, 2)
        if _LOGIT_SPANS in self._given:
            inputs[_LOGIT_SPANS] = self._logit_spans.reshape(-1, 3)
        outputs = {_LOGITS: self._logits[None, :num_logits]}
        if hidden:
            outputs[_HIDDEN] = self._hidden[None, :num_rows]
        if self.states is not None:
            inputs[self._rows_input] = self._state_rows[:num_states]
            outputs[_STATES] = self._states[None, :num_states]
        if self.given_states is not None and self.next_states is not None:
            inputs[_STATES] = self.given_states[None, :count]
            outputs[_NEXT_STATES] = self.next_states[None, :num_rows]
        binding = bind(self._session, inputs, outputs)
        if len(self._bindings) >= _MAX_BINDINGS:
            self._bindings.clear()
        self._bindings[count, num_rows, num_logits, num_states, hidden] = binding
        return binding


def given_size(session: Session) -> int:
    """Width of the states that a draft head's graph reads; 0: it reads only tokens."""
    return sum(item.shape[-1] for item in session.get_inputs() if item.name == _STATES)


def draft_vocab_size(session: Session) -> int:
    """The number of tokens that a draft head can guess: the width of its logits."""
    return _output_sizes(session)[_LOGITS]


class Fusion:
    """The part of a draft head that fuses the states of several target layers.

    Args:
        session: the graph that fuses states.
        fused: [max_tokens, size], receives the fused states.

    Attributes:
        states: [max_tokens, layers * size], the states to fuse.
    """

    def __init__(self, session: Session, fused: Floats) -> None:
        (given,), (made,) = session.get_inputs(), session.get_outputs()
        self.states: Floats = np.empty((len(fused), given.shape[-1]), np.float32)
        self._session = session
        self._fused = fused
        self._names = given.name, made.name
        self._bindings: dict[int, ort.IOBinding] = {}

    def run(self, count: int) -> None:
        """Fuse the first `count` states."""
        if (binding := self._bindings.get(count)) is None:
            given, made = self._names
            states, fused = self.states[None, :count], self._fused[None, :count]
            binding = self._bindings[count] = bind(self._session, {given: states}, {made: fused})
        self._session.run_with_iobinding(binding)


def _known_inputs(session: Session) -> set[str]:
    """The names of the graph's inputs.

    Raises:
        ModelLoadError: the graph has inputs that a runner does not bind, or lacks some.
    """
    names = {item.name for item in session.get_inputs()}
    optional = {
        _POSITIONS,
        _STATE_ROWS,
        _FINAL_ROWS,
        _STATES,
        _KEPT_INPUTS,
        _PROGRESS,
        _LOGIT_SPANS,
        _SCORED_ROWS,
    }
    if names - optional != _INPUTS:
        raise ModelLoadError(
            f"the graph's inputs are {', '.join(sorted(names))}, not {', '.join(sorted(_INPUTS))}"
        )
    return names


def _output_sizes(session: Session) -> dict[str, int]:
    """Widths of the outputs.

    Raises:
        ModelLoadError: the graph has other outputs, or logits without a fixed width.
    """
    outputs = session.get_outputs()
    sizes = {item.name: item.shape[-1] for item in outputs}
    known = _LOGITS in sizes and sizes.keys() <= {_LOGITS, _HIDDEN, _STATES, _NEXT_STATES}
    if not known or not isinstance(sizes[_LOGITS], int):
        found = ", ".join(f"{item.name} {item.shape}" for item in outputs)
        raise ModelLoadError(f"the graph's output must be logits of a fixed size, not {found}")
    return sizes
