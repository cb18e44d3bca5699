"""Look-ups that bring less than they take are made now and then; those that pay, in every step."""

from __future__ import annotations

from collections.abc import Sequence

from specops.runtime.cost_model import CostModel
from specops.speculation.acceptance import SpeculationState
from specops.speculation.controller import Candidate, Controller

PASS, TOKEN, LOOK_UP = 400e-6, 50e-6, 20e-6  # seconds
LONG = 600  # steps


def small_model() -> Controller:
    return Controller(CostModel([1, 9], [PASS, PASS + 8 * TOKEN]), None, 8)


def decode(
    controller: Controller,
    states: Sequence[SpeculationState],
    steps: int,
    *,
    found: int = 0,
    took: float = LOOK_UP,
) -> int:
    """Look up where that is due: each finds so many tokens, all right; returns how many were."""
    made = 0
    for _ in range(steps):
        due = [controller.look_ups.due(state) for state in states]
        asked = [
            Candidate(state, drafter="suffix", most=found * now, looked_up=now)
            for state, now in zip(states, due, strict=True)
        ]
        widths = [1 + item.most for item in asked]
        controller.stepped(asked, widths, widths, draft_seconds=took * sum(due))
        made += sum(due)
    return made


def test_look_ups_that_pay_are_made_in_every_step() -> None:
    assert decode(small_model(), [SpeculationState()], LONG, found=1) == LONG


def test_look_ups_that_find_nothing_are_made_in_a_quarter_of_the_steps() -> None:
    controller, states = small_model(), [SpeculationState() for _ in range(4)]
    decode(controller, states, LONG)
    assert decode(controller, states, LONG) == LONG


def test_a_text_that_begins_to_repeat_itself_is_looked_up_in_every_step_again() -> None:
    controller, states = small_model(), [SpeculationState()]
    decode(controller, states, LONG)
    decode(controller, states, 8, found=3)
    assert decode(controller, states, 8, found=3) == 8


def test_a_new_request_believes_what_others_have_learned() -> None:
    controller = small_model()
    assert decode(controller, [SpeculationState()], 8) == 8
    decode(controller, [SpeculationState()], LONG)
    assert decode(controller, [SpeculationState()], 8) == 2


def test_one_text_that_repeats_itself_is_looked_up_beside_others_that_do_not() -> None:
    controller, dull, lively = small_model(), SpeculationState(), SpeculationState()
    for _ in range(LONG):
        decode(controller, [dull], 1)
        decode(controller, [lively], 1, found=3)
    assert decode(controller, [lively], 8, found=3) == 8
    assert decode(controller, [dull], 8) == 2


def test_a_look_up_that_waited_for_a_core_counts_as_twice_the_usual() -> None:
    controller, states = small_model(), [SpeculationState()]
    decode(controller, states, LONG, found=1)
    decode(controller, states, 1, found=1, took=1.0)
    assert decode(controller, states, 8, found=1) == 8
