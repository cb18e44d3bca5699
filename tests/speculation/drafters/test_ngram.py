"""Draft tokens looked up in the request's own tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.speculation.drafters.base import NO_DRAFT
from specops.speculation.drafters.ngram import NgramDrafter
from tests.speculation.drafters.ask import ask, propose


def test_continues_the_latest_match() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3]
    assert propose(NgramDrafter(), tokens, 3).tokens == (8, 7, 1)


def test_prefers_the_longest_match_however_long() -> None:
    known = [5, 4, 3, 2, 1, 6, 7]
    tokens = [*known, 9, 0, *known[1:], 8, 5, *known]
    draft = propose(NgramDrafter(), tokens, 1)
    assert draft.tokens == (9,)
    assert draft.match_length == len(known)


def test_continues_a_period_beyond_the_end() -> None:
    assert propose(NgramDrafter(), [1, 2, 3, 1, 2, 3], 7).tokens == (1, 2, 3, 1, 2, 3, 1)
    assert propose(NgramDrafter(), [4, 4, 4], 4).tokens == (4, 4, 4, 4)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 1]])
def test_without_a_match_has_no_draft(tokens: list[int]) -> None:
    assert propose(NgramDrafter(), tokens, 4) is NO_DRAFT


@pytest.mark.parametrize("min_match", [1, 2, 3, 4])
def test_a_match_has_the_least_length_that_was_asked_for(min_match: int) -> None:
    drafter = NgramDrafter(min_match=min_match)
    assert propose(drafter, [1, 2, 3, 9, 8, 2, 3], 1).tokens == ((9,) if min_match <= 2 else ())


def scan(tokens: list[int]) -> tuple[int, set[int]]:
    """The plain way: length of the longest known suffix of 2 or more, and what followed it."""
    for length in range(len(tokens) - 1, 1, -1):
        suffix = tokens[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == suffix]
        if ends:
            return length, {tokens[end] for end in ends}
    return 0, set()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60))
def test_grown_step_by_step_it_finds_what_a_scan_finds(tokens: list[int], first: int) -> None:
    drafter = NgramDrafter()
    for length in range(min(first, len(tokens)), len(tokens) + 1):
        draft = propose(drafter, tokens[:length], 1)
        match_length, followers = scan(tokens[:length])
        assert draft.match_length == match_length
        assert (draft.tokens[0] in followers) if followers else draft is NO_DRAFT


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.integers(2, 20),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_remembers_at_least_the_latest_half_of_its_bound_and_never_more_than_all(
    tokens: list[int], max_tokens: int, stride: int, count: int
) -> None:
    """A full automaton starts anew: matches are then those of the tokens that it kept."""
    drafter = NgramDrafter(max_tokens=max_tokens)
    for length in range(1, len(tokens) + 1, stride):
        draft = propose(drafter, tokens[:length], count)
        automaton = drafter._slots[0].automaton
        assert min(length, max_tokens // 2) <= automaton.length <= max_tokens
        assert automaton.states <= 2 * max_tokens
        kept = tokens[length - automaton.length : length]
        fresh = propose(NgramDrafter(), kept, count)
        assert len(draft.tokens) == len(fresh.tokens)
        assert draft.match_length == fresh.match_length


def test_a_full_automaton_still_points_to_the_right_tokens() -> None:
    drafter = NgramDrafter(max_tokens=10)
    tokens = [*range(100, 150), 1, 2, 3, 4, 1, 2]
    for length in range(1, len(tokens) + 1):
        draft = propose(drafter, tokens[:length], 2)
    assert draft.tokens == (3, 4)
    assert drafter._slots[0].begin > 0
    assert propose(drafter, [*tokens, 3, 4, *range(200, 209), 1, 2], 2) is NO_DRAFT  # forgotten


@pytest.mark.parametrize("bounds", [{"min_match": 0}, {"max_tokens": 1}])
def test_refuses_bounds_that_mean_nothing(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 and 2"):
        NgramDrafter(**bounds)


def test_a_slot_that_was_released_is_forgotten() -> None:
    drafter = NgramDrafter()
    assert propose(drafter, [1, 2, 3, 1, 2], 1).tokens == (3,)
    drafter.release(0)
    drafter.release(0)  # nothing to forget is no error
    drafter.begin(0, [7, 8], "")
    assert propose(drafter, [7, 8], 1) is NO_DRAFT


def test_slots_are_apart() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 1, 2], 1, slot=0)
    assert propose(drafter, [9, 1, 2], 1, slot=1) is NO_DRAFT
    first, second = drafter.propose([ask([1, 2, 3, 1, 2], 1), ask([9, 1, 2, 8, 1, 2], 1, 1)])
    assert (first.tokens, second.tokens) == ((3,), (8,))


def test_a_lookup_runs_no_model() -> None:
    drafter = NgramDrafter()
    assert not drafter.runs_model
    assert drafter.backlog(0, 1000) == drafter.take_in(0, [1, 2], 10) == 0
