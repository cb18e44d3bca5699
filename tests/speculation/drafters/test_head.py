"""A head guesses for all slots at once, from their states of now."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specops.runtime.model_runner import HiddenStates
from specops.speculation.drafters.base import NO_DRAFT
from specops.speculation.drafters.head import HeadDrafter

TOKENS = (10, 20, 30, 40)  # of the table; code 4 stands for all others


class ScriptedHead:
    """Guesses the next entry of the table, as sure as the state's only number says.

    The states that its guesses follow from are half of those that they were made by.
    """

    def __init__(self) -> None:
        self.codes = np.zeros(3, np.int64)
        self.states = np.zeros((3, 1), np.float32)
        self.next_states = np.zeros((3, 1), np.float32)
        self.passes: list[list[int]] = []

    def guess(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        self.passes.append(self.codes[:count].tolist())
        sure = self.states[:count, 0].copy()
        self.next_states[:count] = self.states[:count] / 2
        return (self.codes[:count] + 1) % len(TOKENS), sure


def made(*calibration: tuple[float, float]) -> tuple[HeadDrafter, ScriptedHead, HiddenStates]:
    head, states = ScriptedHead(), HiddenStates(3, 1)
    drafter = HeadDrafter(head, states, TOKENS, calibration or ((1.0, 0.0),))  # type: ignore[arg-type]
    return drafter, head, states


def keep(states: HiddenStates, slot: int, sure: float, length: int, chosen: int) -> None:
    states.keep(slot, np.array([sure], np.float32), length, chosen)


def test_one_pass_guesses_for_all_slots_that_have_moved_on() -> None:
    drafter, head, states = made()
    keep(states, 0, 0.75, 2, 10)
    keep(states, 2, 0.25, 4, 99)
    found = drafter.look_up(0, [5, 6, 10], 4)
    assert (found.tokens, found.accept_probs) == ((20,), (pytest.approx(0.75),))
    found = drafter.look_up(2, [5, 6, 7, 8, 99], 4)
    assert (found.tokens, found.accept_probs) == ((20,), (pytest.approx(0.25),))  # 5 % 4 is code 1
    assert head.passes == [[0, 4]]
    assert drafter.look_up(0, [5, 6, 10], 4).tokens == (20,)  # again, at no cost
    keep(states, 0, 0.75, 3, 40)
    assert drafter.look_up(0, [5, 6, 10, 40], 4).tokens == (10,)
    assert head.passes == [[0, 4], [3]]


def test_a_second_guess_follows_a_sure_first_one() -> None:
    drafter, head, states = made((1.0, 0.0), (2.0, 1.0))
    keep(states, 0, 0.8, 2, 10)
    keep(states, 1, 0.4, 2, 20)
    found = drafter.look_up(0, [5, 6, 10], 4)
    assert found.tokens == (20, 30)
    logit = 2 * math.log(0.4 / 0.6) + 1
    assert found.accept_probs == (pytest.approx(0.8), pytest.approx(1 / (1 + math.exp(-logit))))
    assert drafter.look_up(1, [5, 6, 20], 4).tokens == (30,)
    assert head.passes == [[0, 1], [1]]
    assert drafter.look_up(0, [5, 6, 10], 1).tokens == (20,)


@pytest.mark.parametrize(("right", "kept"), [((1.0, 1.0), 0.95), ((0.25, 0.5), 0.25)])
def test_promises_follow_what_comes(right: tuple[float, float], kept: float) -> None:
    """The head is as sure as 0.5 of both; the second one counts where the first is right."""
    drafter, _, states = made((1.0, 0.0), (1.0, 1.0))
    chance = np.random.default_rng(0)
    tokens, draft = [10], NO_DRAFT
    for _ in range(4000):
        keep(states, 0, 0.5, len(tokens) - 1, tokens[-1])
        draft = drafter.look_up(0, tokens, 2, 0.0)
        for guess, share in zip(draft.tokens, right, strict=False):
            tokens.append(guess if chance.random() < share else 99)
            if tokens[-1] == 99:
                break
        tokens.append(10)
    assert draft.accept_probs[0] == pytest.approx(kept, abs=0.06)
    if right[0] == 1:
        assert draft.accept_probs[1] > 0.9


@pytest.mark.parametrize(("least", "tokens"), [(0.3, 2), (0.4, 1), (0.79, 1), (0.81, 0)])
def test_guesses_that_cannot_pay_are_left_out(least: float, tokens: int) -> None:
    drafter, _, states = made((1.0, 0.0), (1.0, 0.0))
    keep(states, 0, 0.8, 2, 10)  # the second guess is as sure as 0.4: reached with 0.32
    found = drafter.look_up(0, [5, 6, 10], 4, least)
    assert (len(found.tokens), len(found.accept_probs)) == (tokens, tokens)


def test_without_the_state_behind_the_last_token_there_is_no_guess() -> None:
    drafter, head, states = made()
    assert drafter.look_up(0, [5, 6, 10], 4) == NO_DRAFT
    keep(states, 0, 0.9, 2, 10)
    assert drafter.look_up(0, [5, 6, 10, 7], 4) == NO_DRAFT
    drafter.release(0)
    assert drafter.look_up(0, [5, 6, 10], 4) == NO_DRAFT
    keep(states, 0, 0.9, 2, 10)
    drafter.begin(0, [5, 6], "ann")
    assert drafter.look_up(0, [5, 6, 10], 4) == NO_DRAFT
    assert not head.passes
