"""The controller against a simulated machine: its costs are given, nothing depends on a clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specops.acceptance import Outlook
from specops.asking import Asking
from specops.controller import Candidate, Controller, kind_of_match
from specops.costs import CostCurve

# Milliseconds of the TinyLlama shape in int4 on two cores, as measured.
VERIFY = [14.4, 18.2, 25.1, 30.7, 36.5, 42.4, 48.4, 54.4, 60.4]
DECODE = [14.4, 20.4, 26.6, 32.8, 39.2, 45.5, 51.8, 58.2]
GUESS = 2.5
MOST = 8
ASKING = 0.01  # ms that a lookup takes

Accepts = Callable[[int], float]  # step → chance that a guess is right


def curve() -> CostCurve:
    return CostCurve(VERIFY, DECODE, GUESS, feed=0.3)


class Machine:
    """Decodes requests whose guesses are right by chance; keeps time in milliseconds."""

    def __init__(self, *, paid: bool, seed: int = 0, asking: float = ASKING) -> None:
        self.controller = Controller(curve(), MOST)
        self.paid = paid
        self.rng = np.random.default_rng(seed)
        self.asking = asking
        self.time = self.asked = 0.0
        self.tokens = self.guessed = 0

    def run(self, rates: list[Accepts], steps: int, *, fixed: int | None = None) -> float:
        """Tokens per second of rounds with one request per rate."""
        before = self.tokens, self.time
        outlooks = [Outlook() for _ in rates]
        for step in range(steps):
            self.controller.begin(len(outlooks))
            candidates = [self.candidate(outlook, fixed) for outlook in outlooks]
            lengths = self.controller.choose(candidates)
            plain = [c for c, length in zip(candidates, lengths, strict=True) if not length]
            rows = [row for row, length in enumerate(lengths) if not length]
            for rate, candidate, length in zip(rates, candidates, lengths, strict=True):
                if length:
                    self.verify(candidate, length, rate(step))
            if plain:
                width = rows[-1] - rows[0] + 1  # a pass takes adjacent rows
                cost = DECODE[width - 1]
                self.controller.decoded(plain, cost, rows=width)
                self.time += cost
                self.tokens += len(plain)
            self.controller.round_ended()
        return (self.tokens - before[0]) / (self.time - before[1])

    def candidate(self, outlook: Outlook, fixed: int | None) -> Candidate:
        if fixed is not None:
            return Candidate(outlook, "draft", most=fixed, paid=self.paid and fixed > 0, fixed=True)
        if not self.controller.asks(outlook, "draft"):
            return Candidate(outlook, "draft")
        self.controller.asked(outlook, "draft", self.asking)
        self.time += self.asking
        self.asked += self.asking
        return Candidate(outlook, "draft", most=MOST, paid=self.paid, backlog=1)

    def verify(self, candidate: Candidate, guesses: int, rate: float) -> None:
        accepted = 0
        while accepted < guesses and self.rng.random() < rate:
            accepted += 1
        seconds, guessing = VERIFY[guesses], GUESS * guesses if self.paid else 0.0
        self.controller.verified(candidate, guesses, accepted, seconds, guessing)
        self.time += seconds + guessing
        self.tokens += accepted + 1
        self.guessed += guesses


def always(rate: float) -> Accepts:
    return lambda step: rate


@pytest.mark.parametrize("paid", [False, True])
@pytest.mark.parametrize("rate", [0.95, 0.9, 0.7, 0.5, 0.3, 0.0])
def test_one_request_is_about_as_fast_as_with_the_best_fixed_length(
    rate: float, paid: bool
) -> None:
    adaptive = Machine(paid=paid).run([always(rate)], 3000)
    fixed = [
        Machine(paid=paid).run([always(rate)], 3000, fixed=length) for length in range(MOST + 1)
    ]
    assert adaptive >= 0.95 * max(fixed)
    assert adaptive >= 0.975 * fixed[0]


@pytest.mark.parametrize("rate", [0.9, 0.6, 0.0])
@pytest.mark.parametrize("requests", [2, 4, 8])
def test_several_requests_are_as_fast_as_the_better_of_with_and_without(
    requests: int, rate: float
) -> None:
    def speed(fixed: int | None) -> float:
        return Machine(paid=False).run([always(rate)] * requests, 800, fixed=fixed)

    assert speed(None) >= 0.96 * max(speed(length) for length in range(MOST + 1))


def test_the_request_whose_guesses_are_right_gets_a_pass_of_its_own() -> None:
    machine = Machine(paid=False)
    machine.run([always(0.98), always(0.0)], 400)
    candidates = [Candidate(Outlook(), "draft", most=MOST) for _ in range(2)]
    for _ in range(30):
        machine.controller.verified(candidates[0], MOST, MOST, VERIFY[MOST], 0.0)
        machine.controller.verified(candidates[1], 1, 0, VERIFY[1], 0.0)
    lengths = machine.controller.choose(candidates)
    assert lengths[0] > 4
    assert lengths[1] == 0


def test_what_does_not_pay_is_tried_for_no_more_than_a_fiftieth_of_the_time() -> None:
    for paid in (False, True):
        tried, plain = Machine(paid=paid), Machine(paid=paid)
        speed = tried.run([always(0.0)], 5000)
        assert speed >= 0.98 * plain.run([always(0.0)], 5000, fixed=0)
        assert tried.guessed > 0


def test_many_short_requests_ask_no_more_than_long_ones() -> None:
    """Also where asking takes longer than a step: a lookup's first takes in the prompt."""
    machine = Machine(paid=False, asking=4 * DECODE[0])
    machine.run([always(0.0)] * 8, 2000)  # it learns that guesses do not pay
    time, asked = machine.time, machine.asked
    for _ in range(100):
        machine.run([always(0.0)] * 8, 100)
    assert 0 < machine.asked - asked <= 0.012 * (machine.time - time)


def test_what_does_not_pay_among_many_may_pay_alone() -> None:
    machine = Machine(paid=False, asking=2.0)
    machine.run([always(0.35)] * 8, 2000)
    guessed = machine.guessed
    machine.run([always(0.35)] * 8, 100)
    assert machine.guessed - guessed < 40
    assert machine.run([always(0.9)], 100) > 1.25 / DECODE[0]


def test_a_pass_of_its_own_has_gained_what_the_shared_pass_was_spared() -> None:
    """Who leaves between others spares it nothing: their rows are adjacent."""
    gains = {}
    for row in (1, 3):
        controller = Controller(curve(), MOST)
        outlooks = [Outlook() for _ in range(4)]
        for _ in range(200):
            controller.begin(4)
            lengths = controller.choose(
                [
                    Candidate(o, "draft", most=2 * (i == row), fixed=True)
                    for i, o in enumerate(outlooks)
                ]
            )
            assert lengths == [2 * (i == row) for i in range(4)]
            # Three tokens for a pass of 25.1 ms; the shared one of 4 rows takes 32.8, of 3 26.6.
            tried = Candidate(outlooks[row], "draft", most=2)
            controller.verified(tried, 2, 1, VERIFY[2], 0.0)
        gains[row] = outlooks[row].gains[4]
    assert gains[1] < gains[3]
    assert gains[1] == pytest.approx(1 - VERIFY[2] / (DECODE[3] / 4), rel=0.05)
    assert gains[3] == pytest.approx(1 - (VERIFY[2] - 6.2) / (DECODE[3] / 4), rel=0.05)


def test_more_requests_begin_with_what_fewer_have_gained() -> None:
    asking, outlook = Asking(), Outlook()
    asking.begin(2, 1.0)
    for _ in range(100):
        asking.gained(outlook, "draft", -1.0)
    for active, pays in ((1, True), (2, False), (3, False)):
        asking.begin(active, 1.0)
        assert asking.pays(Outlook(), "draft") is pays
        assert asking.pays(Outlook(), "ngram")


def test_asking_that_pays_runs_into_no_debt() -> None:
    """Once it does not pay any more, it is tried again as soon as after any other text."""
    asking, outlook = Asking(), Outlook()
    asking.begin(1, 1.0)
    for _ in range(1000):
        asking.asked(outlook, "draft", 0.5)
        asking.gained(outlook, "draft", 3.0)
    while asking.pays(outlook, "draft"):
        asking.asked(outlook, "draft", 0.5)
    for _ in range(60):
        asking.earned(1.0)
    assert asking.pays(outlook, "draft")


def test_a_cold_start_is_no_verdict_on_a_drafter() -> None:
    controller, outlook = Controller(curve(), MOST), Outlook()
    for _ in range(10):  # it finds nothing in a text's first words
        assert controller.asks(outlook, "draft")
        controller.asked(outlook, "draft", DECODE[0] / 10)
    assert controller.asks(outlook, "draft")
    assert controller.asks(Outlook(), "draft")


def test_waiting_for_a_core_is_not_what_asking_costs() -> None:
    controller, outlook = Controller(curve(), MOST), Outlook()
    assert controller.asks(outlook, "draft")
    controller.asked(outlook, "draft", 1000 * DECODE[0])
    assert controller.asks(outlook, "draft")


def test_a_text_that_turns_is_followed() -> None:
    machine = Machine(paid=False)
    machine.run([lambda step: 0.0 if step < 1000 else 0.9], 1000)
    before = machine.tokens
    machine.run([lambda step: 0.9], 600)
    assert machine.tokens - before > 2 * 600


def test_a_request_that_is_not_adaptive_gets_what_it_asked_for() -> None:
    controller = Controller(curve(), MOST)
    candidates = [Candidate(Outlook(), "draft", most=5, fixed=True) for _ in range(3)]
    assert controller.choose(candidates) == [5, 5, 5]
    assert controller.choose([Candidate(Outlook())]) == [0]


def test_an_exact_request_counts_the_spare_tokens_of_its_passes() -> None:
    exact = Candidate(Outlook(), "draft", most=4, align=2, alone=True)
    assert [exact.width(guesses) for guesses in range(4)] == [2, 2, 4, 4]
    # The spare token is paid for in any case, so one guess costs nothing more than none.
    assert Controller(curve(), MOST).choose([exact])[0] >= 1


def test_a_drafter_that_never_pays_is_not_fed_beforehand() -> None:
    machine = Machine(paid=True)
    assert machine.controller.pays("draft")
    machine.run([always(0.0)], 500)
    assert not machine.controller.pays("draft")


def test_a_draft_model_that_is_far_behind_has_to_be_worth_catching_up() -> None:
    controller = Controller(curve(), MOST)
    near = Candidate(Outlook(), "draft", most=MOST, paid=True, backlog=1)
    for _ in range(40):
        controller.verified(near, 4, 4, VERIFY[4], 4 * GUESS)
    assert controller.choose([near])[0] > 0
    near.backlog = 1000
    assert controller.choose([near]) == [0]


def test_the_estimated_speedup_is_that_of_the_simulation() -> None:
    machine = Machine(paid=False)
    plain = 1 / DECODE[0]
    speed = machine.run([always(0.9)], 2000)
    assert machine.controller.speedup(1) == pytest.approx(speed / plain, rel=0.1)
    assert machine.controller.estimated_speedup == machine.controller.speedup(1)
    assert Controller(curve(), MOST).estimated_speedup == 1.0


@pytest.mark.parametrize(
    ("length", "kind"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 4), (9, 8), (16, 16), (500, 16)]
)
def test_matches_are_sorted_by_powers_of_two(length: int, kind: int) -> None:
    assert kind_of_match(length) == kind
