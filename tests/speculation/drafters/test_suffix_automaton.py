"""The automaton knows, after every token, what a search through the whole sequence would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specops.speculation.drafters.suffix_automaton import SuffixAutomaton


def longest_known_suffix(tokens: list[int]) -> tuple[int, list[int]]:
    """The plain way: its length, and all earlier places where it ended, in order."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == suffix]
        if ends:
            return length, ends
    return 0, []


@given(st.lists(st.integers(0, 3), max_size=60))
def test_finds_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, 1):
        automaton.append(token)
        length, ends = longest_known_suffix(tokens[:count])
        assert (automaton.length, automaton.match_length) == (count, length)
        assert not length or automaton.match_end in ends


@given(st.lists(st.integers(0, 30), max_size=200))
def test_the_place_is_the_latest_where_the_text_is_no_mere_repetition(tokens: list[int]) -> None:
    """Among 31 different tokens nothing is 8 links deep."""
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    length, ends = longest_known_suffix(tokens)
    assert not length or automaton.match_end == ends[-1]


@given(st.lists(st.integers(0, 1), min_size=2, max_size=200))
def test_has_at_most_two_states_per_token(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    assert automaton.states <= 2 * len(tokens) - 1


def test_the_work_per_token_is_bounded_on_average() -> None:
    """Transitions and links are what is walked; both are linear in the tokens, also at worst."""
    for period in (1, 2, 7, 1000):
        automaton = SuffixAutomaton()
        for position in range(4000):
            automaton.append(position % period)
        transitions = sum(map(len, automaton._next))
        assert transitions < 3 * 4000
