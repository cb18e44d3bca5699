"""The controller against a simulated machine: its costs are given, nothing depends on a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specops.runtime.cost_model import CostModel
from specops.speculation.acceptance import Acceptance, SpeculationState
from specops.speculation.controller import Candidate, Controller
from tests.simulated_target import tinyllama

MOST = 8
Accepts = Callable[[int], float]  # step → chance that a draft token is right


def always(rate: float) -> Accepts:
    return lambda step: rate


class Machine:
    """Decodes requests whose draft tokens are right by chance; keeps time in seconds.

    Args:
        draft: costs of a draft model; without one draft tokens are looked up.
        row: seconds to choose a token behind each that was verified, or to compare.
        position: tokens that every request looks back at.
        sampled: the requests' tokens are drawn.
    """

    def __init__(
        self,
        draft: CostModel | None = None,
        *,
        row: float = 0.0,
        position: int = 0,
        sampled: bool = False,
    ) -> None:
        self.costs = tinyllama()
        self.controller = Controller(self.costs, draft, MOST)
        self.draft = draft
        self.row = row
        self.position = position
        self.sampled = sampled
        self.rng = np.random.default_rng(0)
        self.time = self.drafting = 0.0
        self.tokens = self.drafted = 0
        self.lengths: list[list[int]] = []

    def run(
        self,
        rates: Sequence[Accepts],
        steps: int,
        *,
        fixed: int | None = None,
        prompt: int = 0,
    ) -> float:
        """Tokens per second of steps with one request per rate, beside a prompt's tokens."""
        before = self.tokens, self.time
        states = [SpeculationState() for _ in rates]
        for step in range(steps):
            candidates = [
                Candidate(
                    state,
                    self.position,
                    "draft",
                    most=MOST if fixed is None else fixed,
                    backlog=int(self.draft is not None),
                    fixed=fixed is not None,
                    sampled=self.sampled,
                )
                for state in states
            ]
            lengths = self.controller.choose(candidates, prompt)
            self.lengths.append(lengths)
            widths = [1 + length for length in lengths]
            drafting = self.passes(lengths)
            got = []
            for candidate, rate, length in zip(candidates, rates, lengths, strict=True):
                accepted = 0
                while accepted < length and self.rng.random() < rate(step):
                    accepted += 1
                choosing = self.row * (1 + length)
                self.controller.verified(candidate, length, accepted, choosing)
                got.append(1 + accepted)
            work = self.position * sum(widths)
            choosing = self.row * sum(widths)
            self.time += self.costs.cost(sum(widths) + prompt, work) + drafting + choosing
            self.drafting += drafting
            self.controller.stepped(candidates, got, widths, draft_seconds=drafting)
            self.tokens += sum(got)
            self.drafted += sum(lengths)
        return (self.tokens - before[0]) / (self.time - before[1])

    def passes(self, lengths: Sequence[int]) -> float:
        """Seconds of the draft model: a pass per position, for all that get so far."""
        if self.draft is None:
            return 0.0
        return sum(
            self.draft.cost(sum(length > position for length in lengths))
            for position in range(MOST)
        )


def candidate(rate: float, most: int = MOST, **fields: object) -> Candidate:
    """A request of which is known how often its draft tokens are right."""
    state = SpeculationState()
    acceptance = state.seen["draft"] = Acceptance(MOST)
    acceptance.rates, acceptance.drafts = [rate] * MOST, 1
    return Candidate(state, drafter="draft", most=most, **fields)  # type: ignore[arg-type]


# -- promises --------------------------------------------------------------------------------------


def test_promises_decide_where_a_drafter_makes_some() -> None:
    controller = Controller(tinyllama(), None, MOST)
    sure, unsure = (candidate(0.5, promised=[rate] * MOST) for rate in (0.98, 0.02))
    many, none = controller.choose([sure, unsure])
    assert many > 3
    assert none == 0


def test_promises_that_are_not_kept_are_not_believed_for_long() -> None:
    controller = Controller(tinyllama(), None, MOST)
    liar = candidate(0.5, promised=[0.95] * MOST)
    before = controller.choose([liar])[0]
    for _ in range(200):
        controller.verified(liar, MOST, 0, 0.0)
    assert before > 3
    assert controller.choose([liar]) == [0]


# -- how many pay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.1, 0.3], ids=["looked up", "cheap draft", "dear draft"])
@pytest.mark.parametrize("requests", [1, 4, 8])
@pytest.mark.parametrize("rate", [0.95, 0.7, 0.0])
def test_it_is_about_as_fast_as_the_best_fixed_length(
    requests: int, rate: float, share: float | None
) -> None:
    """Probing finds only slowly that a dear draft model is worth a little among several."""

    def speed(fixed: int | None, learning: int) -> float:
        machine = Machine(None if share is None else tinyllama(share))
        machine.run([always(rate)] * requests, learning, fixed=fixed)
        return machine.run([always(rate)] * requests, 900 // requests, fixed=fixed)

    fixed = [speed(length, 1) for length in (0, 1, 2, 3, 5, MOST)]
    best = fixed[0] if share == 0.3 and requests > 1 else max(fixed)
    assert speed(None, 600) >= max(0.98 * fixed[0], 0.92 * best)


@pytest.mark.parametrize("requests", [1, 4, 8])
def test_where_nine_of_ten_are_accepted_it_drafts(requests: int) -> None:
    machine = Machine()
    machine.run([always(0.9)] * requests, 50)
    speed = machine.run([always(0.9)] * requests, 300)
    assert np.mean(machine.lengths[50:]) > 0.8
    gain = {1: 2.7, 4: 1.3, 8: 1.09}[requests]  # with the best fixed length: 3.1, 1.43, 1.14
    assert speed > gain * requests / machine.costs.cost(requests)


@pytest.mark.parametrize("share", [None, 0.1])
@pytest.mark.parametrize("requests", [1, 4, 8])
def test_where_nothing_is_accepted_it_only_probes_within_its_share_of_the_time(
    requests: int, share: float | None
) -> None:
    machine = Machine(None if share is None else tinyllama(share))
    states = [always(0.0)] * requests
    machine.run(states, 300)
    start, drafted, tokens = machine.time, machine.drafted, machine.tokens
    machine.run(states, 3000)
    assert 0 < machine.drafted - drafted < 0.2 * (machine.tokens - tokens)
    plain = (machine.tokens - tokens) / requests * machine.costs.cost(requests)
    assert machine.time - start <= 1.02 * plain


def test_more_requests_never_admit_less_likely_places() -> None:
    """Where every token costs the same: what a place must be worth grows with what passes earn."""
    costs = CostModel([1, 200], [0.0125, 0.0125 + 199 * 0.002])
    controller = Controller(costs, None, MOST)
    deepest = []
    for requests in range(1, 17):
        lengths = controller.choose([candidate(0.85) for _ in range(requests)])
        assert max(lengths) - min(lengths) <= 1
        deepest.append(max(lengths))
    assert deepest == sorted(deepest, reverse=True)
    assert deepest[0] > deepest[-1]


def test_the_likeliest_places_come_first_whoever_has_them() -> None:
    controller = Controller(tinyllama(), None, MOST)
    rates = [0.95, 0.8, 0.6, 0.2]
    lengths = controller.choose([candidate(rate) for rate in rates])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_what_is_not_there_is_not_admitted() -> None:
    controller = Controller(tinyllama(), None, MOST)
    lengths = controller.choose([candidate(1.0, most=2), candidate(1.0, most=0), candidate(1.0)])
    assert lengths == [2, 0, MOST]


def test_a_width_at_which_passes_get_dear_is_not_stepped_over_for_little() -> None:
    """A group of 8 costs as much as one token, the next group as much again."""
    costs = CostModel([1, 8, 9, 16, 17, 24], [1.0, 1.01, 2.0, 2.01, 3.0, 3.01])
    controller = Controller(costs, None, MOST)
    assert controller.choose([candidate(0.5, most=MOST)]) == [5]  # the sixth is too rarely reached
    lengths = controller.choose([candidate(0.6, most=MOST) for _ in range(3)])
    assert sum(lengths) + 3 == 8


@pytest.mark.parametrize("prompt", [64, 200])
def test_beside_a_prompt_a_draft_token_must_be_worth_what_it_adds(prompt: int) -> None:
    """A token more costs 2 ms there, and decoding alone a token in 12.5 ms: 0.17 of one."""
    costs = tinyllama()
    token = costs.cost(prompt + 5) - costs.cost(prompt + 4)
    for rate in (0.05, 0.1, 0.5, 0.9):
        lengths = Controller(costs, None, MOST).choose([candidate(rate)], prompt)
        alone = Controller(costs, None, MOST).choose([candidate(rate)])
        earns = max(
            sum(rate**index for index in range(length + 1)) / costs.cost(1 + length)
            for length in range(MOST + 1)
        )
        worth = sum(rate ** (index + 1) > earns * token for index in range(MOST))
        assert abs(lengths[0] - worth) <= 1
        assert rate > 0.1 or lengths[0] <= alone[0]
    assert Controller(costs, None, MOST).choose([candidate(0.05)], prompt) == [0]


def test_looking_back_far_makes_places_dear() -> None:
    costs = CostModel([1, 16], [0.010, 0.012], pair_seconds=1e-6)
    near, far = (
        Controller(costs, None, MOST).choose([candidate(0.8, position=position)])[0]
        for position in (0, 30_000)
    )
    assert near == MOST
    assert far < near


@pytest.mark.parametrize("sampled", [False, True])
def test_dear_rows_make_it_draft_less(*, sampled: bool) -> None:
    """Each verified row takes as long as a token more in the pass, or ten times as long."""
    drafted = []
    for row in (0.0, 0.002, 0.02):
        machine = Machine(row=row, sampled=sampled)
        machine.run([always(0.8)], 300)
        drafted.append(machine.drafted)
    assert drafted[0] > 1.2 * drafted[1] > 2 * drafted[2]


def test_rows_of_sampled_requests_are_counted_apart() -> None:
    """Drawing a token takes longer than finding the likeliest: it pays for fewer draft tokens."""
    controller = Controller(tinyllama(), None, MOST)
    greedy, sampled = candidate(0.8), candidate(0.8, sampled=True)
    before = controller.choose([greedy]), controller.choose([sampled])
    assert before[0] == before[1]
    for _ in range(60):
        controller.verified(greedy, 0, 0, 1e-5)
        controller.verified(sampled, 0, 0, 0.005)
    assert controller.choose([greedy]) == before[0]
    assert 0 <= controller.choose([sampled])[0] < before[1][0]
    together = controller.choose([greedy, sampled])
    assert together[0] > together[1]


def test_rows_cost_the_same_however_many_were_verified_at_once() -> None:
    costs = [Controller(tinyllama(), None, MOST) for _ in range(2)]
    for _ in range(30):
        costs[0].verified(candidate(0.8), 0, 0, 0.004)
        costs[1].verified(candidate(0.8), 3, 3, 0.016)
    assert costs[0].choose([candidate(0.8)]) == costs[1].choose([candidate(0.8)])


def test_a_row_that_had_to_wait_for_a_core_counts_as_twice_the_usual() -> None:
    controller = Controller(tinyllama(), None, MOST)
    for _ in range(30):
        controller.verified(candidate(0.8), 0, 0, 1e-5)
    before = controller.choose([candidate(0.8)])
    controller.verified(candidate(0.8), 0, 0, 10.0)
    assert controller.choose([candidate(0.8)]) == before


def test_a_token_without_a_draft_tells_nothing_of_drafts() -> None:
    controller, state = Controller(tinyllama(), None, MOST), SpeculationState()
    for _ in range(50):
        controller.verified(Candidate(state, drafter="draft", most=MOST), 0, 0, 1e-5)
    assert state.seen == {}


@pytest.mark.parametrize("requests", [1, 4])
def test_where_wide_passes_have_become_dear_it_drafts_less(requests: int) -> None:
    """A neighbour takes half of the arithmetic: seen within some tens of passes of many widths.

    Of one width they would not tell it from a machine that is slower in all.
    """
    model, slow = tinyllama(), tinyllama()
    slow.marginal = 2.0
    controller = Controller(model, None, MOST)

    def drafted() -> int:
        return sum(controller.choose([candidate(0.9) for _ in range(requests)]))

    before = drafted()
    for step in range(80):  # half without drafts, every fourth with a prompt
        width = requests + (drafted() if step % 2 else 0) + (64 if step % 4 == 0 else 0)
        model.observe(width, 0.0, slow.cost(width))
    assert 0 < drafted() < 0.7 * before
    model.fixed, model.marginal = 2.0, 2.0  # as slow in all: the choice is that of before
    assert drafted() == before


# -- draft models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "requests", "asked"), [
    (0.05, 1, True), (0.05, 8, True), (0.4, 1, True), (0.4, 8, False), (0.85, 1, False),
])  # fmt: skip
def test_what_a_draft_model_costs_is_counted(share: float, requests: int, asked: bool) -> None:
    """A token in 1.9 costs 14.3 ms and a draft pass instead of 12.5; 15.2 in 39.5, of 8 in 23.6."""
    machine = Machine(tinyllama(share))
    states = [always(0.9)] * requests
    machine.run(states, 100)
    drafted = machine.drafted
    machine.run(states, 300)
    assert ((machine.drafted - drafted) / (300 * requests) > 0.5) == asked
    assert machine.controller.pays("draft") == asked


def test_a_draft_model_far_behind_has_to_be_worth_catching_up() -> None:
    controller = Controller(tinyllama(), tinyllama(0.1), MOST)
    assert controller.choose([candidate(0.95, backlog=1)])[0] > 0
    assert controller.choose([candidate(0.95, backlog=2000)]) == [0]


def test_several_share_a_draft_pass() -> None:
    """Where one pays for every pass alone, eight get a pass over 8 tokens for twice its price."""
    draft = tinyllama(0.3)
    machine = Machine(draft)
    assert machine.passes([3] * 8) == pytest.approx(3 * draft.cost(8))
    lengths = Controller(tinyllama(), draft, MOST).choose([candidate(0.9, backlog=1)] * 2)
    assert min(lengths) > 0


def test_a_draft_model_that_has_become_slow_is_asked_for_less() -> None:
    """It has become twice as slow, and the target has not."""
    draft = tinyllama(0.5)
    controller = Controller(tinyllama(), draft, MOST)
    assert controller.choose([candidate(0.9, backlog=1)])[0] > 0
    for _ in range(60):
        draft.observe(1, 0.0, 2 * tinyllama(0.5).cost(1))
    assert controller.choose([candidate(0.9, backlog=1)]) == [0]


# -- what changes ----------------------------------------------------------------------------------


def test_a_text_that_turns_is_followed() -> None:
    machine = Machine()
    machine.run([lambda step: 0.0 if step < 1000 else 0.9], 1000)
    before = machine.tokens
    machine.run([always(0.9)], 600)
    assert machine.tokens - before > 2 * 600


def test_a_text_that_turns_is_noticed_while_it_runs() -> None:
    machine = Machine()
    machine.run([lambda step: 0.0 if step < 500 else 0.95], 1500)
    assert np.mean(machine.lengths[-300:]) > 2


def test_whichever_text_turns_is_noticed() -> None:
    """Others, of which nothing is accepted, do not use the whole share of the time up."""
    for turning in range(4):
        machine = Machine()
        rates = [always(0.0)] * 4
        rates[turning] = lambda step: 0.0 if step < 300 else 0.95
        machine.run(rates, 3000)
        assert np.mean([lengths[turning] for lengths in machine.lengths[-300:]]) > 1


def test_a_text_that_is_not_drafted_well_any_more_is_left_alone() -> None:
    machine = Machine()
    machine.run([lambda step: 0.95 if step < 300 else 0.0], 600)
    assert np.mean(machine.lengths[100:300]) > 3
    assert np.mean(machine.lengths[-200:]) < 0.2


def test_a_new_request_begins_with_what_others_have_learned() -> None:
    machine = Machine()
    machine.run([always(0.0)], 300)
    unknown = Candidate(SpeculationState(), drafter="draft", most=MOST)
    other = Candidate(SpeculationState(), drafter="suffix", most=MOST)
    machine.controller._credit = 0.0  # no probing now
    assert machine.controller.choose([unknown]) == [0]
    assert machine.controller.choose([other])[0] > 0


def test_lengths_that_are_not_adaptive_are_kept() -> None:
    controller = Controller(tinyllama(), None, MOST)
    fixed = [candidate(0.0, most=length, fixed=True) for length in (5, 0, 8)]
    assert controller.choose(fixed) == [5, 0, 8]
    assert controller.choose(fixed, 300) == [5, 0, 8]
    assert controller.choose([*fixed, candidate(0.9)])[:3] == [5, 0, 8]
    assert controller.choose([Candidate(SpeculationState())]) == [0]


def test_a_drafter_pays_until_it_was_seen_not_to() -> None:
    machine = Machine(tinyllama(0.9))
    assert machine.controller.pays("draft")
    machine.run([always(0.0)], 300)
    assert not machine.controller.pays("draft")


# -- what it tells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("rate", [0.9, 0.0])
def test_the_estimated_speedup_is_that_of_the_machine(requests: int, rate: float) -> None:
    machine = Machine()
    speed = machine.run([always(rate)] * requests, 1500)
    plain = requests / machine.costs.cost(requests)
    assert machine.controller.estimated_speedup == pytest.approx(speed / plain, rel=0.12)


def test_nothing_is_estimated_at_first() -> None:
    assert Controller(tinyllama(), None, MOST).estimated_speedup == 1.0


def test_the_estimate_does_not_depend_on_how_slow_the_machine_is() -> None:
    """Three times as slow in everything: as many draft tokens pay, and bring as much."""
    found = []
    for slowness in (1.0, 3.0):
        machine = Machine(row=0.0005 * slowness)
        machine.costs.fixed = machine.costs.marginal = slowness
        machine.run([always(0.9)], 500)
        found.append(machine.controller.estimated_speedup)
    assert found[0] == pytest.approx(found[1], rel=0.05)
