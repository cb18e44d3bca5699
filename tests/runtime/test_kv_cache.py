"""In the KV cache each slot's blocks hold exactly its own tokens, in any order of events."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specops.runtime import kernels
from specops.runtime.block_pool import ROLLBACK, CacheShape
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kv_cache import KvCache, PrefixCache
from specops.runtime.layer_shapes import Attention, ShortConv, StateSpace
from specops.system.memory import process_memory

SHAPE = CacheShape((Attention(kv_heads=1, head_size=8),), "fp32")
STATES = CacheShape.of((*SHAPE.attention, ShortConv(16, 3), StateSpace(1, 1, 32, 16)), "fp32")
CONTEXT = 5 * BLOCK_TOKENS - 10  # the last block of a table is never full
SYSTEM = tuple(range(1000, 1100))


def make(
    num_blocks: int = 12,
    num_slots: int = 3,
    context: int = CONTEXT,
    reuse: PrefixCache = PrefixCache.CLIENT,
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


def recur(cache: KvCache, slot: int, tokens: tuple[int, ...], settled: int, client: str) -> None:
    """Run layers with a state over the tokens from the slot's length on, as a pass does.

    The state is one number that depends on all its tokens, and so are the inputs of each token.
    """
    kept, start, end = cache.kept_inputs, cache.length(slot), len(tokens)
    assert kept is not None
    applied, settled = kept.write(slot, start, end - start, settled)
    memory = kept._memory[slot].view(np.int64)
    state, inputs = np.split(memory, [STATES.state_floats // 2])
    inputs = inputs.reshape(STATES.ring, -1)
    if applied:
        assert state[0] == key(tokens[:applied], client)
    for position in range(max(0, min(applied, start - STATES.positions_before)), start):
        assert inputs[position % STATES.ring, 0] == key(tokens[: position + 1], client)
    for position in range(max(start, end - STATES.ring), end):
        inputs[position % STATES.ring] = key(tokens[: position + 1], client)
    state[:] = key(tokens[:settled], client)


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
    cached = cache.begin(slot, tokens, client)
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


def test_memory_is_taken_when_it_is_written() -> None:
    shape = CacheShape((Attention(8, 128),) * 32, "fp32")
    before = process_memory().anon
    cache = KvCache(shape, num_blocks=64, num_slots=1, context=4096)
    assert cache.nbytes == 1 << 30
    assert process_memory().anon - before < 32 << 20
    blocks_of(cache)[:4] = 1
    assert process_memory().anon - before >= 64 << 20


def test_zeros_take_memory_and_leave_shared_blocks_alone() -> None:
    cache = make()
    long = SYSTEM + numbers(0, 60)
    serve(cache, long)
    assert cache.begin(0, (*SYSTEM, 7)) == len(SYSTEM)
    assert cache.reserve(0, CONTEXT)
    blocks_of(cache)[cache.block_tables[0, 1:]] = 7
    cache.zero(0)
    assert not blocks_of(cache)[cache.block_tables[0, 1:]].any()
    cache.release(0)
    cache.begin(0, long[:BLOCK_TOKENS])
    check(cache, 0, long[:BLOCK_TOKENS])


def test_whole_blocks_are_shared_and_a_part_is_copied() -> None:
    cache = make()
    long = SYSTEM + numbers(0, 60)
    cache.begin(0, long)
    feed(cache, 0, long)
    other = (*SYSTEM, 7, 8, 9)
    assert cache.begin(1, other) == len(SYSTEM)
    assert cache.block_tables[1, 0] == cache.block_tables[0, 0]
    assert cache.block_tables[1, 1] != cache.block_tables[0, 1]
    assert (cache.used_blocks, cache.shared_blocks) == (4, 1)
    feed(cache, 1, other)
    check(cache, 0, long)
    check(cache, 1, other)


def test_the_last_token_is_always_computed() -> None:
    cache = make()
    for length in (64, 65, 100, 128):
        tokens = numbers(length, length)
        serve(cache, tokens)
        assert serve(cache, tokens) == length - 1
        assert serve(cache, tokens[:64]) == 63


def test_a_conversation_goes_on_in_its_last_block_without_a_copy() -> None:
    cache = make()
    serve(cache, SYSTEM)
    cache.begin(0, (*SYSTEM, 1, 2))
    assert cache.length(0) == len(SYSTEM)
    assert (cache.used_blocks, cache.kept_blocks) == (2, 0)


def test_a_few_common_tokens_are_not_worth_a_copy() -> None:
    cache = make()
    serve(cache, numbers(0, 30))
    assert serve(cache, (*numbers(0, 7), 99, 98)) == 0
    assert serve(cache, (*numbers(0, 8), 99, 98)) == 8
    assert serve(cache, (*numbers(0, 30), 99)) == 30  # the copy left the block to others


@pytest.mark.parametrize("tail", [1, 7, 8])
def test_where_layers_have_states_the_shortest_part_is_worth_a_copy(tail: int) -> None:
    """The snapshot behind it would be of no use without it."""
    cache, tokens = (
        KvCache(STATES, num_blocks=4, num_slots=1, context=CONTEXT),
        numbers(0, 64 + tail),
    )
    cache.begin(0, tokens)
    recur(cache, 0, tokens, len(tokens), "")
    feed(cache, 0, tokens)
    cache.release(0)
    assert cache.begin(0, (*tokens, 99)) == len(tokens)


def test_a_running_requests_last_block_is_copied() -> None:
    cache = make()
    cache.begin(0, SYSTEM)
    feed(cache, 0, SYSTEM[:40])
    assert cache.begin(1, SYSTEM) == 40
    check(cache, 1, SYSTEM)
    feed(cache, 1, SYSTEM)
    check(cache, 0, SYSTEM)


def test_a_waiting_request_takes_blocks_that_others_computed_meanwhile() -> None:
    cache = make()
    for slot in (0, 1):
        assert cache.begin(slot, SYSTEM) == 0
    feed(cache, 0, SYSTEM[:30])
    assert cache.reserve(1, 10)
    compute(cache, 1, SYSTEM, 10)
    cache.commit(1, SYSTEM, 10)
    feed(cache, 0, SYSTEM)
    assert cache.extend_prefix(1, SYSTEM) == 99
    check(cache, 1, SYSTEM)
    assert cache.block_tables[1, 0] == cache.block_tables[0, 0]
    assert cache.used_blocks == 3
    assert cache.extend_prefix(1, SYSTEM) == 99


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
        cache.begin(slot, tokens)
    assert [cache.serves(0, slot, 90) for slot in (1, 2, 3)] == [True, False, False]
    assert cache.serves(0, 2, 80)
    assert cache.reserve(0, 70)
    compute(cache, 0, SYSTEM, 70)
    cache.commit(0, SYSTEM, 70)
    cache.extend_prefix(1, same)
    same.first = len(SYSTEM)
    assert cache.serves(0, 1, 90)
    assert same.first == 64
    assert not cache.serves(0, 3, 90)


def test_equal_blocks_of_two_requests_become_one() -> None:
    cache = make()
    for slot in (0, 1):
        cache.begin(slot, SYSTEM)
        assert cache.reserve(slot, 100)
    for slot in (0, 1):
        feed(cache, slot, SYSTEM)
    assert (cache.used_blocks, cache.shared_blocks) == (3, 1)
    for slot in (0, 1):
        check(cache, slot, SYSTEM)


def test_a_failed_reservation_changes_nothing() -> None:
    cache = make(num_blocks=3)
    cache.begin(0, SYSTEM)
    cache.begin(1, SYSTEM)
    assert cache.reserve(0, 100)
    before = cache.block_tables.copy()
    assert not cache.reserve(1, 100)
    assert cache.used_blocks == 2
    assert np.array_equal(cache.block_tables, before)
    assert cache.reserve(1, 64)
    cache.release(0)
    assert cache.reserve(1, 128)


def test_the_least_recently_used_blocks_make_room_from_their_end_on() -> None:
    cache = make(num_blocks=4)
    old, new = numbers(0, 120), numbers(500, 120)
    serve(cache, old)
    serve(cache, new)
    serve(cache, old)
    serve(cache, numbers(900, 30))  # takes the last block of `new`
    assert cache.kept_blocks == 4
    assert serve(cache, new) == 64  # takes the last block of `old`, and a part of it
    assert serve(cache, old) == 64


def test_a_returning_client_keeps_its_blocks() -> None:
    cache = make(num_blocks=3)
    serve(cache, numbers(0, 80), "ann")
    for first in range(500, 1500, 100):
        serve(cache, numbers(first, 30), "bob")
        assert serve(cache, numbers(0, 80), "ann") == 79


def test_a_longer_block_replaces_its_beginning() -> None:
    cache = make()
    serve(cache, numbers(0, 20))
    serve(cache, numbers(0, 10))
    assert (cache.kept_blocks, cache.kept_tokens) == (1, 20)
    serve(cache, numbers(0, 30))
    assert (cache.kept_blocks, cache.kept_tokens) == (1, 30)
    serve(cache, numbers(0, 64))
    assert (cache.kept_blocks, cache.kept_tokens) == (1, 64)


@pytest.mark.parametrize("reuse", PrefixCache)
def test_clients_share_blocks_only_if_configured(reuse: PrefixCache) -> None:
    cache = make(reuse=reuse)
    assert cache.begin(0, SYSTEM, "ann") == 0
    cache.reserve(0, len(SYSTEM))
    cache.commit(0, SYSTEM, len(SYSTEM))
    assert cache.begin(1, SYSTEM, "bob") == (99 if reuse is PrefixCache.ALL else 0)
    cache.release(1)
    cache.release(0)
    assert cache.begin(1, SYSTEM, "bob") == (99 if reuse is PrefixCache.ALL else 0)
    assert cache.begin(0, SYSTEM, "ann") == (0 if reuse is PrefixCache.OFF else 99)
    if reuse is PrefixCache.OFF:
        assert cache.kept_blocks == cache.kept_tokens == cache.shared_blocks == 0


def test_mistakes_are_refused() -> None:
    cache = make()
    with pytest.raises(ValueError, match="slot 0 is free"):
        cache.reserve(0, 1)
    cache.begin(0, SYSTEM)
    with pytest.raises(ValueError, match="slot 0 is in use"):
        cache.begin(0, SYSTEM)
    with pytest.raises(ValueError, match="context of 310"):
        cache.reserve(0, 311)
    with pytest.raises(ValueError, match="room for 0 tokens, not for 1"):
        cache.commit(0, SYSTEM, 1)
    assert cache.reserve(0, 128)
    cache.commit(0, SYSTEM, 30)
    for length in (-1, 29, 101):
        with pytest.raises(ValueError, match=f"30 final tokens of 100: it cannot have {length}"):
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
    """Requests begin, compute chunks, have draft tokens rejected and end in any order."""

    most_drafted = CONTEXT

    @initialize(
        num_blocks=st.integers(2, 14),
        num_slots=st.integers(1, 4),
        reuse=st.sampled_from(PrefixCache),
    )
    def start(self, num_blocks: int, num_slots: int, reuse: PrefixCache) -> None:
        self.cache = make(num_blocks, num_slots, reuse=reuse)
        self.slots: dict[int, tuple[tuple[int, ...], str]] = {}

    def owner(self, client: str) -> str:
        return "" if self.cache.reuse is PrefixCache.ALL else client

    def blocks(self, slot: int) -> list[int]:
        end = self.cache.writable(slot)[1] // BLOCK_TOKENS
        return self.cache.block_tables[slot, :end].tolist()

    def any_slot(self, data: st.DataObject) -> tuple[int, tuple[int, ...], str]:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        return slot, *self.slots[slot]

    def end_of_piece(self, slot: int, end: int) -> int:
        return end

    def recur(self, slot: int, tokens: tuple[int, ...], end: int, client: str) -> None:
        """What a pass over these tokens, final up to `end`, does beside keys and values."""

    @precondition(lambda self: len(self.slots) < self.cache.num_slots)
    @rule(tokens=prompts, client=st.sampled_from(["ann", "bob"]))
    def come(self, tokens: tuple[int, ...], client: str) -> None:
        slot = min(set(range(self.cache.num_slots)) - set(self.slots))
        cached = self.cache.begin(slot, tokens, client)
        assert cached < len(tokens)
        assert not cached or self.cache.reuse is not PrefixCache.OFF
        self.slots[slot] = tokens, self.owner(client)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), count=st.integers(1, 140), drafted=st.integers(0, 70))
    def compute(self, data: st.DataObject, count: int, drafted: int) -> None:
        """A chunk of final tokens, with rejected draft tokens behind it."""
        self.step(self.any_slot(data)[0], count, drafted)

    def step(self, slot: int, count: int, drafted: int) -> None:
        tokens, client = self.slots[slot]
        end = self.end_of_piece(slot, min(len(tokens), self.cache.length(slot) + count))
        most = min(CONTEXT, end + min(drafted, self.most_drafted))
        wanted = -(-most // BLOCK_TOKENS) - len(self.blocks(slot))
        if not self.cache.reserve(slot, most):
            assert max(wanted, 0) + 1 > self.cache.available_blocks
            return
        written = tokens[:end] + (-1,) * (most - end)
        self.recur(slot, written, end, client)
        compute(self.cache, slot, written, most, client)
        self.cache.commit(slot, tokens, end)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def take_more(self, data: st.DataObject) -> None:
        slot, tokens, _ = self.any_slot(data)
        before = self.cache.length(slot)
        assert before <= self.cache.extend_prefix(slot, tokens) <= max(before, len(tokens) - 1)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), more=prompts)
    def go_another_way(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        """Behind the final tokens: what was written there is overwritten."""
        slot, tokens, client = self.any_slot(data)
        tokens = tokens[: self.cache.length(slot)] + more
        self.slots[slot] = tokens[: CONTEXT - 1], client

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.leave_slot(self.any_slot(data)[0])

    def leave_slot(self, slot: int) -> None:
        self.cache.release(slot)
        del self.slots[slot]

    @invariant()
    def slots_hold_their_tokens(self) -> None:
        for slot, (tokens, client) in self.slots.items():
            check(self.cache, slot, tokens, client)

    @invariant()
    def no_slot_may_write_a_block_of_another(self) -> None:
        registered: set[int] = set()
        writable: list[int] = []
        for slot in self.slots:
            first = self.cache.writable(slot)[0] // BLOCK_TOKENS
            registered |= {*self.blocks(slot)[:first]}
            writable += self.blocks(slot)[first:]
        assert len({*writable}) == len(writable)
        assert not registered & {*writable}

    @invariant()
    def blocks_are_counted(self) -> None:
        cache = self.cache
        blocks = [self.blocks(slot) for slot in self.slots]
        used = {block for each in blocks for block in each}
        assert cache.used_blocks == len(used)
        assert cache.available_blocks == cache.num_blocks - len(used)
        assert cache.kept_blocks <= cache.available_blocks
        assert cache.kept_tokens <= cache.kept_blocks * BLOCK_TOKENS
        shared = sum(sum(block in each for each in blocks) > 1 for block in used)
        assert cache.shared_blocks == shared
        assert cache.tokens == sum(cache.length(slot) for slot in self.slots)

    @precondition(lambda self: len(self.slots) < self.cache.num_slots)
    @rule()
    def take_every_block_once(self) -> None:
        """As many as a context has: what no request holds can be evicted."""
        cache = self.cache
        slot = min(set(range(cache.num_slots)) - set(self.slots))
        room = min(cache.available_blocks * BLOCK_TOKENS, CONTEXT)
        cache.begin(slot, (), share=False)
        assert cache.reserve(slot, room)
        cache.release(slot)
        assert cache.kept_blocks <= max(0, cache.available_blocks - room // BLOCK_TOKENS)


TestComingAndGoing = ComingAndGoing.TestCase
TestComingAndGoing.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


class ComingAndGoingWithStates(ComingAndGoing):
    """The same in a model whose layers keep states, some snapshots of which have room.

    A pass checks that it finds the state and the inputs of the tokens before its own.
    """

    most_drafted = ROLLBACK

    @initialize(
        num_blocks=st.integers(2, 14),
        num_slots=st.integers(1, 4),
        reuse=st.sampled_from(PrefixCache),
        snapshots=st.integers(0, 8),
    )
    def start(  # type: ignore[override]
        self, num_blocks: int, num_slots: int, reuse: PrefixCache, snapshots: int
    ) -> None:
        self.cache = KvCache(
            STATES,
            num_blocks=num_blocks,
            num_slots=num_slots,
            context=CONTEXT,
            reuse=reuse,
            snapshot_bytes=snapshots * STATES.slot_bytes,
            end_tokens={5, 7, 69},
        )
        self.slots = {}

    def end_of_piece(self, slot: int, end: int) -> int:
        border = self.cache.next_snapshot(slot)
        return end if border is None else min(end, border)

    def recur(self, slot: int, tokens: tuple[int, ...], end: int, client: str) -> None:
        """Rejected tokens leave their inputs only; some of the final ones do, too."""
        if len(tokens) > self.cache.length(slot):
            settled = end - hash(tokens) % (end + ROLLBACK + 1 - len(tokens))
            recur(self.cache, slot, tokens, settled, client)

    @precondition(lambda self: len(self.slots) < self.cache.num_slots)
    @rule(tokens=prompts, chunk=st.integers(20, 140), drafted=st.integers(0, ROLLBACK))
    def serve(self, tokens: tuple[int, ...], chunk: int, drafted: int) -> None:
        """A whole prompt, as far as there are blocks, with a snapshot at its end."""
        slot = min(set(range(self.cache.num_slots)) - set(self.slots))
        self.come(tokens, "ann")
        for _ in range(-(-len(tokens) // chunk) + 3):  # and the ends of messages
            self.step(slot, chunk, drafted)
        self.cache.take_snapshot(slot)
        self.leave_slot(slot)

    @invariant()
    def snapshots_are_bounded(self) -> None:
        kept = self.cache.kept_inputs
        assert kept is not None
        assert kept.used_bytes <= kept.snapshot_bytes
        taken, dropped = kept.events["taken"], kept.events["dropped"]
        assert kept.snapshots == taken - dropped


TestComingAndGoingWithStates = ComingAndGoingWithStates.TestCase
TestComingAndGoingWithStates.settings = settings(TestComingAndGoing.settings, max_examples=50)
