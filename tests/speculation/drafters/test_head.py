"""A head guesses for all slots at once, from their states of now, and only while it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import HiddenStates
from specops.speculation.drafters.base import NO_DRAFT, Draft, LookupDrafter
from specops.speculation.drafters.cascade import CascadeDrafter
from specops.speculation.drafters.head import HeadDrafter
from tests.simulated_target import Clock

TOKENS = (10, 20, 30, 40)  # of the table; code 4 stands for all others
PASS = 0.001  # seconds of a target's pass, whatever its width
COSTS = CostModel([1, 8], [PASS, PASS], 0.0)


class ScriptedHead:
    """Guesses the next entry of the table, as sure as the state's only number says.

    The states that its guesses follow from are half of those that they were made by.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.codes = np.zeros(3, np.int64)
        self.states = np.zeros((3, 1), np.float32)
        self.next_states = np.zeros((3, 1), np.float32)
        self.passes: list[list[int]] = []
        self._clock, self._seconds = clock, seconds

    def guess(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        self.passes.append(self.codes[:count].tolist())
        self._clock.now += self._seconds
        sure = self.states[:count, 0].copy()
        self.next_states[:count] = self.states[:count] / 2
        return (self.codes[:count] + 1) % len(TOKENS), sure


def made(
    *calibration: tuple[float, float], seconds: float = PASS / 10
) -> tuple[HeadDrafter, ScriptedHead, HiddenStates]:
    clock = Clock()
    head, states = ScriptedHead(clock, seconds), HiddenStates(3, 1)
    given = calibration or ((1.0, 0.0),)
    drafter = HeadDrafter(head, states, TOKENS, given, costs=COSTS, clock=clock)  # type: ignore[arg-type]
    return drafter, head, states


def keep(states: HiddenStates, slot: int, sure: float, length: int, chosen: int) -> None:
    states.keep(slot, np.array([sure], np.float32), length, chosen)


def test_one_pass_guesses_for_all_slots_that_have_moved_on() -> None:
    drafter, head, states = made()
    keep(states, 0, 0.75, 2, 10)
    keep(states, 2, 0.25, 4, 99)
    found = drafter.look_up(0, [5, 6, 10], 4)
    assert (found.tokens, found.promised) == ((20,), (pytest.approx(0.75),))
    found = drafter.look_up(2, [5, 6, 7, 8, 99], 4)
    assert (found.tokens, found.promised) == ((20,), (pytest.approx(0.25),))  # 5 % 4 is code 1
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
    assert found.promised == (pytest.approx(0.8), pytest.approx(1 / (1 + math.exp(-logit))))
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
    assert draft.promised[0] == pytest.approx(kept, abs=0.06)
    if right[0] == 1:
        assert draft.promised[1] > 0.9


@pytest.mark.parametrize(("least", "tokens"), [(0.3, 2), (0.4, 1), (0.79, 1), (0.81, 0)])
def test_guesses_that_cannot_pay_are_left_out(least: float, tokens: int) -> None:
    drafter, _, states = made((1.0, 0.0), (1.0, 0.0))
    keep(states, 0, 0.8, 2, 10)  # the second guess is as sure as 0.4: reached with 0.32
    found = drafter.look_up(0, [5, 6, 10], 4, least)
    assert (len(found.tokens), len(found.promised)) == (tokens, tokens)


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


@pytest.mark.parametrize(("seconds", "rest"), [(PASS / 10, 100), (PASS, 4)])
def test_where_guesses_bring_less_than_they_take_they_are_rare(seconds: float, rest: int) -> None:
    """A guess that is right in half of the cases is worth half a pass."""
    drafter, head, states = made(seconds=seconds)
    tokens = [5, 10]
    for _ in range(100):
        keep(states, 0, 0.5, len(tokens) - 1, tokens[-1])
        drafter.look_up(0, tokens, 4)
        tokens.append(10)
    assert len(head.passes) == rest


class Lookup(LookupDrafter):
    """Promises as much as it is told."""

    name = "suffix"
    promised = 0.0

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        return Draft((9,), promised=(self.promised,)) if self.promised else NO_DRAFT


@pytest.mark.parametrize(
    ("promised", "origin", "passes"),
    [(0.6, "suffix", 0), (0.45, "suffix", 1), (0.35, "head", 1), (0.0, "head", 1)],
)
def test_in_a_cascade_the_likelier_is_taken_and_a_sure_lookup_asks_no_head(
    promised: float, origin: str, passes: int
) -> None:
    drafter, head, states = made()
    lookup = Lookup()
    lookup.promised = promised
    cascade = CascadeDrafter(lookup, drafter)
    assert not cascade.runs_model
    keep(states, 0, 0.4, 2, 10)
    assert cascade.look_up(0, [5, 6, 10], 2).origin == origin
    assert len(head.passes) == passes
    assert cascade.look_up(1, [5, 6, 10], 2).origin == "suffix"  # the head has nothing for it
