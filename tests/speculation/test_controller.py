"""The controller against a simulated machine: its costs are given, nothing depends on a clock."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from specops.runtime.cost_model import CostModel
from specops.speculation.controller import Attempt, Controller, Proposal, _gains
from specops.speculation.credit import SHARE, Credit, SpeculationState
from specops.speculation.drafters.base import MIN_REACH, NO_DRAFT, Draft
from specops.speculation.overhead import Overhead
from tests.simulated_target import tinyllama

MOST = 8


class Machine:
    """Decodes requests whose draft tokens are right by chance; keeps time in seconds.

    Args:
        drawing: seconds to draw a token.
        rest: seconds of a step beside its pass: for the step, each draft token, and each new one.
        costs: of passes.
    """

    def __init__(
        self,
        *,
        drawing: float = 0.0,
        rest: tuple[float, float, float] = (0.0, 0.0, 0.0),
        costs: CostModel | None = None,
    ) -> None:
        self.costs = costs or tinyllama()
        self.controller = Controller(self.costs, MOST)
        self.drawing, self.rest = drawing, rest
        self.rng = np.random.default_rng(0)
        self.time = 0.0
        self.tokens = 0

    def run(self, rates: Sequence[float], steps: int, *, fixed: int | None = None) -> float:
        """Tokens per second of steps with one request per rate."""
        before = self.tokens, self.time
        states = [SpeculationState(fixed is None, self.drawing > 0) for _ in rates]
        for _ in range(steps):
            most = MOST if fixed is None else fixed
            if fixed is None and self.controller.compares:
                most = 0
            proposals = [
                proposal(rate, most, speculation=state)
                for state, rate in zip(states, rates, strict=True)
            ]
            lengths = self.controller.choose(proposals)
            outcomes = []
            for item, rate, length in zip(proposals, rates, lengths, strict=True):
                item.draft = item.draft.cut(length)
                accepted = 0
                while accepted < length and self.rng.random() < rate:
                    accepted += 1
                outcomes.append(outcome(item, accepted))
                if self.drawing:
                    self.controller.drawn(1 + accepted, self.drawing * (1 + accepted))
            got, drafted = sum(item.emitted for item in outcomes), sum(lengths)
            step, draft_token, token = self.rest
            rest = step + draft_token * drafted + token * got
            self.time += self.costs.cost(len(rates) + drafted) + rest + self.drawing * got
            self.controller.stepped(outcomes if most else [], len(outcomes), 0.0)
            passing = self.costs.cost(len(rates) + drafted)
            self.controller.observe(len(rates), drafted, got, passing, rest)
            self.tokens += got
        return (self.tokens - before[0]) / (self.time - before[1])


def proposal(rate: float, most: int = MOST, **fields: object) -> Proposal:
    """A request whose draft tokens are each accepted with a probability, and that is known."""
    given = {"speculation": SpeculationState(), **fields}
    draft = Draft((0,) * most, drafter="suffix", accept_probs=(rate,) * most)
    return Proposal(draft=draft, **given)  # type: ignore[arg-type]


def outcome(item: Proposal, accepted: int) -> Proposal:
    """So many of a draft's tokens were right."""
    item.width, item.emitted = 1 + len(item.draft.tokens), 1 + accepted
    item.came = [0] * accepted + [1]
    return item


def choose(*proposals: Proposal, costs: CostModel | None = None, prompt: int = 0) -> list[int]:
    return Controller(costs or tinyllama(), MOST).choose(proposals, prompt)


# -- how many pay ----------------------------------------------------------------------------------

# Of passes of 0.25 ms: output that takes as long, and rows of logits that take a fifth.
REST = [(0.0, 0.0, 0.0), (30e-6, 10e-6, 200e-6), (60e-6, 50e-6, 30e-6)]


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("requests", [1, 4, 8])
@pytest.mark.parametrize("rate", [0.95, 0.7, 0.3])
def test_by_whole_steps_it_is_about_as_fast_as_the_best_fixed_length(
    requests: int, rate: float, rest: tuple[float, float, float]
) -> None:
    def speed(fixed: int | None) -> float:
        machine = Machine(rest=rest, costs=tinyllama(0.02))
        machine.run([rate] * requests, 300)  # learns
        return machine.run([rate] * requests, 900 // requests, fixed=fixed)

    fixed = [speed(length) for length in (0, 1, 2, 3, 5, MOST)]
    assert speed(None) >= max(0.99 * fixed[0], 0.95 * max(fixed))


def test_a_drafter_may_lose_any_number_of_times() -> None:
    credit = Credit()
    for now in range(2_000):
        credit.book(-1.0, 1.0, float(now))
    assert 1_999.0 < credit.due() < 1e9


def test_the_likeliest_places_come_first_and_what_is_not_there_is_not_admitted() -> None:
    lengths = choose(*(proposal(rate) for rate in (0.95, 0.8, 0.6, 0.2)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert choose(proposal(1.0, most=2), proposal(1.0, most=0), proposal(1.0)) == [2, 0, MOST]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_lengths_give_more_tokens_per_second(seed: int) -> None:
    rng, costs = np.random.default_rng(seed), tinyllama(0.02)
    drafts = [rng.random(rng.integers(5)) ** 0.3 for _ in range(3)]

    def rate(lengths: Sequence[int]) -> float:
        kept = [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]
        tokens = len(kept) + sum(np.cumprod(draft).sum() for draft in kept)
        return tokens / costs.cost(len(kept) + sum(lengths))

    made = [Draft((0,) * len(draft), accept_probs=tuple(draft.tolist())) for draft in drafts]
    lengths = choose(*(Proposal(SpeculationState(), draft=draft) for draft in made), costs=costs)
    every = product(*(range(len(draft) + 1) for draft in drafts))
    assert rate(lengths) == pytest.approx(max(map(rate, every)), rel=1e-12)


def test_a_width_at_which_passes_get_dear_is_not_stepped_over_for_little() -> None:
    """A group of 8 costs as much as one token, the next group as much again."""
    costs = CostModel([1, 8, 9, 16, 17, 24], [1.0, 1.01, 2.0, 2.01, 3.0, 3.01])
    assert choose(proposal(0.5), costs=costs) == [5]  # the sixth is too rarely reached
    assert sum(choose(*(proposal(0.6) for _ in range(3)), costs=costs)) + 3 == 8


@pytest.mark.parametrize("prompt", [64, 200])
def test_beside_a_prompt_a_draft_token_must_be_worth_what_it_adds(prompt: int) -> None:
    """A token more costs 2 ms there, and decoding alone a token in 12.5 ms: 0.17 of one."""
    costs = tinyllama()
    token = costs.cost(prompt + 5) - costs.cost(prompt + 4)
    for rate in (0.05, 0.5, 0.9):
        earns = max(
            sum(rate**index for index in range(length + 1)) / costs.cost(1 + length)
            for length in range(MOST + 1)
        )
        worth = sum(rate ** (index + 1) > earns * token for index in range(MOST))
        assert abs(choose(proposal(rate), prompt=prompt)[0] - worth) <= 1
    assert choose(proposal(0.05), prompt=prompt) == [0]


def test_looking_back_far_makes_places_dear() -> None:
    costs = CostModel([1, 16], [0.010, 0.012], pair_seconds=1e-6)
    (near,) = choose(proposal(0.8, start=0), costs=costs)
    (far,) = choose(proposal(0.8, start=30_000), costs=costs)
    assert far < near == MOST


def test_one_token_that_was_drawn_late_counts_as_twice_the_usual() -> None:
    controller = Controller(tinyllama(), MOST)
    both = [proposal(0.8), proposal(0.8, speculation=SpeculationState(sampled=True))]
    for _ in range(60):
        controller.drawn(3, 0.015)
    together = controller.choose(both)
    controller.drawn(1, 10.0)
    assert controller.choose(both) == together


def test_adjusting_a_position_is_a_cost_of_its_request_greedy_or_not() -> None:
    """Penalties and grammars take their time for every draft token, accepted or not."""
    controller = Controller(tinyllama(), MOST)
    plain, adjusted = proposal(0.8), proposal(0.8)
    before = controller.choose([plain, adjusted])
    for _ in range(60):
        controller.adjusted(adjusted.speculation, 3, 0.015)
    assert adjusted.speculation.adjusting == pytest.approx(0.005)
    together = controller.choose([plain, adjusted])
    assert together[1] < before[1]
    plain.draft, adjusted.draft = plain.draft.cut(0), adjusted.draft.cut(4)
    controller.stepped([outcome(plain, 0), outcome(adjusted, 0)], 1, 0.0)


@pytest.mark.parametrize(("requests", "rate"), [(1, 0.6), (4, 0.9)])
def test_where_wide_passes_have_become_dear_it_drafts_less(requests: int, rate: float) -> None:
    """A neighbour takes half of the arithmetic: seen within some tens of passes of many widths."""
    model, slow = tinyllama(), tinyllama()
    slow.set_speed(1.0, 2.0)

    def drafted() -> int:
        return sum(choose(*(proposal(rate) for _ in range(requests)), costs=model))

    before = drafted()
    for step in range(80):  # half without drafts, every fourth with a prompt
        width = requests + (drafted() if step % 2 else 0) + (64 if step % 4 == 0 else 0)
        model.observe(width, 0.0, slow.cost(width))
    assert 0 < drafted() < 0.7 * before
    model.set_speed(2.0, 2.0)  # as slow in all: the choice is that of before
    assert drafted() == before


@pytest.mark.parametrize("rest", REST)
def test_no_place_below_the_least_probability_is_admitted(
    rest: tuple[float, float, float],
) -> None:
    """A drafter that ends its drafts there leaves out nothing that pays."""
    for requests in (1, 4, 8):
        for prompt in (0, 64):
            machine = Machine(rest=rest, costs=tinyllama(0.02))
            machine.run([0.9] * requests, 300)
            least = machine.controller.reaches(requests, prompt)[0]
            items = [proposal(min(0.99, 0.99 * least)) for _ in range(requests)]
            assert not any(machine.controller.choose(items, prompt))


def test_each_place_is_measured_by_what_it_adds_itself() -> None:
    """The first three tokens of a pass cost as much as one, each after them a quarter more."""
    costs = CostModel([1, 3, 11, 40], [0.016, 0.016, 0.048, 0.164])
    alone, four = (Controller(costs, 4).reaches(requests) for requests in (1, 4))
    assert alone == [pytest.approx(reach) for reach in (MIN_REACH, MIN_REACH, 0.25, 0.25)]
    assert four == [pytest.approx(0.8)] * 4  # 4 of 20 ms: a token in five


def test_lengths_that_are_not_adaptive_are_kept() -> None:
    fixed = [proposal(0.0, length, speculation=SpeculationState(False)) for length in (5, 0, 8)]
    assert choose(*fixed, prompt=300) == [5, 0, 8]
    assert choose(*fixed, proposal(0.9))[:3] == [5, 0, 8]
    assert choose(proposal(0.9, 0)) == [0]


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize(("rate", "drawing"), [(0.9, 0.0), (0.0, 0.0), (0.9, 0.00002)])
def test_the_estimated_speedup_is_that_of_the_machine_and_never_above_the_tokens_of_a_pass(
    requests: int, rate: float, drawing: float, rest: tuple[float, float, float]
) -> None:
    machine = Machine(drawing=drawing, rest=rest, costs=tinyllama(0.02))
    assert machine.controller.estimated_speedup == 1.0
    speed = machine.run([rate] * requests, 1500)
    step, _, token = rest
    plain = machine.costs.cost(requests) + step + requests * (token + drawing)
    told = machine.controller.estimated_speedup
    assert told == pytest.approx(speed * plain / requests, rel=0.12)
    assert told <= machine.tokens / (1500 * requests) * 1.12  # of the latest steps


def test_the_rest_of_a_step_is_parted_into_what_draft_tokens_and_new_ones_take() -> None:
    machine = Machine(rest=(30e-6, 10e-6, 40e-6), costs=tinyllama(0.02))
    machine.run([0.9, 0.6, 0.3], 3000)
    overhead = machine.controller.overhead
    assert overhead.seconds(3) == pytest.approx(150e-6, rel=0.05)
    assert overhead.draft_token == pytest.approx(10e-6, rel=0.3)
    assert overhead.token == pytest.approx(40e-6, rel=0.3)
    overhead.observe(3, 0, 3, 1.0)  # it waited for a core
    assert overhead.seconds(3) < 160e-6


def test_what_verifying_takes_once_a_step_is_not_counted_as_the_draft_tokens_time() -> None:
    """Where few are made they would look dear, so fewer would be made."""
    overhead = Overhead()
    for drafted in [0, 1, 2, 3, 4] * 128:
        verifying = 40e-6 * (drafted > 0) + 3e-6 * drafted
        overhead.observe(4, drafted, 4 + drafted // 2, 60e-6 + verifying)
    assert overhead.drafting == pytest.approx(40e-6, rel=0.2)
    assert overhead.draft_token == pytest.approx(3e-6, rel=0.3)
    assert overhead.seconds(4, 2, 5) == pytest.approx(106e-6, rel=0.05)


def test_first_steps_that_waited_for_a_core_cannot_make_draft_tokens_dearer_than_requests() -> None:
    """Nothing is expected yet, so nothing is capped: drafts seemed not to pay, often for good."""
    overhead = Overhead()
    for step in range(64):
        drafted, requests = 4 * (step % 8 == 0), 4 - (step % 5 == 0)
        seconds = 80e-6 + 0.5e-3 * drafted if drafted else 320e-6 / requests
        overhead.observe(requests, drafted, requests + drafted // 2, seconds)
    assert 0 < overhead.draft_token < 25e-6  # 80 us by four requests
    assert overhead.drafting < 100e-6


def test_a_few_draft_tokens_that_waited_for_a_core_do_not_end_the_drafting() -> None:
    """They were believed to take 0.6 ms each, and as none were verified any more, for good."""
    machine = Machine(rest=(20e-6, 5e-6, 30e-6), costs=tinyllama(0.02))
    for step in range(64):
        drafted = 3 * (step % 16 == 0)
        machine.controller.overhead.observe(1, drafted, 1, 50e-6 + drafted * 1e-3)
    machine.run([0.9], 1000)
    assert machine.tokens > 2500
    assert machine.controller.overhead.draft_token < 15e-6


# -- whom to ask -----------------------------------------------------------------------------------

PASS, TOKEN, LOOKUP = 400e-6, 50e-6, 20e-6  # seconds
LONG = 600  # steps


def small_model() -> Controller:
    return Controller(CostModel([1, 9], [PASS, PASS + 8 * TOKEN]), 8)


def look_up(
    controller: Controller, state: SpeculationState, steps: int, *, found: int = 0,
    took: float = LOOKUP, right: bool = True,
) -> int:  # fmt: skip
    """Look up where that pays: so many tokens each time, all right or none; returns how often."""
    made = 0
    for _ in range(steps):
        now = controller.asks(state, "suffix", NO_DRAFT, PASS)
        attempts = [Attempt("suffix", NO_DRAFT, took)] if now else []
        item = proposal(0.9, found * now, speculation=state, attempts=attempts)
        controller.stepped([outcome(item, found * now * right)], 1, 0.0)
        made += now
    return made


def look_up_together(
    controller: Controller, states: Sequence[SpeculationState], *, found: int = 0,
    right: bool = True, lucky: bool = False,
) -> int:  # fmt: skip
    """One step in which requests look up where that pays, as `look_up`; returns how many did.

    In a lucky step all do, and find three tokens that are right.
    """
    outcomes, made = [], 0
    for state in states:
        now = lucky or controller.asks(state, "suffix", NO_DRAFT, PASS / len(states))
        attempts = [Attempt("suffix", NO_DRAFT, LOOKUP)] if now else []
        tokens = 3 if lucky else found * now
        item = proposal(0.9, tokens, speculation=state, attempts=attempts)
        outcomes.append(outcome(item, tokens * right))
        made += now
    controller.stepped(outcomes, len(states), 0.0)
    return made


def share_of(made: int, seconds: float, steps: int = LONG) -> float:
    """The share of the time that so many lookups took."""
    return made * seconds / (steps * PASS + made * seconds)


def test_lookups_that_find_nothing_take_a_small_share_until_the_text_repeats_itself() -> None:
    controller, state = small_model(), SpeculationState()
    assert look_up(controller, state, 8) == 8
    look_up(controller, state, LONG)
    assert 0.6 < share_of(look_up(controller, state, LONG), LOOKUP) / SHARE < 1.2
    look_up(controller, state, 32, found=3)
    assert look_up(controller, state, 8, found=3) == 8


def test_asking_again_takes_longer_each_time() -> None:
    controller, state, gaps = small_model(), SpeculationState(), [0]
    for _ in range(2 * LONG):
        if look_up(controller, state, 1):
            gaps.append(0)
        gaps[-1] += 1
    assert gaps[1:40] == [1] * 39
    later = [gap for gap in gaps[1:-1] if gap > 1]
    assert later == sorted(later)
    assert later[0] < 4
    assert later[-1] == later[4] > 8  # the share of the time that it may take


def test_new_requests_take_turns_and_one_that_gains_goes_on() -> None:
    """Short answers: what each asks at its beginning would be a large share of them."""
    controller, made = small_model(), 0
    for _ in range(9):
        look_up(controller, SpeculationState(), LONG)
    for _ in range(20):
        made += look_up(controller, SpeculationState(), LONG // 20)
    assert 0.6 < share_of(made, LOOKUP) / SHARE < 1.2
    fresh = SpeculationState()
    look_up(controller, fresh, round(LOOKUP / PASS / SHARE) + 2, found=3)
    assert look_up(controller, fresh, 8, found=3) == 8


@pytest.mark.parametrize("took", [PASS / 50, PASS / 5, PASS / 2])
def test_a_request_may_ask_once_that_takes_little_of_its_time_whatever_others_brought(
    took: float,
) -> None:
    """Its text may repeat itself. Answers that end before then lose nothing."""
    controller, wait = small_model(), round(took / PASS / SHARE)
    look_up(controller, SpeculationState(), 30 * LONG, took=took)
    short = sum(look_up(controller, SpeculationState(), 16, took=took) for _ in range(200))
    assert share_of(short, took, 200 * 16) < 1.4 * SHARE
    made = [look_up(controller, SpeculationState(), wait + 2, took=took) for _ in range(20)]
    assert min(made) >= 1
    assert share_of(sum(made), took, 20 * (wait + 2)) < 2.4 * SHARE


@pytest.mark.parametrize("adaptive", [False, True])
def test_another_drafter_is_asked_only_where_it_mostly_promises_more(adaptive: bool) -> None:
    controller, state = small_model(), SpeculationState(adaptive)
    assert controller.asks(state, "head", proposal(0.9, 1).draft, PASS)  # who knows
    for _ in range(200):
        controller.asked("head", Draft((5, 6), accept_probs=(0.6, 0.5)))  # 0.9 tokens
    for most, rate, asked in ((1, 0.85, True), (1, 0.95, False), (3, 0.5, True), (3, 0.6, False)):
        draft = proposal(rate, most).draft  # of the last two 0.875 and 1.176 tokens
        assert controller.asks(state, "head", draft, PASS) == asked
    assert controller.asks(state, "head", NO_DRAFT, PASS)


def test_a_drafter_that_promises_more_is_asked_from_its_first_drafts_on() -> None:
    controller, state, other = small_model(), SpeculationState(), proposal(0.6, 4).draft
    for _ in range(20):  # 3.1 tokens instead of 1.3, in the time of half a token
        assert controller.asks(state, "head", other, PASS)
        item = proposal(0.9, 4, speculation=state, attempts=[Attempt("head", NO_DRAFT, PASS / 2)])
        controller.asked("head", item.draft)
        controller.stepped([outcome(item, 4)], 1, 0.0)


def test_a_drafter_that_promised_less_is_asked_again_now_and_then() -> None:
    """Where another one always proposes something, nothing else would correct the mean."""
    controller, state, asked = small_model(), SpeculationState(), []
    for step in range(3 * LONG):
        item = proposal(0.9, 1, speculation=state)
        if controller.asks(state, "head", item.draft, PASS):
            asked.append(step)
            item.attempts = [Attempt("head", item.draft, PASS / 4)]
            controller.asked("head", NO_DRAFT)
        controller.stepped([outcome(item, 1)], 1, 0.0)
    assert asked[-1] > 2 * LONG
    assert share_of(len(asked[8:]), PASS / 4, 3 * LONG) < 0.005


def test_a_drafter_is_asked_only_for_more_than_it_takes() -> None:
    controller, state = small_model(), SpeculationState()
    for _ in range(300):  # 0.5 tokens in the time of 0.2
        item = proposal(0.5, 1, speculation=state, attempts=[Attempt("head", NO_DRAFT, PASS / 5)])
        controller.asked("head", item.draft)
        controller.stepped([outcome(item, 1)], 1, 0.0)
    for rate, asked in ((0.2, True), (0.4, False)):
        assert controller.asks(state, "head", proposal(rate, 1).draft, PASS) == asked


def test_a_lucky_step_of_many_requests_says_little_about_new_ones() -> None:
    """Eight requests in a pass find nothing in 600 steps, then all of them something at once."""
    controller, states = small_model(), [SpeculationState() for _ in range(8)]
    for step in range(LONG + 1):
        look_up_together(controller, states, lucky=step == LONG)
    look_up(controller, SpeculationState(), 50)
    look_up(controller, SpeculationState(), 50)
    assert look_up(controller, SpeculationState(), 50) < 25


def test_a_drafter_that_pays_for_one_request_is_left_where_it_does_not_pay_for_eight() -> None:
    """A load that comes and goes: each level of it has its own credit."""
    controller = Controller(CostModel([1, 8, 16], [PASS, PASS, 3 * PASS]), 8)
    asked = {1: 0, 8: 0}
    for turn in range(60):
        for count, steps in ((1, 10), (8, 5)):
            states = [SpeculationState() for _ in range(count)]
            controller.load(count)
            for _ in range(steps):
                made = look_up_together(controller, states, found=1, right=turn % 3 > 0)
                asked[count] += made * (turn >= 30)
    assert asked[1] == 30 * 10
    assert asked[8] < 0.1 * 30 * 8 * 5


def test_a_load_that_changes_loses_no_more_than_one_that_stays() -> None:
    """The share of the time that may be lost is one for all levels, not one for each."""
    controller, lost, time = small_model(), 0.0, 0.0
    for turn in range(1200):
        count = (16, 8, 4, 2, 1)[turn % 5]
        states = [SpeculationState() for _ in range(count)]
        controller.load(count)
        for _ in range(4):
            made = look_up_together(controller, states)
            lost += LOOKUP * made * (turn > 200)
            time += controller._plain(count) * (turn > 200)
    assert lost < 0.006 * time


def test_a_large_model_is_always_asked() -> None:
    """A lookup takes less than the share of the time that may be lost."""
    controller, state = Controller(CostModel([1, 9], [0.02, 0.04]), 8), SpeculationState()
    assert look_up(controller, state, LONG) == LONG


def test_one_text_that_repeats_itself_is_looked_up_beside_one_that_does_not() -> None:
    controller, dull, lively = small_model(), SpeculationState(), SpeculationState()
    for _ in range(2):
        made = 0
        for _ in range(LONG):
            made += look_up(controller, dull, 1)
            look_up(controller, lively, 1, found=3)
    assert look_up(controller, lively, 8, found=3) == 8
    assert 0.6 < share_of(made, LOOKUP, 2 * LONG) / SHARE < 1.4  # steps with drafts take longer


def test_a_text_that_turns_is_asked_for_again_and_one_that_ends_to_repeat_itself_is_left() -> None:
    controller, state = small_model(), SpeculationState()
    look_up(controller, state, LONG, found=3)
    assert look_up(controller, state, 2 * LONG) < 0.3 * 2 * LONG
    asked = look_up(controller, state, LONG, found=3)
    assert asked > 0.9 * LONG


@pytest.mark.parametrize("before", [0, 1, 4, 50])
def test_a_lookup_that_waited_for_a_core_ends_no_asking(before: int) -> None:
    """It began the mean: every lookup was believed to take as long for some hundred steps."""
    controller, state = small_model(), SpeculationState()
    look_up(controller, state, before, found=3)
    look_up(controller, state, 1, took=0.02)
    assert look_up(controller, state, 100, found=3) == 100


LOOKED_UP = Draft((5, 6), drafter="suffix", accept_probs=(0.9, 0.9))
OTHER = (9, 5)


@pytest.mark.parametrize(("drafter", "verified", "came", "lookup", "head"), [
    ("head", (5, 6, 7), (5, 6, 7, 8), 2 * PASS - 2 * TOKEN, PASS - TOKEN),  # a token more
    ("head", (5, 6, 7), (5, 6, 8), 2 * PASS - 2 * TOKEN, -TOKEN),
    ("head", OTHER, (9, 4), -2 * TOKEN, PASS),  # the better one
    ("head", OTHER, (5,), PASS - 2 * TOKEN, -PASS),  # the worse one
    ("suffix", (5, 6), (5, 6, 7), 2 * PASS - 2 * TOKEN, 0.0),  # in vain
    ("", (), (5,), 0.0, 0.0),  # nothing was verified, so nothing would have been
])  # fmt: skip
def test_a_drafter_is_credited_with_what_it_adds_to_those_before_it(
    drafter: str, verified: tuple[int, ...], came: tuple[int, ...], lookup: float, head: float
) -> None:
    attempts = [Attempt("suffix", NO_DRAFT, LOOKUP), Attempt("head", LOOKED_UP, 3 * LOOKUP)]
    draft = Draft(verified, drafter=drafter, accept_probs=(0.9,) * len(verified))
    state = SpeculationState()
    item = Proposal(state, draft=draft, attempts=attempts, asking_seconds=1e-6, came=came)
    gains = {name: (asking, gain) for name, asking, gain in _gains(item, PASS, TOKEN)}
    asking = pytest.approx(LOOKUP + 1e-6), pytest.approx(3 * LOOKUP + 1e-6)
    assert gains == {
        "suffix": (asking[0], pytest.approx(lookup)),
        "head": (asking[1], pytest.approx(head)),
    }


@pytest.mark.parametrize(("prompt", "added"), [(0, 0.0), (1, 3.0), (64, 6.0)])
def test_draft_tokens_cost_what_they_add_to_a_pass_with_its_prompt(
    prompt: int, added: float
) -> None:
    """The second and third token of a pass come for nothing, the others do not."""
    costs = CostModel([1, 3, 4, 68, 70], [0.016, 0.016, 0.019, 0.211, 0.217])
    controller = Controller(costs, MOST)
    for accepted in [0, 1] * 200:
        controller.stepped([outcome(proposal(0.5, 2), accepted)], 1, 0.0, prompt)
    assert controller.estimated_speedup == pytest.approx(1.5 * 16 / (16 + added), rel=0.01)


def test_reading_texts_counts_and_stops_where_it_does_not_pay() -> None:
    controller, state = small_model(), SpeculationState()
    reads = 0
    for _ in range(4000):  # a text of ten steps, which takes two passes to read
        text = SpeculationState()
        if controller.reads("head", text):
            controller.read("head", 2 * PASS)
            assert controller.asks(text, "head")
            reads += 1
        for _ in range(10):
            controller.stepped([outcome(proposal(0.0, 0, speculation=state), 0)], 1, 0.0)
    assert 4 < reads < 4000 * 10 * 0.006 / 2


def test_short_answers_are_not_asked_for_all_the_time_where_reading_them_took_nothing() -> None:
    controller, made = small_model(), 0
    for _ in range(LONG):
        text = SpeculationState()
        assert controller.reads("suffix", text) == controller.asks(text, "suffix")
        made += look_up(controller, text, 16, took=PASS / 10)
    assert share_of(made, PASS / 10, 16 * LONG) < 0.01
