"""Rows: whatever comes and goes, each sequence finds its own tokens in its row."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specops.kv_cache import CacheShape, KvCache, common_prefix
from specops.request import GenerationRequest
from specops.rows import PrefixCache, Rows, Slot
from specops.sequence import Sequence

SHAPE = CacheShape(layers=1, kv_heads=2, head_dim=2, dtype=np.dtype(np.float32))
CAPACITY = 64
SYSTEM = tuple(range(100, 120))
EXACT_WAY, OTHER_WAY = 0.0, 0.5  # what is added to a token's key by how it was computed
_ids = count()


class NoText:
    """A tokenizer of which nothing is asked here."""


def sequence(prompt: tuple[int, ...], **fields: object) -> Sequence:
    request = GenerationRequest(
        request_id=str(next(_ids)),
        prompt_tokens=prompt,
        max_new_tokens=CAPACITY,
        **fields,  # type: ignore[arg-type]
    )
    made = Sequence.__new__(Sequence)
    made.request, made.tokens, made.finish = request, list(prompt), None
    made.prefilled = made.cached = made.slot = 0
    made.begun = False
    return made


def make(rows: int = 3, reuse: PrefixCache = PrefixCache.ALL, *, one_graph: bool = True) -> Rows:
    cache = KvCache(SHAPE, rows=rows, capacity=CAPACITY)
    return Rows(cache, reuse=reuse, one_graph=one_graph)


def write(rows: Rows, slot: Slot, tokens: list[int], way: float) -> None:
    """A pass: each token's key is the token itself, and how it was computed."""
    cache, start = rows._cache, rows._cache.lengths[slot.row]
    for part in cache.buffers[0]:
        part[slot.row, :, start : start + len(tokens)] = (np.array(tokens) + way)[None, :, None]
    cache.lengths[slot.row] += len(tokens)


def read(rows: Rows, slot: Slot, tokens: int | None = None) -> None:
    """Some of a prompt, or all that is left."""
    taken = slot.taken
    prompt = taken.request.prompt_tokens[taken.prefilled :]
    chunk = list(prompt if tokens is None else prompt[:tokens])
    write(rows, slot, chunk, EXACT_WAY)
    taken.begun = True
    taken.prefilled += len(chunk)
    if taken.prefilled == len(taken.request.prompt_tokens):
        taken.tokens.append(200 + len(taken.tokens) % 3)
        rows.prompt_read(slot)


def say(rows: Rows, slot: Slot, *, one_graph: bool = True) -> None:
    """One more token."""
    taken = slot.taken
    way = EXACT_WAY if taken.request.exact and one_graph else OTHER_WAY
    write(rows, slot, taken.tokens[-1:], way)
    taken.tokens.append(200 + len(taken.tokens) % 3)


def run(rows: Rows, prompt: tuple[int, ...], says: int = 0, **fields: object) -> int:
    """A request from its coming to its end; returns how much of its prompt was there already."""
    slot = rows.take(sequence(prompt, **fields))
    rows.share(slot)
    read(rows, slot)
    for _ in range(says):
        say(rows, slot)
    cached = slot.taken.cached
    rows.give_back(slot)
    return cached


def test_the_next_turn_of_a_conversation_goes_on_in_its_row() -> None:
    rows = make()
    turn = (*SYSTEM, 1, 2, 3)
    assert run(rows, turn, says=4) == 0
    answer = tuple(200 + number % 3 for number in range(len(turn), len(turn) + 5))
    assert run(rows, turn + answer + (7, 8)) == len(turn) + 4  # its last token was never fed
    assert rows.kept_tokens == len(turn) + 5 + 2


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    rows = make()
    run(rows, SYSTEM)
    assert run(rows, SYSTEM) == len(SYSTEM) - 1
    assert run(rows, SYSTEM[:10]) == 9


def test_a_shared_beginning_is_copied_and_the_conversation_stays() -> None:
    rows = make()
    long = SYSTEM + tuple(range(1, 30))
    run(rows, long)
    assert run(rows, (*SYSTEM, 50, 51)) == len(SYSTEM)
    assert run(rows, (*long, 9)) == len(long)
    assert rows.kept_tokens == len(long) + 1 + len(SYSTEM) + 2


def test_who_comes_at_the_same_time_shares_what_the_first_computes() -> None:
    rows = make()
    first, second = (rows.take(sequence((*SYSTEM, number))) for number in (1, 2))
    assert second.taken.cached == 0
    read(rows, first, 12)
    assert rows.share(second) is first
    assert (second.taken.cached, second.taken.prefilled) == (12, 12)
    assert rows.share(second) is second


def test_the_row_that_was_of_no_use_for_longest_is_given_away() -> None:
    rows = make(rows=2)
    run(rows, tuple(range(1, 21)))
    run(rows, SYSTEM)
    run(rows, tuple(range(1, 21)))
    run(rows, tuple(range(30, 50)))
    assert run(rows, tuple(range(1, 21))) == 19
    assert run(rows, SYSTEM) == 0


def test_a_few_common_tokens_are_not_worth_a_copy() -> None:
    rows = make()
    run(rows, SYSTEM)
    assert run(rows, (*SYSTEM[:7], 1, 2, 3)) == 0


@pytest.mark.parametrize("reuse", PrefixCache)
def test_other_clients_tokens_are_used_only_where_that_is_wanted(reuse: PrefixCache) -> None:
    rows = make(reuse=reuse)
    run(rows, SYSTEM, client="ann")
    assert run(rows, SYSTEM, client="bob") == (19 if reuse is PrefixCache.ALL else 0)
    assert run(rows, SYSTEM, client="ann") == (0 if reuse is PrefixCache.OFF else 19)
    if reuse is PrefixCache.OFF:
        assert rows.kept_tokens == 0


@pytest.mark.parametrize("one_graph", [True, False])
def test_exact_requests_begin_with_exact_tokens_only(one_graph: bool) -> None:
    """What an exact request has said is exact, too, unless prompts have a graph of their own."""
    prompt = SYSTEM + tuple(200 + number % 3 for number in range(len(SYSTEM), len(SYSTEM) + 20))
    for exact in (True, False):
        rows = make(one_graph=one_graph)
        run(rows, SYSTEM, says=10, exact=exact)
        kept = len(SYSTEM) + 10
        assert run(rows, prompt, exact=True) == (kept if exact and one_graph else len(SYSTEM))
        assert run(rows, (*prompt, 1), exact=False) == len(prompt)


def test_tokens_that_follow_inexact_ones_are_not_exact_either() -> None:
    rows = make(rows=1)
    prompt = SYSTEM + tuple(200 + number % 3 for number in range(len(SYSTEM), len(SYSTEM) + 20))
    run(rows, SYSTEM, says=10)
    assert run(rows, prompt) == 30
    assert run(rows, (*prompt, 1), exact=True) == len(SYSTEM)


def test_a_free_slot_has_no_sequence() -> None:
    rows = make()
    slot = rows.take(sequence(SYSTEM))
    rows.give_back(slot)
    with pytest.raises(ValueError, match="nobody has slot 0"):
        rows.give_back(slot)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    same = common_prefix(left, right)
    assert left[:same] == right[:same]
    assert same in (len(left), len(right)) or left[same] != right[same]


prompts = st.lists(
    st.sampled_from([SYSTEM, tuple(range(1, 9)), (1, 2, 3), (200, 201), (5,)]),
    min_size=1,
    max_size=2,
).map(lambda parts: sum(parts, ()))


class ComingAndGoing(RuleBasedStateMachine):
    """Requests come, are read, speak and leave in any order."""

    @initialize(rows=st.integers(1, 4), reuse=st.sampled_from(PrefixCache), one_graph=st.booleans())
    def start(self, rows: int, reuse: PrefixCache, one_graph: bool) -> None:
        self.one_graph = one_graph
        self.rows = make(rows, reuse, one_graph=one_graph)
        self.all = self.rows._slots

    @precondition(lambda self: not self.rows.full)
    @rule(prompt=prompts, exact=st.booleans(), client=st.sampled_from(["ann", "bob"]))
    def come(self, prompt: tuple[int, ...], exact: bool, client: str) -> None:
        slot = self.rows.take(sequence(prompt, exact=exact, client=client))
        self.rows.share(slot)

    @precondition(lambda self: self.rows.prefilling)
    @rule(tokens=st.integers(1, 30))
    def read(self, tokens: int) -> None:
        slot = self.rows.prefilling[0]
        if not slot.taken.begun:
            self.rows.share(slot)
        read(self.rows, slot, tokens)

    @precondition(lambda self: self.rows.decoding)
    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.rows.decoding))
        if len(slot.taken.tokens) < CAPACITY:
            say(self.rows, slot, one_graph=self.one_graph)

    @precondition(lambda self: len(self.rows))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.rows.give_back(data.draw(st.sampled_from(list(self.rows))))

    @invariant()
    def rows_are_compact(self) -> None:
        assert [slot.row for slot in self.rows.decoding] == list(range(len(self.rows.decoding)))
        assert sorted(slot.row for slot in self.all) == list(range(len(self.all)))
        assert {slot.number for slot in self.rows} == {
            slot.number for slot in self.all if slot.sequence is not None
        }

    @invariant()
    def rows_hold_their_tokens(self) -> None:
        for slot in self.all:
            held = self.rows._cache.lengths[slot.row]
            if slot.sequence is None:
                assert len(slot.tokens) == held
            tokens = slot.tokens if slot.sequence is None else slot.sequence.tokens
            keys = self.rows._cache.buffers[0][0][slot.row, 0, :held, 0]
            assert np.array_equal(np.floor(keys), tokens[:held])
            ways = keys - np.floor(keys)
            assert not ways[: slot.exact].any()  # what is taken for exact was computed that way
            if slot.sequence is not None and slot.sequence.request.exact and self.one_graph:
                assert not ways.any()

    @invariant()
    def tokens_are_counted(self) -> None:
        held = sum(self.rows._cache.lengths[slot.row] for slot in self.rows)
        assert self.rows.tokens == held
        assert self.rows.tokens + self.rows.kept_tokens == self.rows._cache.tokens


TestComingAndGoing = ComingAndGoing.TestCase
TestComingAndGoing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
