"""The controller against a simulated machine: its costs are given, nothing depends on a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specops.request import SamplingParams
from specops.runtime.cost_model import CostModel
from specops.speculation.acceptance import Acceptance, SpeculationState
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import Asked, Draft, DraftRequest
from tests.simulated_target import tinyllama

MOST = 8
SAMPLED = SamplingParams(1.0)
Accepts = Callable[[int], float]  # step → probability that a draft token is right


def always(rate: float) -> Accepts:
    return lambda step: rate


class Machine:
    """Decodes requests whose draft tokens are right by chance; keeps time in seconds.

    Args:
        draft: costs of a draft model; without one draft tokens are looked up.
        drawing: seconds to draw a token.
    """

    def __init__(self, draft: CostModel | None = None, *, drawing: float = 0.0) -> None:
        self.costs = tinyllama()
        self.controller = Controller(self.costs, draft, MOST)
        self.draft = draft
        self.drawing = drawing
        self.rng = np.random.default_rng(0)
        self.time = 0.0
        self.tokens = self.drafted = 0
        self.lengths: list[list[int]] = []

    def run(self, rates: Sequence[Accepts], steps: int, *, fixed: int | None = None) -> float:
        """Tokens per second of steps with one request per rate."""
        before = self.tokens, self.time
        states = [SpeculationState() for _ in rates]
        for step in range(steps):
            requests = [
                request(
                    MOST if fixed is None else fixed,
                    drafter="draft",
                    speculation=state,
                    sampling=SAMPLED if self.drawing else SamplingParams(),
                    adaptive=fixed is None,
                    num_uncomputed=int(self.draft is not None),
                )
                for state in states
            ]
            lengths = self.controller.choose(requests)
            self.lengths.append(lengths)
            drafting = self.passes(lengths)
            for item, rate, length in zip(requests, rates, lengths, strict=True):
                accepted = 0
                while accepted < length and self.rng.random() < rate(step):
                    accepted += 1
                passed(item, 1 + length, 1 + accepted)
                if self.drawing:
                    self.controller.drawn(item.emitted, self.drawing * item.emitted)
                if length:
                    item.draft.tokens = (0,) * length
                    self.controller.verified(item, accepted)
            got = sum(item.emitted for item in requests)
            width = len(requests) + sum(lengths)
            self.time += self.costs.cost(width) + drafting + self.drawing * got
            self.controller.stepped(requests, drafting)
            self.tokens += got
            self.drafted += sum(lengths)
        return (self.tokens - before[0]) / (self.time - before[1])

    def passes(self, lengths: Sequence[int]) -> float:
        """Seconds of the draft model: a pass per position, for all that get so far."""
        if self.draft is None:
            return 0.0
        counts = [sum(length > position for length in lengths) for position in range(MOST)]
        return sum(map(self.draft.cost, counts))


def request(
    most: int = MOST, *, drafter: str = "suffix", rate: float = 0.0, **fields: object
) -> DraftRequest:
    """A request with a draft; a rate is what its drafter knows about its tokens."""
    draft = Draft(drafter=drafter, accept_probs=(rate,) * most if rate else ())
    return DraftRequest(0, (), most, draft=draft, **fields)  # type: ignore[arg-type]


def proposal(rate: float, most: int = MOST, **fields: object) -> DraftRequest:
    """A request of which is known how often its draft tokens are right."""
    return request(most, rate=rate or 1e-9, **fields)


def passed(item: DraftRequest, width: int, emitted: int) -> DraftRequest:
    """A request that had so many tokens in a pass and got so many."""
    item.tokens, item.emitted = (0,) * width, emitted
    item.draft = replace(item.draft, tokens=(0,) * (width - 1))
    item.came = [0] * (emitted - 1) + [1]
    return item


def choose(*proposals: DraftRequest, costs: CostModel | None = None, prompt: int = 0) -> list[int]:
    return Controller(costs or tinyllama(), None, MOST).choose(proposals, prompt)


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


@pytest.mark.parametrize("share", [None, 0.1])
@pytest.mark.parametrize("requests", [1, 8])
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


def test_the_likeliest_places_come_first_and_what_is_not_there_is_not_admitted() -> None:
    lengths = choose(*(proposal(rate) for rate in (0.95, 0.8, 0.6, 0.2)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert choose(proposal(1.0, most=2), proposal(1.0, most=0), proposal(1.0)) == [2, 0, MOST]


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
    controller = Controller(tinyllama(), None, MOST)
    greedy, sampled = proposal(0.8), proposal(0.8, sampling=SAMPLED)
    for _ in range(60):
        controller.drawn(3, 0.015)
    together = controller.choose([greedy, sampled])
    controller.drawn(1, 10.0)
    assert controller.choose([greedy, sampled]) == together


def test_adjusting_a_position_is_a_cost_of_its_request_greedy_or_not() -> None:
    """Penalties and grammars take their time for every draft token, accepted or not."""
    controller = Controller(tinyllama(), None, MOST)
    plain, adjusted = proposal(0.8), proposal(0.8)
    before = controller.choose([plain, adjusted])
    for _ in range(60):
        controller.adjusted(adjusted.speculation, 3, 0.015)
    assert adjusted.speculation.adjusting == pytest.approx(0.005)
    together = controller.choose([plain, adjusted])
    assert together[1] < before[1]
    controller.stepped([passed(plain, 1, 1), passed(adjusted, 5, 1)], 0.0)
    cost = tinyllama().cost
    (loss,) = (state.seconds - state.plain_seconds for state in [adjusted.speculation])
    assert loss == pytest.approx(4 * (cost(6) - cost(2)) / 4 + 4 * 0.005)


@pytest.mark.parametrize("fixed", [0, 7])
def test_lookups_of_requests_of_a_fixed_length_say_nothing_about_asking(fixed: int) -> None:
    """One adaptive request beside seven others was believed to take all their time."""
    controller = Controller(tinyllama(), None, MOST)
    asked = passed(request(asked={"suffix": Asked(500e-6)}), 1, 1)
    others = [passed(request(adaptive=False), 1, 1) for _ in range(fixed)]
    for _ in range(400):
        controller.stepped([asked, *others], (1 + fixed) * 500e-6)
    assert asked.speculation.gains["suffix"] == pytest.approx(-500e-6, rel=0.01)


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


def test_no_place_below_the_least_probability_is_admitted() -> None:
    """A drafter that ends its drafts there leaves out nothing that pays."""
    for requests in (1, 4, 8):
        for prompt in (0, 64):
            least = Controller(tinyllama(), None, MOST).min_reach(requests, prompt)
            assert not any(
                choose(*(proposal(0.99 * least) for _ in range(requests)), prompt=prompt)
            )


def test_lengths_that_are_not_adaptive_are_kept() -> None:
    fixed = [proposal(0.0, most=length, adaptive=False) for length in (5, 0, 8)]
    assert choose(*fixed, prompt=300) == [5, 0, 8]
    assert choose(*fixed, proposal(0.9))[:3] == [5, 0, 8]
    assert choose(request(0)) == [0]


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


def test_a_draft_model_far_behind_has_to_be_worth_catching_up_and_several_share_its_passes() -> (
    None
):
    def chosen(share: float, *backlogs: int) -> list[int]:
        proposals = [proposal(0.9, num_uncomputed=backlog) for backlog in backlogs]
        return Controller(tinyllama(), tinyllama(share), MOST).choose(proposals)

    assert chosen(0.1, 1)[0] > 0
    assert chosen(0.1, 2000) == [0]
    assert min(chosen(0.3, 1, 1)) > 0
    assert chosen(1.0, 1) == [0]


# -- what changes ----------------------------------------------------------------------------------


def test_a_text_that_turns_is_noticed_beside_others_of_which_nothing_is_accepted() -> None:
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


def test_a_new_request_begins_with_what_others_have_learned_of_its_drafter() -> None:
    machine = Machine()
    machine.run([always(0.0)], 300)
    machine.controller.choose([request(1, drafter="draft")])  # a probe
    unknown, other = (request(drafter=name) for name in ("draft", "suffix"))
    assert machine.controller.choose([unknown]) == [0]
    assert machine.controller.choose([other])[0] > 0


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize(("rate", "drawing"), [(0.9, 0.0), (0.0, 0.0), (0.9, 0.001)])
def test_the_estimated_speedup_is_that_of_the_machine(
    requests: int, rate: float, drawing: float
) -> None:
    machine = Machine(drawing=drawing)
    assert machine.controller.estimated_speedup == SpeculationState().speedup == 1.0
    speed = machine.run([always(rate)] * requests, 1500)
    plain = requests / (machine.costs.cost(requests) + requests * drawing)
    assert machine.controller.estimated_speedup == pytest.approx(speed / plain, rel=0.12)


# -- acceptance ------------------------------------------------------------------------------------


def fed(acceptance: Acceptance, rates: Sequence[float], drafts: int) -> list[float]:
    """The estimate after drafts that were accepted at these rates."""
    rng = np.random.default_rng(0)
    for _ in range(drafts):
        accepted = 0
        while accepted < len(rates) and rng.random() < rates[accepted]:
            accepted += 1
        acceptance.observe(len(rates), accepted)
    return acceptance.rates()


def test_the_rates_of_each_position_are_found_and_followed() -> None:
    acceptance = Acceptance(4)
    found = fed(acceptance, [0.9, 0.5], 400)
    assert found[:2] == pytest.approx([0.9, 0.5], abs=0.12)
    assert found[3] == pytest.approx(found[1])  # never tried: as the position before it
    assert fed(acceptance, [0.0], 120)[0] < 0.2
    assert fed(acceptance, [1.0] * 6, 120)[3] > 0.9  # longer drafts are no error


def test_a_request_follows_the_common_rates_until_it_has_seen_others() -> None:
    common = Acceptance(2)
    fed(common, [1.0, 1.0], 200)
    own = Acceptance(2, common)
    assert own.rates() == pytest.approx(common.rates())
    assert fed(own, [0.0], 10)[0] < 0.5 < common.rates()[0]


# -- asking drafters -------------------------------------------------------------------------------

PASS, TOKEN, LOOKUP = 400e-6, 50e-6, 20e-6  # seconds
LONG = 600  # steps


def look_up(
    controller: Controller, state: SpeculationState, steps: int, *, found: int = 0,
    took: float = LOOKUP, by_model: float = 0.0, right: bool = True,
) -> int:  # fmt: skip
    """Look up where that pays: so many tokens each time, all right or none; returns how often.

    Where the time of a draft model is given, it makes the tokens.
    """
    made = 0
    for _ in range(steps):
        item = request(found, speculation=state)
        now = controller.asks(item, "suffix")
        width = 1 + found * now
        passed(item, width, width if right else 1)
        if now:
            item.asked, item.draft_seconds = {"suffix": Asked(took)}, by_model
        controller.stepped([item], (took + by_model) * now)
        made += now
    return made


def asks(controller: Controller, state: SpeculationState) -> bool:
    return controller.asks(request(speculation=state), "suffix")


def small_model() -> Controller:
    return Controller(CostModel([1, 9], [PASS, PASS + 8 * TOKEN]), None, 8)


def share_of(made: int, seconds: float, steps: int = LONG) -> float:
    """The share of the time that so many lookups took."""
    return made * seconds / (steps * PASS + made * seconds)


def test_lookups_that_find_nothing_take_a_small_share_until_the_text_repeats_itself() -> None:
    controller, state = small_model(), SpeculationState()
    assert look_up(controller, state, 8) == 8
    look_up(controller, state, LONG)
    assert 0.004 < share_of(look_up(controller, state, LONG), LOOKUP) < 0.006
    fresh = SpeculationState()
    assert 0.004 < share_of(look_up(controller, fresh, LONG), LOOKUP) < 0.006
    look_up(controller, state, 32, found=3)
    assert look_up(controller, state, 8, found=3) == 8


def test_a_new_request_is_looked_up_whatever_other_texts_have_brought() -> None:
    controller, dull, fresh = small_model(), SpeculationState(), SpeculationState()
    look_up(controller, dull, LONG)
    while asks(controller, dull):
        look_up(controller, dull, 1)
    assert look_up(controller, fresh, 1) == 1
    while asks(controller, dull):
        look_up(controller, dull, 1)
    assert look_up(controller, fresh, 1) == 0  # its own text has brought nothing


@pytest.mark.parametrize("adaptive", [False, True])
def test_another_drafter_is_asked_only_where_it_mostly_promises_more(adaptive: bool) -> None:
    controller = small_model()
    assert controller.promises_more(request(1, rate=0.9, adaptive=adaptive), "head")  # who knows
    for _ in range(200):
        controller.found("head", Draft((5, 6), accept_probs=(0.6, 0.5)))  # 0.9 tokens
    for most, rate, asked in ((1, 0.85, True), (1, 0.95, False), (3, 0.5, True), (3, 0.6, False)):
        item = request(most, rate=rate, adaptive=adaptive)
        assert controller.promises_more(item, "head") == asked  # 0.5 + 0.25 + 0.125, then 1.176
    assert controller.promises_more(request(adaptive=adaptive), "head")


def prefers(
    lookup: DraftRequest, *, right: float, share: float, uncomputed: int = 1, requests: int = 1
) -> bool:
    """Whether a draft model that was right so often is asked in place of a lookup."""
    controller = Controller(tinyllama(), tinyllama(share), MOST)
    rng = np.random.default_rng(0)
    for _ in range(200):
        made = request(drafter="draft", speculation=lookup.speculation)
        made.draft.tokens = (0,) * MOST
        controller.verified(made, min(MOST, rng.geometric(1 - right) - 1))
    return controller.prefers(lookup, "draft", MOST, uncomputed, requests)


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize(("rate", "right", "share", "preferred"), [
    (0.3, 0.8, 0.05, True), (0.85, 0.7, 0.05, False), (0.9, 0.7, 0.05, False),
    (0.6, 0.8, 0.7, False),  # it takes longer than it saves
    (0.1, 0.3, 0.7, True),  # neither pays: the model may be probed
])  # fmt: skip
def test_a_draft_model_is_preferred_where_it_brings_more_tokens_per_second(
    rate: float, right: float, share: float, preferred: bool, requests: int
) -> None:
    lookup = passed(proposal(rate), 1 + MOST, 1)
    assert prefers(lookup, right=right, share=share, requests=requests) == preferred


def test_what_a_draft_model_has_to_compute_first_counts_against_it() -> None:
    lookup = passed(proposal(0.3), 1 + MOST, 1)
    assert prefers(lookup, right=0.8, share=0.3)
    assert not prefers(lookup, right=0.8, share=0.3, uncomputed=32)


def test_each_request_tries_a_draft_model_once_and_asks_it_where_nothing_was_looked_up() -> None:
    controller, lookup = Controller(tinyllama(), tinyllama(), MOST), passed(proposal(0.9), 9, 1)
    assert controller.prefers(lookup, "draft", MOST, 1, 1)
    assert not prefers(lookup, right=0.5, share=1.0)
    assert prefers(request(), right=0.5, share=1.0)


def test_a_lucky_step_of_many_requests_says_little_about_new_ones() -> None:
    """Eight requests in a pass find nothing in 600 steps, then all of them something at once."""
    controller, states = small_model(), [SpeculationState() for _ in range(8)]
    for step in range(LONG + 1):
        lucky = step == LONG
        items = [request(3 * lucky, speculation=state) for state in states]
        for item in items:
            passed(item, 1 + 3 * lucky, 1 + 3 * lucky)
            item.asked = (
                {"suffix": Asked(LOOKUP)} if lucky or controller.asks(item, "suffix") else {}
            )
        controller.stepped(items, 8 * LOOKUP)
    look_up(controller, states[0], 50)  # spends what that step has earned
    assert look_up(controller, SpeculationState(), 50) < 10


def test_a_large_model_is_always_asked() -> None:
    """A lookup takes less than the share of the time that may be lost."""
    controller, state = Controller(CostModel([1, 9], [0.02, 0.04]), None, 8), SpeculationState()
    assert look_up(controller, state, LONG) == LONG


def test_one_text_that_repeats_itself_is_looked_up_beside_one_that_does_not() -> None:
    controller, dull, lively = small_model(), SpeculationState(), SpeculationState()
    for _ in range(2):
        made = 0
        for _ in range(LONG):
            made += look_up(controller, dull, 1)
            look_up(controller, lively, 1, found=3)
    assert look_up(controller, lively, 8, found=3) == 8
    assert 0.004 < share_of(made, LOOKUP, 2 * LONG) < 0.007  # steps with drafts take longer


def test_draft_tokens_that_were_wrong_do_not_end_the_asking() -> None:
    """They had seemed to pay, so only the lookups count."""
    controller, state = small_model(), SpeculationState()
    look_up(controller, state, LONG)
    look_up(controller, state, LONG, found=3, right=False)
    assert 0.004 < share_of(look_up(controller, state, LONG), LOOKUP) < 0.006


def test_a_lookup_that_waited_for_a_core_counts_as_twice_the_usual() -> None:
    controller, state = small_model(), SpeculationState()
    look_up(controller, state, LONG, found=1)
    look_up(controller, state, 1, found=1, took=1.0)
    assert look_up(controller, state, 8, found=1) == 8


@pytest.mark.parametrize("before", [0, 1, 4])
def test_one_of_the_first_lookups_that_waited_for_a_core_ends_no_asking(before: int) -> None:
    """It began the mean: every lookup was believed to take as long for some hundred steps."""
    controller, state = small_model(), SpeculationState()
    look_up(controller, state, before, found=3)
    look_up(controller, state, 1, took=0.02)
    assert look_up(controller, state, 100, found=3) == 100


LOOKED_UP, OTHER = Draft((5, 6), drafter="suffix", accept_probs=(0.9, 0.9)), (9, 5)


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
    controller, state = small_model(), SpeculationState()
    for _ in range(400):
        item = request(speculation=state)
        item.asked = {"suffix": Asked(LOOKUP), "head": Asked(3 * LOOKUP, LOOKED_UP)}
        item.draft = Draft(verified, drafter=drafter, accept_probs=(0.9,) * len(verified))
        item.tokens, item.came, item.emitted = (0, *verified), came, len(came)
        controller.stepped([item], 4 * LOOKUP)
    assert state.gains["suffix"] == pytest.approx(lookup - LOOKUP, rel=0.02)
    assert state.gains["head"] == pytest.approx(head - 3 * LOOKUP, rel=0.02)


def test_a_draft_model_that_takes_longer_than_it_saves_is_asked_rarely() -> None:
    """Three tokens that are right save 3 passes of 400 us, and take 150 us to verify."""
    controller, state = small_model(), SpeculationState()
    look_up(controller, state, LONG, found=3, by_model=900e-6)
    assert look_up(controller, state, 32, found=3, by_model=900e-6) == 32
    look_up(controller, state, LONG, found=3, by_model=1200e-6)
    made = look_up(controller, state, 4 * LONG, found=3, by_model=1200e-6)
    assert 0.004 < share_of(made, 170e-6, 4 * LONG) < 0.006  # what each lost
