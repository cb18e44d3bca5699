"""What a head promises becomes true, however sure it is."""

import math

import numpy as np
import pytest

from specops.speculation.drafters.accept_probs import Calibration, Guesses


def promised(learnt: Calibration, *confidences: float) -> list[float]:
    """The probabilities of the guesses of token 1 at a text's beginning; nothing is learnt."""
    guesses = learnt.latest[0] = Guesses(0)
    return [learnt.add(guesses, 1, confidence) for confidence in confidences]


def test_promises_become_true_at_every_confidence() -> None:
    """A head may be sure too often and unsure too often."""
    chance, learnt = np.random.default_rng(0), Calibration()
    for logit in chance.normal(0.3, 2.0, 4000):
        promised(learnt, 1 / (1 + math.exp(-logit)))
        right = chance.random() < 1 / (1 + math.exp(0.7 - 0.6 * logit))
        learnt.begin(0, [1 if right else 2])
    for logit in (-3.0, 0.0, 3.0):
        true = 1 / (1 + math.exp(0.7 - 0.6 * logit))
        assert promised(learnt, 1 / (1 + math.exp(-logit))) == [pytest.approx(true, abs=0.06)]


def test_a_damaged_head_promises_nothing() -> None:
    (found,) = promised(Calibration(), math.nan)
    assert found < 1e-300


def test_a_second_guess_is_judged_only_where_the_first_was_right() -> None:
    learnt = Calibration(depth=2)
    for came in ([1, 9], [9, 9]) * 500:
        promised(learnt, 0.5, 0.5)
        learnt.begin(0, came)
    first, second = promised(learnt, 0.5, 0.5)
    assert first == pytest.approx(0.5, abs=0.05)
    assert second < 0.2
