"""Batches: every window once per epoch, and a restart goes on where the run stopped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data import Sampler, rows_of_tests

LENGTH = 8


def sampler(seed: int = 0) -> Sampler:
    numbers = np.arange(1000, dtype=np.uint16)
    return Sampler({"library": numbers, "tests": numbers + 2000}, seed)


def test_an_epoch_deals_every_window_once() -> None:
    batches = sampler()
    starts = [int(batches.batch({"library": 1}, LENGTH)[0, 0]) for _ in range(123)]
    assert len(set(starts)) == 123
    assert len({start % LENGTH for start in starts}) == 1
    assert max(starts) - min(starts) == 122 * LENGTH


def test_rows_are_consecutive_tokens_with_one_more_to_predict() -> None:
    batch = sampler().batch({"library": 3, "tests": 2}, LENGTH)
    assert batch.shape == (5, LENGTH + 1)
    assert (np.diff(batch, axis=1) == 1).all()
    assert (batch[:3] < 1000).all()
    assert (batch[3:] >= 2000).all()


@given(done=st.integers(0, 300))
def test_a_restart_deals_what_the_unbroken_run_would_have(done: int) -> None:
    unbroken, restarted = sampler(), sampler()
    for _ in range(done):
        unbroken.batch({"library": 1}, LENGTH)
    restarted.dealt = unbroken.dealt.copy()
    expected = unbroken.batch({"library": 4}, LENGTH)
    assert (restarted.batch({"library": 4}, LENGTH) == expected).all()


def test_another_seed_deals_in_another_order() -> None:
    first, second = (sampler(seed).batch({"library": 20}, LENGTH) for seed in (0, 1))
    assert (first != second).any()


def test_too_short_a_source_is_refused_by_name() -> None:
    short = Sampler({"library": np.zeros(10, np.uint16)}, 0)
    with pytest.raises(ValueError, match="library has 10 tokens"):
        short.batch({"library": 1}, LENGTH)


@given(progress=st.floats(0, 1), rows=st.integers(1, 64))
def test_the_tests_never_crowd_out_the_library(progress: float, rows: int) -> None:
    assert 0 <= rows_of_tests(progress, rows) <= 0.6 * rows + 1
    assert rows_of_tests(max(progress, 0.9), rows) == 0
