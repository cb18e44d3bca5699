"""Plain decoding as measured, where the work on drafts makes every step slower."""

import pytest

from specops.runtime.cost_model import CostModel
from specops.speculation.baseline import Baseline
from specops.speculation.controller import Attempt, Controller, Proposal
from specops.speculation.credit import SpeculationState
from specops.speculation.drafters.base import NO_DRAFT, Draft

PLAIN, OUTSIDE = 200e-6, 50e-6  # seconds


def run(
    baseline: Baseline,
    asks: int,
    *seconds: float,
    speedup: float = 1.0,
    outside: float = OUTSIDE,
    requests: int = 1,
) -> list[tuple[int, int]]:
    """Ask drafters, and decode plainly whenever that is due; the last of its times goes on.

    Returns:
        For each time that it was due, the number of asks before it, and of plain steps in a row.
    """
    found = []
    for asked in range(1, asks + 1):
        baseline.asked(1, PLAIN, outside, speedup)
        baseline.observe(1, 2 * PLAIN)  # never counts
        steps = 0
        while baseline.due:
            baseline.rested()
            baseline.observe(requests, seconds[min(steps, len(seconds) - 1)])
            steps += 1
        if steps:
            found.append((asked, steps))
    return found


def test_single_steps_come_before_several() -> None:
    baseline = Baseline()
    assert run(baseline, 127, 0.8 * PLAIN) == [(16, 1), (48, 1), (80, 1), (112, 1)]
    assert baseline.factor == 1.0
    assert run(baseline, 33, 0.8 * PLAIN) == [(1, 8), (33, 1)]
    assert baseline.factor < 1.0


@pytest.mark.parametrize("speedup", [1.25, 2.0])
def test_plain_steps_lose_a_small_share_of_the_time(speedup: float) -> None:
    baseline, asks = Baseline(), 100_000
    run(baseline, 250, PLAIN, speedup=speedup)  # the first ones come sooner
    found = run(baseline, asks, PLAIN, speedup=speedup)
    for kind, in_row in ((1, 1), (8, 7)):
        count = sum(steps == kind for _, steps in found)
        assert count * in_row * (1 - 1 / speedup) / asks == pytest.approx(0.002, rel=0.2)


def test_the_first_steps_after_drafts_do_not_count() -> None:
    baseline = Baseline()
    run(baseline, 40 * 128, 9 * PLAIN, 9 * PLAIN, 0.8 * PLAIN)
    assert baseline.factor == pytest.approx(0.8, abs=0.01)


def test_a_step_that_waited_for_a_core_counts_as_twice_the_mean() -> None:
    baseline = Baseline()
    run(baseline, 20 * 128, 0.8 * PLAIN)
    known = baseline.factor
    assert run(baseline, 128, PLAIN, PLAIN, 90.0, 0.8 * PLAIN)[-1] == (128, 8)
    assert known < baseline.factor < known + 0.04


@pytest.mark.parametrize(("requests", "outside", "least"), [
    (2, OUTSIDE, 1.0), (1, 0.01 * PLAIN, 0.98),
])  # fmt: skip
def test_steps_of_another_load_and_what_drafts_cannot_cause_do_not_count(
    requests: int, outside: float, least: float
) -> None:
    baseline = Baseline()
    run(baseline, 20 * 128, 0.5 * PLAIN, outside=outside, requests=requests)
    assert baseline.factor == pytest.approx(least)


def test_a_comparison_of_which_nothing_was_observed_comes_again() -> None:
    """Steps in which a request comes or ends are not: drafts once seemed to pay for good."""
    baseline = Baseline()
    for _ in range(3):
        for _ in range(16):
            assert not baseline.due
            baseline.asked(1, PLAIN, OUTSIDE, 2.0)
        assert baseline.due
        baseline.rested()
    baseline.observe(1, PLAIN)
    assert run(baseline, 32, PLAIN, speedup=2.0) == [(32, 1)]


def test_plain_steps_end_though_prompts_come_between() -> None:
    baseline = Baseline()
    assert run(baseline, 127, PLAIN)
    for _ in range(8):
        baseline.asked(1, PLAIN, OUTSIDE, 1.0)  # with a prompt drafts go on
        assert baseline.due
        baseline.rested()
    assert not baseline.due


class Caches:
    """A machine that one request decodes on; steps that ask are slower, and the next one is, too.

    Args:
        slower: seconds of such a step relative to others'.
        right: how many of every four drafts, each of three tokens, are right.
    """

    def __init__(self, slower: float, right: int) -> None:
        self._truth = CostModel([1, 9], [150e-6, 270e-6])
        self._costs = CostModel([1, 9], [150e-6, 270e-6])
        self.controller = Controller(self._costs, 3)
        self._slower, self._right = slower, right
        self._asked, self._drafts = False, 0
        self._state = SpeculationState()

    def run(self, steps: int, *, drafts: bool = True) -> tuple[float, float]:
        """Seconds per token, and the share of steps that ask."""
        seconds, tokens, asks = 0.0, 0, 0
        for _ in range(steps):
            controller, state = self.controller, self._state
            asks_now = drafts and not controller.compares and controller.asks(state, "suffix")
            draft = Draft((1, 2, 3), drafter="suffix", accept_probs=(self._right / 4,) * 3)
            item = Proposal(state, draft=draft)
            width = 4 if asks_now else 1
            if asks_now:
                item.attempts, item.width = [Attempt("suffix", NO_DRAFT, 10e-6)], 4
                self._drafts += 1
            got = 4 if asks_now and self._drafts % 4 < self._right else 1
            item.came, item.emitted = list(range(1, got + 1)), got
            cold = self._slower if asks_now or self._asked else 1.0
            passing, outside = cold * self._truth.cost(width), cold * 50e-6
            self._costs.observe(width, 0.0, passing)
            controller.stepped([item] if asks_now else [], 1, 0.0)
            controller.observe(1, width - 1, got, passing, outside)
            self._asked = asks_now
            seconds, tokens, asks = seconds + passing + outside, tokens + got, asks + asks_now
            seconds += 10e-6 * asks_now
        return seconds / tokens, asks / steps


@pytest.mark.parametrize(("slower", "right", "pays"), [
    (1.0, 2, True), (1.25, 2, True), (1.5, 1, False),
])  # fmt: skip
def test_the_gain_that_is_told_is_that_of_the_machine(
    slower: float, right: int, pays: bool
) -> None:
    plain, _ = Caches(slower, right).run(1_000, drafts=False)
    machine = Caches(slower, right)
    machine.run(6_000)
    own, asks = machine.run(3_000)
    assert (asks > 0.9) is pays
    assert machine.controller.estimated_speedup == pytest.approx(plain / own, rel=0.06)
    assert plain / own > 0.985
