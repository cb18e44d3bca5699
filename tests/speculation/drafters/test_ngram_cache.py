"""Draft tokens from what other requests said: a bounded table that forgets the longest unused."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.speculation.drafters.base import NO_DRAFT, Draft
from specops.speculation.drafters.ngram import NgramDrafter
from specops.speculation.drafters.ngram_cache import ENTRY_BYTES, NgramCacheDrafter, NgramTable
from tests.speculation.drafters.ask import propose


def make(entries: int = 100, order: int = 2) -> NgramCacheDrafter:
    return NgramCacheDrafter(NgramDrafter(), entries=entries, order=order)


def test_the_own_text_comes_first_and_is_named_as_the_origin() -> None:
    drafter = make()
    propose(drafter, [1, 2, 7, 7], 1, slot=1)
    draft = propose(drafter, [1, 2, 3, 1, 2], 2)
    assert draft == Draft((3, 1), origin="ngram", match_length=2)


def test_without_an_own_match_another_requests_text_goes_on() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3, 4, 5, 6], 1, slot=1)
    assert propose(drafter, [9, 2, 3], 2) == Draft((4, 5), match_length=2)
    assert propose(drafter, [9, 2, 3, 4], 8).tokens == (5, 6)  # as far as the table goes


def test_learns_from_a_request_while_it_grows_and_keeps_it_after_its_end() -> None:
    drafter = make()
    propose(drafter, [1, 2], 1, slot=1)
    assert propose(drafter, [1, 2], 1, slot=2) is NO_DRAFT
    propose(drafter, [1, 2, 3], 1, slot=1)
    drafter.release(1)
    assert propose(drafter, [8, 1, 2], 1, slot=3).tokens == (3,)


def test_the_latest_continuation_replaces_the_one_before() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3], 1, slot=1)
    propose(drafter, [1, 2, 4], 1, slot=2)
    assert propose(drafter, [8, 1, 2], 1, slot=3).tokens == (4,)


def test_a_slot_teaches_only_what_is_new() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3], 1, slot=1)
    drafter.clear()
    propose(drafter, [1, 2, 3, 4], 1, slot=1)
    assert len(drafter.table) == 1
    assert propose(drafter, [8, 2, 3], 1, slot=3).tokens == (4,)


def test_a_slot_that_is_taken_over_is_taught_from_its_start() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3, 4, 5, 6], 1, slot=1)
    drafter.release(1)
    propose(drafter, [11, 12, 13], 1, slot=1)
    assert propose(drafter, [8, 11, 12], 1, slot=0).tokens == (13,)


def test_clear_forgets_everything() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3], 1, slot=1)
    drafter.clear()
    assert len(drafter.table) == 0
    assert propose(drafter, [8, 1, 2], 1) is NO_DRAFT


def test_a_request_that_asks_another_drafter_neither_reads_nor_teaches() -> None:
    """The way out of sharing: `ngram` has the same slots and no table."""
    drafter, private = make(), NgramDrafter()
    propose(private, [1, 2, 3], 1, slot=1)
    assert propose(drafter, [8, 1, 2], 1, slot=0) is NO_DRAFT
    propose(drafter, [4, 5, 6], 1, slot=0)
    assert propose(private, [8, 4, 5], 1, slot=2) is NO_DRAFT


def test_the_least_recently_used_is_forgotten_first() -> None:
    table = NgramTable(2, order=1)
    table.learn([1, 2, 3], 0)
    assert table.follow([1], 1) == (2,)  # used now: later than 2 was learnt
    table.learn([5, 6], 0)
    assert table.follow([2], 1) == ()
    assert table.follow([1], 1) == (2,)
    assert table.follow([5], 1) == (6,)


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=8),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_never_holds_more_than_its_bound_and_tells_what_it_was_taught(
    texts: list[list[int]], entries: int, order: int
) -> None:
    table = NgramTable(entries, order=order)
    seen: dict[tuple[int, ...], int] = {}
    for text in texts:
        table.learn(text, 0)
        for end in range(order, len(text)):
            seen[tuple(text[end - order : end])] = text[end]
        assert len(table) == min(entries, len(seen))
        for ngram, token in seen.items():
            assert table.follow(ngram, 1) in ((), (token,))
    assert sum(bool(table.follow(ngram, 1)) for ngram in seen) == len(table)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(1, 9)))
def test_learning_in_parts_is_learning_at_once(tokens: list[int], parts: list[int]) -> None:
    whole, grown = NgramTable(100), NgramTable(100)
    whole.learn(tokens, 0)
    done = 0
    for part in (*parts, len(tokens)):
        end = min(done + part, len(tokens))
        grown.learn(tokens[:end], done)
        done = end
    assert whole._next == grown._next


def test_refuses_a_table_without_room() -> None:
    with pytest.raises(ValueError, match="at least 1 of 1"):
        NgramTable(0)


def test_an_entry_takes_the_memory_that_is_planned_for_it() -> None:
    table, draw = NgramTable(10_000), random.Random(0)
    tracemalloc.start()
    try:
        for _ in range(400):  # four times as much as there is room for
            table.learn([draw.randrange(32_000) for _ in range(100)], 0)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == table.entries
    assert 0.6 < taken / len(table) / ENTRY_BYTES <= 1
