"""The figures that every benchmark's conclusion rests on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tools.stats import Summary, ratios, rotated

rates = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30)


@given(rates)
def test_quartiles_lie_around_the_median_and_within_the_values(values: list[float]) -> None:
    summary = Summary.of(values)
    assert min(values) <= summary.low <= summary.median <= summary.high <= max(values)
    assert summary.count == len(values)


def test_one_interrupted_round_does_not_move_the_median() -> None:
    assert Summary.of([10.0, 11.0, 12.0, 13.0, 9000.0]).median == 12.0


def test_nothing_measured_is_no_result() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        Summary.of([])


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]


def test_sides_with_different_numbers_of_rounds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0], [1.0, 2.0])


@given(st.lists(st.integers(), max_size=8), st.integers(0, 100))
def test_rotation_keeps_everyone_and_their_order(items: list[int], by: int) -> None:
    turned = rotated(items, by)
    assert sorted(turned) == sorted(items)
    assert rotated(turned, len(items) - by % len(items) if items else 0) == items


def test_over_as_many_rounds_as_sides_everyone_goes_first_once() -> None:
    assert [rotated("abc", number)[0] for number in range(3)] == ["a", "b", "c"]
