"""What is believed about draft tokens follows what happened to them."""

from __future__ import annotations

import numpy as np
import pytest

from specops.speculation.acceptance import Acceptance, Promises, SpeculationState


def fed(rates: list[float], drafts: int, length: int, seed: int = 0) -> Acceptance:
    """An estimate that saw drafts of `length` tokens, accepted at these rates."""
    rng = np.random.default_rng(seed)
    acceptance = Acceptance(len(rates))
    for _ in range(drafts):
        accepted = 0
        while accepted < length and rng.random() < rates[accepted]:
            accepted += 1
        acceptance.observe(length, accepted)
    return acceptance


def test_the_rates_of_each_position_are_found() -> None:
    rates = [0.9, 0.5, 0.8, 0.3]
    found = np.mean([fed(rates, 200, 4, seed).rates for seed in range(40)], axis=0)
    # Deep positions are reached seldom, so they lean on those before them.
    assert found[:2] == pytest.approx(rates[:2], abs=0.06)
    assert found[2] > found[1] > found[3]


def test_a_position_that_was_never_tried_leans_on_the_one_before() -> None:
    rates = fed([0.95, 0.95, 0.0, 0.0], 200, 2).rates
    assert rates[3] == pytest.approx(rates[2]) == pytest.approx(rates[1])


def test_a_rejected_draft_token_says_nothing_of_those_after_it() -> None:
    acceptance = Acceptance(3)
    untouched = acceptance.rates[2]
    acceptance.observe(3, 1)
    assert acceptance.rates[0] > untouched > acceptance.rates[1]
    assert acceptance.rates[2] == acceptance.rates[1]  # by leaning, not by a count of its own
    acceptance.observe(3, 3)
    assert acceptance.rates[2] > acceptance.rates[1]


def test_what_was_long_ago_is_forgotten() -> None:
    acceptance = fed([1.0, 1.0], 500, 2)
    assert min(acceptance.rates) > 0.95
    for _ in range(120):
        acceptance.observe(2, 0)
    assert acceptance.rates[0] < 0.2


def test_an_heir_believes_the_same_but_changes_its_mind_sooner() -> None:
    parent = fed([1.0, 1.0], 500, 2)
    heir = parent.heir()
    assert heir.rates == parent.rates
    for _ in range(5):
        heir.observe(2, 0)
        parent.observe(2, 0)
    assert heir.rates[0] < parent.rates[0] - 0.1


def test_only_own_drafts_count_as_tried() -> None:
    parent = fed([1.0, 1.0], 500, 2)
    heir = parent.heir()
    assert (parent.drafts, heir.drafts) == (500, 0)
    heir.observe(2, 1)
    assert heir.drafts == 1


def test_more_draft_tokens_than_there_are_positions_are_no_error() -> None:
    acceptance = Acceptance(2)
    acceptance.observe(5, 4)
    assert min(acceptance.rates) > Acceptance(2).rates[0]


@pytest.mark.parametrize("promised", [0.05, 0.45, 0.85, 1.0])
def test_promises_are_believed_until_they_were_broken(promised: float) -> None:
    promises = Promises()
    assert list(promises.kept([promised])) == [promised]
    rng = np.random.default_rng(0)
    for _ in range(2000):
        promises.observe([promised], int(rng.random() < 0.6))
    assert list(promises.kept([promised])) == pytest.approx([0.6], abs=0.06)


def test_each_tenth_is_judged_by_the_tokens_that_were_reached() -> None:
    promises = Promises()
    for _ in range(500):
        promises.observe([0.9, 0.5, 0.1], 1)  # the third is never reached
    first, second, third = promises.kept([0.9, 0.5, 0.1])
    assert (first > 0.95, second < 0.05, third) == (True, True, 0.1)


def test_a_state_knows_what_it_has_gained() -> None:
    state = SpeculationState()
    assert state.speedup == 1.0
    state.seconds, state.plain_seconds = 2.0, 3.0
    assert state.speedup == 1.5
