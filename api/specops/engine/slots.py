"""Gives requests slots and KV blocks, and takes blocks away when none is left.

The slots bound how many requests run. The KV blocks, taken as requests grow, decide how many
actually do. If no block is free, the last request by the order (`order`) is preempted: one before
it gets its blocks, and it is computed again when there is room. So the first always makes progress:
the more of a prompt is computed, the further it moves ahead, and a request that has given up its
blocks moves back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from specops.engine.order import Order
from specops.engine.request_queue import RequestQueue
from specops.engine.request_state import RequestState
from specops.runtime.batch import Batch
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.manager import MIN_COMMON, KvCache
from specops.speculation.drafters.base import Drafter
from specops.speculation.safeguard import Safeguard

# Most tokens at the end of a cached beginning that the target computes again for a draft head: its
# own cache may lack a part of a block, and the last token's state is in none.
MAX_RECOMPUTED = MIN_COMMON + 1


class SlotManager:
    """Gives requests slots and blocks. Used by the engine's thread.

    Args:
        cache: the target's.
        order: who goes first, in the queue, too.
        max_batched_tokens: of a pass.
        safeguard: calls the drafters.
        reads: whether it pays that a drafter reads a request's text.

    Attributes:
        order: who goes first.
        preemptions: number of preemptions since the start.
    """

    def __init__(
        self,
        cache: KvCache,
        order: Order,
        max_batched_tokens: int,
        safeguard: Safeguard,
        reads: Callable[[RequestState, Drafter], bool] = lambda state, drafter: True,
    ) -> None:
        self.preemptions = 0
        self.order = order
        self._cache, self._max_batched_tokens = cache, max_batched_tokens
        self._call, self._reads = safeguard.call, reads
        self._states: list[RequestState] = []  # in the order of admission
        self._preempted: list[RequestState] = []  # next for a slot
        self._free = list(range(cache.num_slots - 1, -1, -1))
        self._refused: tuple[RequestState, int] | None = None  # with the blocks left then

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def admit(self, waiting: RequestQueue) -> None:
        """Give free slots to preempted requests, then to waiting ones, while blocks are left.

        A request whose prompt has to wait for others in slots stays in the queue, or a long one
        would hold a slot that a short one needs. One that lacks blocks holds up those behind it, or
        it might never get enough; one that goes before it may still arrive.
        """
        while self._free and (self._preempted or len(waiting)):
            again = min(self._preempted, key=self.order.rank, default=None)
            state = again or waiting.first()
            if not ((again or self._has_room(state)) and self._admit(state)):
                return
            if again:
                self._preempted.remove(again)
            else:
                waiting.take(state)

    def schedule_decodes(self) -> list[RequestState]:
        """The requests that decode, each with room for one more token. May preempt others."""
        decoding, before = list[RequestState](), self.preemptions
        for state in self._states[:]:
            if state.num_uncomputed_tokens or state.finish or state.slot < 0:
                continue
            length = state.num_computed + 1
            if self._cache.reserve(state.slot, length) or self._make_room(state, length, keep=()):
                decoding.append(state)
            else:
                self._preempt(state)
        if self.preemptions == before:
            return decoding
        return [state for state in decoding if state.slot >= 0]

    def reserve(self, state: RequestState, length: int, batch: Batch) -> bool:
        """Make room for a piece of a prompt, without preempting a request of the batch.

        Returns:
            Whether there is room. If not, the request is preempted where the batch is empty;
            otherwise it waits.
        """
        keep = {span.slot for span in batch.spans}
        fits = self._make_room(state, length, keep=keep)
        if not fits and not keep:
            self._preempt(state)
        return fits

    def share_prefix(self, state: RequestState) -> int:
        """Share the part of the request's beginning that others have computed.

        Returns:
            The number of computed tokens.
        """
        if state.num_computed % BLOCK_TOKENS == 0 or not state.was_scheduled:
            held = self._required_prefix(state)
            most = held if held is not None and held >= state.num_computed else None
            state.num_computed = self._cache.match_prefix(state.slot, state.tokens, most)
        return state.num_computed

    def remove_finished(self) -> list[RequestState]:
        """Take out finished requests."""
        ended = [state for state in self._states if state.finish]
        for state in ended:
            self._leave(state)
        gone = [state for state in self._preempted if state.finish] if self._preempted else []
        for state in gone:
            self._preempted.remove(state)
        return ended + gone

    def _has_room(self, state: RequestState) -> bool:
        """Whether the prompts in slots that go before a request's leave room for it in a pass."""
        prompts = [item for item in self._states if item.num_uncomputed_tokens]
        if not prompts:
            return True
        place = self.order.place(state)
        before = (item for item in prompts if self.order.place(item) <= place)
        return sum(item.num_uncomputed_tokens for item in before) < self._max_batched_tokens

    def _admit(self, state: RequestState) -> bool:
        """Give a request a slot, if its tokens fit with the future ones of running requests."""
        cache = self._cache
        reserved_blocks = sum(_missing_blocks(item) for item in self._states)
        spare = cache.available_blocks - reserved_blocks
        if self._refused is not None and self._states:
            refused, before = self._refused
            if refused is state and spare <= before:
                return False
        slot, client = self._free[-1], state.request.client
        share = state.reader is None  # a reader needs the result at every token
        state.num_computed = cache.allocate(slot, state.tokens, client, share=share)
        if self._states and cache.available_blocks - reserved_blocks < _missing_blocks(state):
            cache.release(slot)
            self._refused = state, spare
            return False
        self._free.pop()
        self._refused = None
        state.slot, state.was_scheduled = slot, False
        state.start()
        self._states.append(state)
        state.chain = tuple(
            [one for one in state.drafters if not one.follows or self._reads(state, one)]
        )
        for drafter in state.chain:
            self._call(drafter, None, drafter.begin, slot, state.tokens, client)
        held = self._required_prefix(state)
        most = None if held is None else cache.matchable_len(slot, held)
        if most is not None and 0 < state.num_computed - most <= MAX_RECOMPUTED:
            cache.release(slot)
            state.num_computed = cache.allocate(slot, state.tokens, client, share=share, most=most)
        return True

    def _required_prefix(self, state: RequestState) -> int | None:
        """See `Drafter.required_prefix`: the least of the request's drafters."""
        required = [
            self._call(item, None, item.required_prefix, state.slot, state.tokens)
            for item in state.chain
            if item.follows
        ]
        return min((count for count in required if count is not None), default=None)

    def _make_room(self, state: RequestState, length: int, keep: Collection[int]) -> bool:
        """Preempt requests that come after this one in the order, the last first, until it fits."""
        while not self._cache.reserve(state.slot, length):
            _, index = max(
                (self.order.rank(item), index)
                for index, item in enumerate(self._states)
                if item is state or item.slot not in keep
            )
            if self._states[index] is state:
                return False
            self._preempt(self._states[index])
        return True

    def _preempt(self, state: RequestState) -> None:
        self._leave(state)
        state.num_computed = 0
        state.preemptions += 1
        self.preemptions += 1
        self._preempted.append(state)

    def _leave(self, state: RequestState) -> None:
        self._states.remove(state)
        self._cache.release(state.slot)
        for drafter in state.chain:
            self._call(drafter, None, drafter.release, state.slot)
        self._free.append(state.slot)
        state.slot = -1


def _missing_blocks(state: RequestState) -> int:
    """Number of blocks for its tokens and the next one, less the full ones; at least one."""
    blocks = -(-(len(state.tokens) + 1) // BLOCK_TOKENS)
    return blocks - state.num_computed // BLOCK_TOKENS
