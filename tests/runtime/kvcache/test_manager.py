"""In the KV cache each slot's blocks hold exactly its own tokens, in any order of events."""

import ctypes
import mmap

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specops.runtime import kernels
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.block_pool import ROLLBACK, CacheShape
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.layer_shapes import Attention, ShortConv, StateSpace
from tests.runtime.kvcache.naive import NaiveCache, check_integrity

SHAPE = CacheShape((Attention(kv_heads=1, head_size=8),), "fp32")
STATES = CacheShape.of((*SHAPE.attention, ShortConv(16, 3), StateSpace(1, 1, 32, 16)), "fp32")
CONTEXT = 5 * BLOCK_TOKENS - 10  # the last block of a table is never full
SYSTEM = tuple(range(1000, 1100))


def make(
    num_blocks: int = 12,
    num_slots: int = 3,
    context: int = CONTEXT,
    reuse: PrefixSharing = PrefixSharing.CLIENT,
) -> KvCache:
    return KvCache(SHAPE, num_blocks=num_blocks, num_slots=num_slots, context=context, reuse=reuse)


def blocks_of(cache: KvCache) -> npt.NDArray[np.int64]:
    """The memory of all blocks, as the operator finds it. Tests use 64 numbers of each."""
    address, blocks, size, _ = cache.descriptor.tolist()
    memory = (ctypes.c_int64 * (blocks * size // 8)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(blocks, -1)


def key(tokens: tuple[int, ...], client: str) -> int:
    """What a pass computes for the last token: it depends on all of them, and on the client."""
    return hash((client, tokens))


def compute(cache: KvCache, slot: int, tokens: tuple[int, ...], end: int, client: str = "") -> None:
    """Write the positions from the slot's length up to `end`, as a pass does."""
    table, memory = cache.block_tables[slot], blocks_of(cache)
    low, high = cache.writable(slot)
    for position in range(cache.length(slot), end):
        assert low <= position < high
        block = table[position // BLOCK_TOKENS]
        memory[block, position % BLOCK_TOKENS] = key(tokens[: position + 1], client)


def recur(
    cache: KvCache, slot: int, tokens: tuple[int, ...], num_committed: int, client: str
) -> None:
    """Run layers with a state over the tokens from the slot's length on, as a pass does.

    The state is one number that depends on all its tokens, and so are the inputs of each token.
    """
    kept, start, end = cache.recurrent, cache.length(slot), len(tokens)
    assert kept is not None
    applied, num_committed = kept.write(slot, start, end - start, num_committed)
    memory = kept._memory[slot].view(np.int64)
    state, inputs = np.split(memory, [STATES.state_floats // 2])
    inputs = inputs.reshape(STATES.ring, -1)
    if applied:
        assert state[0] == key(tokens[:applied], client)
    for position in range(max(0, min(applied, start - STATES.positions_before)), start):
        assert inputs[position % STATES.ring, 0] == key(tokens[: position + 1], client)
    for position in range(max(start, end - STATES.ring), end):
        inputs[position % STATES.ring] = key(tokens[: position + 1], client)
    state[:] = key(tokens[:num_committed], client)


def check(cache: KvCache, slot: int, tokens: tuple[int, ...], client: str = "") -> None:
    table, memory = cache.block_tables[slot], blocks_of(cache)
    for position in range(cache.length(slot)):
        block = table[position // BLOCK_TOKENS]
        expected = key(tokens[: position + 1], client)
        assert memory[block, position % BLOCK_TOKENS] == expected, position


def feed(cache: KvCache, slot: int, tokens: tuple[int, ...], client: str = "") -> None:
    """Compute all tokens that the slot lacks."""
    assert cache.reserve(slot, len(tokens))
    compute(cache, slot, tokens, len(tokens), client)
    cache.commit(slot, tokens, len(tokens))


def serve(cache: KvCache, tokens: tuple[int, ...], client: str = "", slot: int = 0) -> int:
    """Serve a request from begin to release; return how many of its tokens were cached."""
    cached = cache.allocate(slot, tokens, client)
    check(cache, slot, tokens, client)
    feed(cache, slot, tokens, client)
    check(cache, slot, tokens, client)
    cache.release(slot)
    return cached


def numbers(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def test_sizes_follow_from_the_shape() -> None:
    heads = (Attention(2, 8), Attention(1, 512), Attention(2, 8))
    shape = CacheShape(heads, "int8")
    assert shape.block_bytes == kernels.block_bytes([(2, 8), (1, 512), (2, 8)], "int8")
    cache = KvCache(shape, num_blocks=5, num_slots=2, context=130)
    assert cache.block_tables.shape == (2, 3)
    address, blocks, size, element = cache.descriptor.tolist()
    assert (address % 4096, blocks, size, element) == (0, 5, shape.block_bytes, 2)


def taken(cache: KvCache) -> int:
    """Bytes of the pool's pages that hold something; Linux counts them as anonymous memory."""
    first, count = int(cache.descriptor[0]) // mmap.PAGESIZE, cache.nbytes // mmap.PAGESIZE
    pages = np.fromfile("/proc/self/pagemap", np.uint64, count, offset=8 * first)
    # The highest bits of a page: in memory, swapped out, and of a file or shared.
    return int(np.isin(pages >> 61, (0b100, 0b010)).sum()) * mmap.PAGESIZE


def test_memory_is_taken_when_it_is_written() -> None:
    shape = CacheShape((Attention(8, 128),) * 32, "fp32")
    cache = KvCache(shape, num_blocks=64, num_slots=1, context=4096)
    assert cache.nbytes == 1 << 30
    assert taken(cache) == 0
    blocks_of(cache)[:4] = 1
    assert 64 << 20 <= taken(cache) < 80 << 20  # whole large pages, if there are any


def test_zeros_take_memory_and_leave_shared_blocks_alone() -> None:
    cache = make()
    long = SYSTEM + numbers(0, 60)
    serve(cache, long)
    assert cache.allocate(0, (*SYSTEM, 7)) == len(SYSTEM)
    assert cache.reserve(0, CONTEXT)
    blocks_of(cache)[cache.block_tables[0, 1:]] = 7
    cache.zero(0)
    assert not blocks_of(cache)[cache.block_tables[0, 1:]].any()
    cache.release(0)
    cache.allocate(0, long[:BLOCK_TOKENS])
    check(cache, 0, long[:BLOCK_TOKENS])


@pytest.mark.parametrize(("shape", "found"), [(SHAPE, 128), (STATES, 0)])
def test_where_no_block_is_left_for_a_copy_whole_ones_are_shared(
    shape: CacheShape, found: int
) -> None:
    """Not where layers have states: the snapshot is behind them."""
    cache = KvCache(shape, num_blocks=3, num_slots=2, context=CONTEXT)
    tokens = numbers(0, 138)
    cache.allocate(0, tokens)
    if cache.recurrent is not None:
        recur(cache, 0, tokens, len(tokens), "")
    feed(cache, 0, tokens)
    cache.take_snapshot(0)
    assert cache.allocate(1, (*tokens, 7)) == found


@pytest.mark.parametrize(("more", "found"), [(17, 10), (18, 18)])
def test_a_few_tokens_more_than_a_slots_own_are_not_worth_a_copy(more: int, found: int) -> None:
    cache = make()
    for slot, computed in ((0, 10), (1, more)):
        cache.allocate(slot, SYSTEM)
        feed(cache, slot, SYSTEM[:computed])
    cache.take_snapshot(1)
    assert cache.match_prefix(0, SYSTEM) == found


class Read(list[int]):
    """Tokens that note from where on they are compared."""

    first = len(SYSTEM)

    def __getitem__(self, place: object) -> object:  # type: ignore[override]
        if isinstance(place, slice):
            self.first = min(self.first, place.start or 0)
        return super().__getitem__(place)  # type: ignore[call-overload]


def test_a_slot_serves_those_with_the_same_beginning_and_compares_only_what_is_new() -> None:
    cache, same = make(num_slots=4), Read(SYSTEM)
    for slot, tokens in enumerate((SYSTEM, same, [*SYSTEM[:80], 1, *SYSTEM[80:]], [1, *SYSTEM])):
        cache.allocate(slot, tokens)
    assert [cache.shares_prefix(0, slot, 90) for slot in (1, 2, 3)] == [True, False, False]
    assert cache.shares_prefix(0, 2, 80)
    assert cache.reserve(0, 70)
    compute(cache, 0, SYSTEM, 70)
    cache.commit(0, SYSTEM, 70)
    cache.match_prefix(1, same)
    same.first = len(SYSTEM)
    assert cache.shares_prefix(0, 1, 90)
    assert same.first == 64
    assert not cache.shares_prefix(0, 3, 90)


def test_mistakes_are_refused() -> None:
    cache = make()
    with pytest.raises(ValueError, match="slot 0 is free"):
        cache.reserve(0, 1)
    cache.allocate(0, SYSTEM)
    with pytest.raises(ValueError, match="slot 0 is in use"):
        cache.allocate(0, SYSTEM)
    with pytest.raises(ValueError, match="context of 310"):
        cache.reserve(0, 311)
    with pytest.raises(ValueError, match="room for 0: it cannot have 1"):
        cache.commit(0, SYSTEM, 1)
    assert cache.reserve(0, 128)
    cache.commit(0, SYSTEM, 30)
    for length in (-1, 29, 101):
        with pytest.raises(ValueError, match=f"30 final tokens of 100 .*: it cannot have {length}"):
            cache.commit(0, SYSTEM, length)
    cache.release(0)
    with pytest.raises(ValueError, match="slot 0 is free"):
        cache.release(0)
    with pytest.raises(ValueError, match="at least 1 block"):
        make(num_blocks=0)


PARTS = [SYSTEM, numbers(0, 64), numbers(0, 70), numbers(200, 9), numbers(300, 128), (5,), (6, 7)]
prompts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(
    lambda parts: sum(parts, ())[: CONTEXT - 1]
)


class ComingAndGoing(RuleBasedStateMachine):
    """Requests begin, compute chunks, have draft tokens rejected, fork and end in any order.

    A naive cache says what each finds and which blocks are left.
    """

    shape = SHAPE
    most_drafted = CONTEXT

    @initialize(
        num_blocks=st.integers(2, 9),
        num_slots=st.integers(1, 4),
        reuse=st.sampled_from(PrefixSharing),
        snapshots=st.integers(0, 8),
    )
    def start(self, num_blocks: int, num_slots: int, reuse: PrefixSharing, snapshots: int) -> None:
        self.cache = KvCache(
            self.shape,
            num_blocks=num_blocks,
            num_slots=num_slots,
            context=CONTEXT,
            reuse=reuse,
            snapshot_bytes=snapshots * self.shape.slot_bytes,
            end_tokens={5, 7, 69},
        )
        self.naive = NaiveCache(num_blocks, recurrent=self.shape is STATES)
        self.slots: dict[int, tuple[tuple[int, ...], str]] = {}

    def any_slot(self, data: st.DataObject) -> tuple[int, tuple[int, ...], str]:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        return slot, *self.slots[slot]

    @precondition(lambda self: len(self.slots) < self.cache.num_slots)
    @rule(tokens=prompts, client=st.sampled_from(["ann", "bob"]))
    def come(self, tokens: tuple[int, ...], client: str) -> None:
        self.take_slot(tokens, client)

    def take_slot(self, tokens: tuple[int, ...], client: str) -> int:
        slot = min(set(range(self.cache.num_slots)) - set(self.slots))
        owner = "" if self.cache.reuse is PrefixSharing.ALL else client
        snapshots = check_integrity(self.cache)
        self.naive.allocate(slot, tokens, None if self.cache.reuse is PrefixSharing.OFF else owner)
        found = self.cache.allocate(slot, tokens, client)
        assert found == self.naive.match(slot, tokens, snapshots)
        self.slots[slot] = tokens, owner
        return slot

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), count=st.integers(1, 9) | st.integers(1, 140), drafted=st.integers(0, 70))
    def compute(self, data: st.DataObject, count: int, drafted: int) -> None:
        """A chunk of final tokens, with rejected draft tokens behind it."""
        self.step(self.any_slot(data)[0], count, drafted)

    def step(self, slot: int, count: int, drafted: int) -> None:
        tokens, owner = self.slots[slot]
        end = min(len(tokens), self.cache.length(slot) + count)
        if (border := self.cache.next_snapshot(slot)) is not None:
            end = min(end, border)
        most = min(CONTEXT, end + min(drafted, self.most_drafted))
        fits = self.cache.reserve(slot, most)
        assert fits == self.naive.reserve(slot, most)
        if not fits:
            return
        written = tokens[:end] + (-1,) * (most - end)
        if self.cache.recurrent is not None and most > self.cache.length(slot):
            # Rejected tokens leave their inputs only; some of the final ones do, too.
            num_committed = end - hash(written) % (end + ROLLBACK + 1 - most)
            recur(self.cache, slot, written, num_committed, owner)
        compute(self.cache, slot, written, most, owner)
        self.cache.commit(slot, tokens, end)
        self.naive.commit(slot, tokens, end)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def take_more(self, data: st.DataObject) -> None:
        slot, tokens, _ = self.any_slot(data)
        snapshots, before = check_integrity(self.cache), self.cache.length(slot)
        looks = self.cache._slots[slot].seen_version != self.cache._prefixes.version
        found = self.cache.match_prefix(slot, tokens)
        assert found == (self.naive.match(slot, tokens, snapshots) if looks else before)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), more=prompts)
    def go_another_way(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        """Behind the final tokens: what was written there is overwritten."""
        slot, tokens, owner = self.any_slot(data)
        tokens = tokens[: self.cache.length(slot)] + more
        self.slots[slot] = tokens[: CONTEXT - 1], owner

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """At its end, or because it is preempted: then it may come again."""
        self.leave_slot(self.any_slot(data)[0])

    def leave_slot(self, slot: int) -> None:
        self.cache.release(slot)
        self.naive.release(slot)
        del self.slots[slot]

    @precondition(lambda self: len(self.slots) < self.cache.num_slots)
    @rule(tokens=prompts, chunk=st.integers(20, 140), drafted=st.integers(0, ROLLBACK))
    def serve(self, tokens: tuple[int, ...], chunk: int, drafted: int) -> None:
        """A whole prompt, as far as there are blocks, with a snapshot at its end."""
        slot = self.take_slot(tokens, "ann")
        for _ in range(-(-len(tokens) // chunk) + 3):  # and the ends of messages
            self.step(slot, chunk, drafted)
        self.cache.take_snapshot(slot)
        self.leave_slot(slot)

    @invariant()
    def slots_hold_their_tokens(self) -> None:
        for slot, (tokens, owner) in self.slots.items():
            check(self.cache, slot, tokens, owner)
            assert self.cache.length(slot) == self.naive.slots[slot].length

    @invariant()
    def each_block_is_where_the_naive_cache_has_it(self) -> None:
        cache, naive = self.cache, self.naive
        check_integrity(cache)
        assert cache.used_blocks == naive.used
        assert cache.cached_blocks == len(naive.cached)
        tails = [len(block.text) % BLOCK_TOKENS or BLOCK_TOKENS for block in naive.cached]
        assert cache.cached_tokens == sum(tails)
        held = naive.held
        assert cache.shared_blocks == sum(held.count(block) > 1 for block in {*held})
        assert cache.tokens == sum(slot.length for slot in naive.slots.values())

    @invariant()
    def snapshots_are_counted(self) -> None:
        if (kept := self.cache.recurrent) is not None:
            assert kept.snapshots == kept.events["taken"] - kept.events["dropped"]


class ComingAndGoingWithStates(ComingAndGoing):
    """The same in a model whose layers keep states, some snapshots of which have room.

    A pass checks that it finds the state and the inputs of the tokens before its own.
    """

    shape = STATES
    most_drafted = ROLLBACK


TestComingAndGoing = ComingAndGoing.TestCase
TestComingAndGoing.settings = settings(max_examples=120, stateful_step_count=40)
TestComingAndGoingWithStates = ComingAndGoingWithStates.TestCase
TestComingAndGoingWithStates.settings = settings(TestComingAndGoing.settings, max_examples=50)
