"""Gives sequences slots and KV blocks, and takes blocks away when none is left.

The slots bound how many requests run. The KV blocks, taken as sequences grow, decide how many
really do. Where no block is free, the sequence that was admitted last is preempted: the sequences
before it get its blocks, and it is computed again when there is room. So the first sequence always
goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from specops.engine.request_queue import RequestQueue
from specops.engine.request_state import RequestState
from specops.runtime.batch import Batch
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kv_cache import KvCache
from specops.speculation.drafters.base import Chain, DraftModel, LookupDrafter


class SlotManager:
    """Gives sequences slots and blocks. Used by the engine's thread.

    Args:
        cache: the target's.
        drafters: by the name in requests; learn which of theirs gets a slot, and when it leaves.

    Attributes:
        preemptions: number of preemptions since the start.
    """

    def __init__(self, cache: KvCache, drafters: Mapping[str, Chain]) -> None:
        self.preemptions = 0
        self._cache = cache
        self._drafters = drafters
        self._sequences: list[RequestState] = []  # in the order of admission
        # Next for a slot: preempted sequences, and one sequence that lacks blocks.
        self._in_line: deque[RequestState] = deque()
        self._free = list(range(cache.num_slots - 1, -1, -1))
        self._refused: tuple[RequestState, int] | None = None  # with the blocks left then

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._sequences)

    @property
    def in_line(self) -> int:
        """Number of sequences that wait for blocks."""
        return len(self._in_line)

    def admit(self, waiting: RequestQueue) -> None:
        """Give free slots to preempted sequences, then to waiting ones, while blocks are left."""
        while self._free and (self._in_line or len(waiting)):
            if not self._in_line:
                self._in_line.append(waiting.next())
            if not self._admit(self._in_line[0]):
                return
            self._in_line.popleft()

    def schedule_decodes(self) -> list[RequestState]:
        """The sequences that decode, each with room for one more token. May preempt others."""
        decoding = []
        for sequence in list(self._sequences):
            if sequence.num_uncomputed_tokens or sequence.slot < 0 or sequence.finish:
                continue
            if self._make_room(sequence, sequence.num_computed + 1, keep=()):
                decoding.append(sequence)
            else:
                self._preempt(sequence)
        return decoding

    def reserve(self, sequence: RequestState, length: int, batch: Batch) -> bool:
        """Make room for a piece of a prompt, without preempting a sequence of the batch.

        Returns:
            Whether there is room. If not, the sequence is preempted where the batch is empty;
            otherwise it waits.
        """
        keep = {span.slot for span in batch.spans}
        found = self._make_room(sequence, length, keep=keep)
        if not found and not keep:
            self._preempt(sequence)
        return found

    def share_prefix(self, sequence: RequestState) -> int:
        """Take over what other requests have computed of the sequence's beginning.

        Returns:
            The number of computed tokens.
        """
        if sequence.num_computed % BLOCK_TOKENS == 0 or not sequence.was_scheduled:
            sequence.num_computed = self._cache.extend_prefix(sequence.slot, sequence.tokens)
        return sequence.num_computed

    def remove_finished(self) -> list[RequestState]:
        """Take out finished sequences."""
        ended = [sequence for sequence in self._sequences if sequence.finish]
        for sequence in ended:
            self._leave(sequence)
        gone = [sequence for sequence in self._in_line if sequence.finish]
        for sequence in gone:
            self._in_line.remove(sequence)
        return ended + gone

    def _admit(self, sequence: RequestState) -> bool:
        """Give a sequence a slot, if its tokens fit beside what the running ones still need."""
        cache = self._cache
        owed = sum(_lacking(item) for item in self._sequences)
        spare = cache.available_blocks - owed
        if self._refused is not None and self._sequences:
            refused, before = self._refused
            if refused is sequence and spare <= before:
                return False
        slot, client = self._free[-1], sequence.request.client
        share = sequence.reader is None  # a reader needs the result at every token
        sequence.num_computed = cache.begin(slot, sequence.tokens, client, share=share)
        if self._sequences and cache.available_blocks - owed < _lacking(sequence):
            cache.release(slot)
            self._refused = sequence, spare
            return False
        self._free.pop()
        self._refused = None
        sequence.slot, sequence.was_scheduled = slot, False
        sequence.start()
        self._sequences.append(sequence)
        try:
            for drafter in self._drafters_of(sequence):
                drafter.begin(slot, sequence.tokens, client)
        except Exception as error:
            sequence.fail(error)
        return True

    def _make_room(self, sequence: RequestState, length: int, keep: Collection[int]) -> bool:
        """Preempt sequences that were admitted after this one, the last first, until it fits."""
        while not self._cache.reserve(sequence.slot, length):
            later = self._sequences[self._sequences.index(sequence) + 1 :]
            victim = next((item for item in reversed(later) if item.slot not in keep), None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: RequestState) -> None:
        self._leave(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._in_line.appendleft(sequence)  # it was admitted before the others in line

    def _leave(self, sequence: RequestState) -> None:
        self._sequences.remove(sequence)
        self._cache.release(sequence.slot)
        for drafter in self._drafters_of(sequence):
            try:
                drafter.release(sequence.slot)
            except Exception as error:
                sequence.fail(error)
        self._free.append(sequence.slot)
        sequence.slot = -1

    def _drafters_of(self, state: RequestState) -> Sequence[LookupDrafter | DraftModel]:
        """The drafters that follow a request: a draft model keeps blocks for its text."""
        request = state.request
        chain = self._drafters.get(request.drafter) if request.k_draft else None
        return () if chain is None or request.embed else chain.drafters


def _lacking(sequence: RequestState) -> int:
    """Number of blocks for its tokens and the next one, less the full ones; at least one."""
    blocks = -(-(len(sequence.tokens) + 1) // BLOCK_TOKENS)
    return blocks - sequence.num_computed // BLOCK_TOKENS
