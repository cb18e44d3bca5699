"""What a piece of a prompt takes is foreseen, wherever in the prompt it is and however wide."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from specops.costs import CostCurve
from specops.prompt_costs import PromptCosts
from tests.simulated_target import DECODE, VERIFY

READ, TOKEN, PAIR = 0.043, 0.0029, 0.0000013
BUDGET = 0.2


def took(position: int, tokens: int) -> float:
    """Seconds on a machine of TinyLlama's size."""
    return READ + tokens * TOKEN + tokens * (position + tokens / 2) * PAIR


def new() -> PromptCosts:
    return PromptCosts(CostCurve(VERIFY, DECODE))


def read(costs: PromptCosts, prompt: int, slowness: float = 1.0) -> Iterator[float]:
    """Read a prompt in pieces of the budget: by how much each was late, as a share."""
    position = 0
    while position < prompt:
        tokens = min(max(costs.tokens(position, BUDGET), 8), 128, prompt - position)
        seconds = slowness * took(position, tokens)
        yield seconds / costs.seconds(position, tokens) - 1
        costs.saw(position, tokens, seconds)
        position += tokens


def test_a_prompt_is_foreseen_after_its_first_pieces() -> None:
    errors = list(read(new(), 2000))
    assert max(map(abs, errors[2:-1])) < 0.05
    assert abs(errors[-1]) < 0.2  # what is left at the end is narrow, which was not seen yet


def test_the_next_prompt_is_foreseen_from_its_start() -> None:
    costs = new()
    list(read(costs, 2000))
    errors = list(read(costs, 2000))
    assert max(map(abs, errors[:-1])) < 0.02
    assert abs(errors[-1]) < 0.1


def test_widths_that_were_not_seen_are_foreseen_too() -> None:
    costs = new()
    list(read(costs, 2000))
    for position, tokens in ((0, 128), (700, 16), (1400, 64)):
        assert costs.seconds(position, tokens) == pytest.approx(took(position, tokens), rel=0.1)


def test_a_piece_of_so_many_tokens_takes_the_time_it_was_chosen_for() -> None:
    costs = new()
    list(read(costs, 2000))
    for position in (0, 500, 1900):
        tokens = costs.tokens(position, BUDGET)
        assert costs.seconds(position, tokens) <= BUDGET < costs.seconds(position, tokens + 1)
    assert costs.tokens(0, READ / 2) == 0


def test_a_machine_that_turns_slow_is_followed() -> None:
    costs = new()
    list(read(costs, 2000))
    errors = list(read(costs, 2000, slowness=1.5))
    assert errors[0] > 0.4
    assert max(map(abs, errors[8:-1])) < 0.1


def test_one_hiccup_changes_little() -> None:
    costs = new()
    list(read(costs, 2000))
    before = costs.tokens(500, BUDGET)
    costs.saw(500, before, 100.0)
    assert costs.tokens(500, BUDGET) > 0.75 * before


def test_short_prompts_alone_leave_the_rest_as_it_was_believed() -> None:
    """What they cannot tell is left as it was: what is far into a prompt."""
    costs = new()
    for _ in range(200):
        costs.saw(0, 32, took(0, 32))
    assert costs.seconds(0, 32) == pytest.approx(took(0, 32), rel=0.05)
    assert costs.seconds(0, 64) == pytest.approx(took(0, 64), rel=0.2)
    assert costs.seconds(2000, 32) < 3 * took(2000, 32)


def test_noise_never_makes_a_token_free() -> None:
    costs, rng = new(), np.random.default_rng(0)
    for _ in range(300):
        costs.saw(int(rng.integers(0, 4)), int(rng.integers(1, 4)), float(rng.uniform(0.02, 0.2)))
        assert 0 < costs.tokens(0, 10.0) < 1_000_000
