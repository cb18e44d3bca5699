"""Predicted costs are monotone as measured, invertible, and follow the machine's speed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.runtime.cost_model import CostModel
from tests.simulated_target import PAIR_SECONDS, TINYLLAMA, tinyllama

SIZES = [1, 2, 4, 8, 9, 16, 64]
factors = st.floats(0.1, 10.0)
noisy = st.lists(st.floats(1e-4, 10.0), min_size=len(SIZES), max_size=len(SIZES))


def test_costs_are_the_measured_ones_and_linear_between_and_beyond_them() -> None:
    costs = tinyllama()
    for tokens, milliseconds in TINYLLAMA.items():
        assert costs.cost(tokens) == pytest.approx(milliseconds / 1000)
    assert costs.cost(5) == pytest.approx((0.0163 + 0.0197) / 2)
    assert costs.cost(0) == 0.0
    assert costs.cost(4, 1000.0) - costs.cost(4) == pytest.approx(1000 * PAIR_SECONDS)
    assert costs.cost(192) == pytest.approx(2 * costs.cost(96))
    for tokens in (1, 90, 96, 150):
        expected = [costs.cost(wider) for wider in range(tokens, tokens + 31)]
        assert costs.costs(tokens, 30) == pytest.approx(expected)


def behaving(costs: CostModel, memory: float, arithmetic: float) -> CostModel:
    """The costs of a machine whose speed has changed since they were measured."""
    costs.set_speed(memory, arithmetic)
    return costs


@given(noisy, factors, factors, st.floats(0, 1e-3))
def test_a_wider_pass_never_costs_less_even_with_noisy_figures(
    seconds: list[float], memory: float, arithmetic: float, pair: float
) -> None:
    costs = behaving(CostModel(SIZES, seconds, pair), memory, arithmetic)
    found = [costs.cost(tokens) for tokens in range(80)]
    assert found == sorted(found)
    assert found[1] > 0
    assert costs.costs(1, 78) == pytest.approx(found[1:])
    far = [costs.cost(8, 1000.0 * work) for work in range(20)]
    assert far == sorted(far)


@given(noisy)
def test_a_pass_costs_no_more_than_the_fastest_wider_one(seconds: list[float]) -> None:
    costs = CostModel(SIZES, seconds)
    for place, size in enumerate(SIZES):
        assert costs.cost(size) == pytest.approx(min(seconds[place:]))


@given(
    seconds=noisy,
    pair=st.floats(0, 1e-3),
    memory=factors,
    arithmetic=factors,
    allowed=st.floats(1e-3, 30.0),
    tokens=st.integers(0, 40),
    position=st.integers(0, 2000),
)
def test_tokens_within_a_time_are_as_many_as_fit(
    *,
    seconds: list[float],
    pair: float,
    memory: float,
    arithmetic: float,
    allowed: float,
    tokens: int,
    position: int,
) -> None:
    costs = behaving(CostModel(SIZES, seconds, pair), memory, arithmetic)
    work = tokens * 10.0

    def lasts(more: int) -> float:
        return costs.cost(tokens + more, work + more * (position + more / 2))

    found = costs.tokens_within(allowed, tokens, work, position)
    assert 0 <= found <= len(range(SIZES[-1] + 1))
    assert lasts(found) <= allowed * (1 + 1e-9) or found == 0
    assert found > SIZES[-1] or lasts(found + 1) > allowed * (1 - 1e-9)


@pytest.mark.parametrize("pair", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("position", [0, 3000])
def test_a_prompt_is_read_at_the_measured_speed_whatever_was_observed(
    pair: float, position: int
) -> None:
    costs = CostModel([1, 96], [0.01, 0.096], pair)
    found = costs.reading.tokens(2.0, position)
    assert costs.cost(96, found * (position + found / 2)) + (found - 96) / 1000 == pytest.approx(2)
    costs.set_speed(3.0, 3.0)
    assert costs.reading.tokens(2.0, position) == found


@pytest.mark.parametrize(
    ("speed", "passes", "sizes", "checked", "within"),
    [
        *(
            ((memory, arithmetic), 2000, (1, 4, 30, 90), (8, 30), 0.02)
            for memory in (0.4, 1.0, 3.0)
            for arithmetic in (0.4, 1.0, 3.0)
        ),
        # Passes of one size suffice for their cost, but do not tell which of the factors changed.
        *(
            ((1.0, slowness), 60, (size,), (size,), 0.03)
            for slowness in (0.6, 1.5, 2.0)
            for size in (1, 5, 9, 24)
        ),
        # Passes over one token show that not the whole machine is slower.
        ((1.0, 2.0), 60, (1, 5, 24), (1, 5, 9, 24), 0.1),
    ],
)
def test_costs_follow_the_machine(
    speed: tuple[float, float],
    passes: int,
    sizes: tuple[int, ...],
    checked: tuple[int, ...],
    within: float,
) -> None:
    machine, costs = behaving(tinyllama(), *speed), tinyllama()
    for step in range(passes):
        tokens, work = sizes[step % len(sizes)], 20.0 * (step % 50)
        costs.observe(tokens, work, machine.cost(tokens, work))
    for tokens in checked:
        assert costs.cost(tokens, 500) == pytest.approx(machine.cost(tokens, 500), rel=within)
    if len(sizes) > 1:
        assert (costs.memory, costs.arithmetic) == pytest.approx(speed, rel=1.5 * within)
        expected = 1000 * costs.arithmetic * PAIR_SECONDS
        assert costs.attention_seconds(1000) == pytest.approx(expected)


SLOW = {1: 13.6, 2: 13.9, 4: 14.0, 8: 14.7, 10: 16.9, 12: 18.6, 16: 23.5, 32: 44.5, 64: 86.5}
FAST = {4: 9.5, 6: 11.3, 8: 14.5, 10: 17.0, 12: 19.9, 16: 25.1}


def test_a_curve_that_was_measured_while_memory_was_slow_serves_when_it_is_fast() -> None:
    """TinyLlama's shape, in two hours: most of its arithmetic hid behind memory in the first.

    The passes that are seen are those of plain decoding and of drafts of one width.
    """
    costs = CostModel(list(SLOW), [item / 1000 for item in SLOW.values()])
    for _ in range(100):
        for tokens in (4, 8):
            costs.observe(tokens, 0.0, FAST[tokens] / 1000)
    for tokens, milliseconds in FAST.items():
        assert costs.cost(tokens) == pytest.approx(milliseconds / 1000, rel=0.1)


def test_a_point_that_was_measured_at_a_better_moment_is_corrected() -> None:
    """Eight requests once drafted two tokens in every pass, as ten tokens seemed to be cheap."""
    machine, rng = tinyllama(), np.random.default_rng(0)
    milliseconds = {**TINYLLAMA, 8: machine.cost(8) * 1000, 10: 0.9 * machine.cost(10) * 1000}
    sizes = sorted(milliseconds)
    costs = CostModel(sizes, [milliseconds[size] / 1000 for size in sizes], PAIR_SECONDS)
    others = {size: costs.cost(size) for size in (1, 4, 16, 32)}
    for step in range(600):
        tokens = (8, 10, 8, 8)[step % 4]
        speed = 1.3 if step >= 300 else 1.0
        costs.observe(tokens, 0.0, speed * machine.cost(tokens) * rng.normal(1.0, 0.03))
    assert costs.cost(10) / costs.cost(8) == pytest.approx(
        machine.cost(10) / machine.cost(8), rel=0.015
    )
    costs.set_speed(1.0, 1.0)
    assert {size: costs.cost(size) for size in others} == others


def test_a_few_plain_passes_between_wide_ones_keep_their_cost_right() -> None:
    """TinyLlama's shape in int8, four requests with a draft token each: drafts seemed to pay.

    The curve is from an hour of slow memory. With fast memory four tokens wait for arithmetic, too,
    and eight take more by comparison. Once all passes have eight, their times alone say nothing of
    four: plain decoding seemed to take a tenth longer than it did.
    """
    slow = {1: 18.0, 4: 20.0, 8: 27.0, 10: 31.3, 16: 48.9, 32: 93.0, 64: 181.0}
    costs = CostModel(list(slow), [item / 1000 for item in slow.values()])
    machine, rng = {1: 13.0, 4: 17.3, 8: 28.0}, np.random.default_rng(0)
    for tokens in (1, 4):
        for _ in range(30):
            costs.observe(tokens, 0.0, machine[tokens] / 1000)
    for step in range(480):
        tokens = 8 if (step + 1) % 33 else 4
        costs.observe(tokens, 0.0, machine[tokens] / 1000 * rng.normal(1.0, 0.03))
    assert costs.cost(8) / costs.cost(4) == pytest.approx(machine[8] / machine[4], rel=0.03)
    assert costs.cost(4) * 1000 == pytest.approx(machine[4], rel=0.04)


def test_passes_that_wait_for_memory_do_not_correct_those_that_wait_for_arithmetic() -> None:
    costs = tinyllama()
    slow = costs.cost(16) / costs.cost(1)  # memory is so slow that all sizes up to 16 wait for it
    for tokens in 300 * (2, 3):
        costs.set_speed(slow, 1.0)
        costs.observe(tokens, 0.0, costs.cost(tokens) * (1.05 if tokens == 3 else 1.0))
    costs.set_speed(slow, 1.0)
    corrected = costs.cost(3) / costs.cost(2)
    costs.set_speed(0.01, 1.0)  # and now none does
    assert corrected > 1.04
    plain = tinyllama()
    plain.set_speed(0.01, 1.0)
    assert costs.cost(3) == plain.cost(3)


def test_prompts_whose_tokens_need_no_logits_correct_no_point() -> None:
    costs = tinyllama()
    for _ in range(100):
        costs.observe(12, 0.0, 0.8 * costs.cost(12), 1, 1)
        costs.observe(16, 0.0, costs.cost(16), 16)
    costs.set_speed(1.0, 1.0)
    assert [costs.cost(size) for size in (12, 16)] == [tinyllama().cost(size) for size in (12, 16)]


def test_a_machine_that_gets_slower_while_passes_have_one_size_corrects_no_point() -> None:
    costs = tinyllama()
    for speed in (1.0, 1.5, 0.7):
        for _ in range(40):
            costs.observe(8, 0.0, speed * tinyllama().cost(8))
    costs.set_speed(1.0, 1.0)
    assert costs.cost(8) == tinyllama().cost(8)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1e3)), max_size=200))
def test_corrections_stay_within_bounds(passes: list[tuple[int, float]]) -> None:
    costs = tinyllama()
    for tokens, seconds in passes:
        costs.observe(tokens, 0.0, seconds)
    costs.set_speed(1.0, 1.0)
    known = tinyllama()
    for tokens in range(1, 100):
        assert 1 / 1.51 < costs.cost(tokens) / known.cost(tokens) < 1.51


def test_passes_of_one_token_leave_the_other_factor_as_it_is() -> None:
    costs = tinyllama()
    for _ in range(50):
        costs.observe(1, 0.0, 2 * tinyllama().cost(1))
    assert costs.memory == pytest.approx(2.0, rel=0.02)
    assert costs.arithmetic == 1.0


def test_a_pass_that_waits_for_memory_moves_that_factor_whatever_attention_adds() -> None:
    """By rounding, its seconds without attention once seemed more than those of memory."""
    moved = []
    for work in range(2000):
        costs = tinyllama()
        costs.observe(2, work, 1.1 * costs.cost(2, work))
        moved.append((costs.memory, costs.arithmetic))
    assert min(memory for memory, _ in moved) > 1.0099
    assert max(arithmetic for _, arithmetic in moved) < 1.002


@pytest.mark.parametrize("tokens", [1, 8, 96])
def test_one_outlier_moves_the_costs_by_no_more_than_a_tenth(tokens: int) -> None:
    for seconds in (1000.0, 1e-9):
        costs = tinyllama()
        costs.observe(tokens, 0.0, seconds)
        assert costs.cost(tokens) == pytest.approx(tinyllama().cost(tokens), rel=0.101)
        # A share s of a pass moves its factor by a tenth of s / (s² + (1 - s)²), 1.21 at most.
        assert costs.memory == pytest.approx(1.0, abs=0.121)
        assert costs.arithmetic == pytest.approx(1.0, abs=0.121)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1e6), st.floats(0, 1e3)), max_size=60))
def test_factors_stay_above_0_for_any_observations(
    passes: list[tuple[int, float, float]],
) -> None:
    costs = tinyllama()
    for tokens, work, seconds in passes:
        costs.observe(tokens, work, seconds)
    assert costs.memory > 0
    assert costs.arithmetic > 0


def test_each_span_beyond_the_first_reads_a_state_of_its_own() -> None:
    costs = behaving(CostModel([1, 8], [2.0, 2.5], 1e-6, 0.25), 2.0, 3.0)
    plain = behaving(CostModel([1, 8], [2.0, 2.5], 1e-6), 2.0, 3.0)
    for tokens, spans in ((1, 1), (8, 1), (8, 4), (20, 8)):
        expected = plain.cost(tokens, 1000) + 2.0 * 0.25 * (spans - 1)
        assert costs.cost(tokens, 1000, spans) == pytest.approx(expected)
    assert costs.state_seconds(0) == 0


def test_tokens_without_logits_take_less_where_a_pass_waits_for_arithmetic() -> None:
    """Their part of the weights is read anyway, for the tokens with logits."""
    costs, plain = tinyllama(logit_seconds=0.0005), tinyllama()
    for tokens, others in ((64, 63), (96, 40), (200, 190)):
        expected = plain.cost(tokens, 1000) - 0.0005 * others
        assert costs.cost(tokens, 1000, 1, tokens - others) == pytest.approx(expected)
    assert costs.cost(2, logits=1) == plain.cost(2)
    assert costs.cost(96) == plain.cost(96)
    assert costs.reading.token_seconds == pytest.approx(0.209 / 96 - 0.0005)


@given(noisy, st.floats(0, 1), st.integers(0, 64), st.floats(0, 1), st.floats(0, 100))
def test_as_many_prompt_tokens_fit_as_need_no_logits(
    seconds: list[float], least: float, tokens: int, share: float, allowed: float
) -> None:
    rising = np.cumsum(seconds).tolist()
    slope = min(np.diff(rising) / np.diff(SIZES))
    costs = CostModel(SIZES, rising, 0.0, 0.0, least * slope)
    before = int(share * tokens)
    found = costs.tokens_within(allowed, tokens, logits=tokens - before)
    fitting = (
        more
        for more in range(SIZES[-1] + 2)
        if costs.cost(tokens + more, logits=tokens - before) <= allowed
    )
    assert found == max(fitting, default=0)


def test_prompts_say_nothing_else_of_the_speed_than_verification() -> None:
    costs = tinyllama(logit_seconds=0.0005)
    machine = behaving(tinyllama(logit_seconds=0.0005), 1.3, 1.3)
    for _ in range(200):
        for tokens, logits in ((4, 4), (60, 5), (90, 1), (8, 8)):
            costs.observe(tokens, 0.0, machine.cost(tokens, logits=logits), 1, logits)
    assert costs.memory == pytest.approx(1.3, rel=0.01)
    assert costs.arithmetic == pytest.approx(1.3, rel=0.01)


def test_states_follow_the_memory_s_speed() -> None:
    machine = behaving(CostModel([1, 64], [1.0, 9.0], 0.0, 0.5), 1.5, 1.0)
    costs = CostModel([1, 64], [1.0, 9.0], 0.0, 0.5)
    for _ in range(300):
        for tokens, spans in ((1, 1), (8, 8), (64, 1)):
            costs.observe(tokens, 0.0, machine.cost(tokens, 0.0, spans), spans)
    assert costs.cost(8, 0.0, 8) == pytest.approx(machine.cost(8, 0.0, 8), rel=0.02)
    assert costs.memory == pytest.approx(1.5, rel=0.05)


def test_the_table_shows_current_times() -> None:
    costs = behaving(CostModel([1, 4], [2.0, 3.0], 1e-6), 2.0, 3.0)
    assert list(costs.table()) == [
        ("tokens", 1, 4.0),
        ("tokens", 4, 7.0),
        ("attention", 1, pytest.approx(3.0)),
    ]
    assert list(costs.table("draft_tokens")) == [
        ("draft_tokens", 1, 4.0),
        ("draft_tokens", 4, 7.0),
    ]


@pytest.mark.parametrize(
    ("sizes", "seconds", "pair"),
    [
        ([], [], 0.0),
        ([2, 3], [1.0, 1.0], 0.0),
        ([1, 3, 2], [1.0, 1.0, 1.0], 0.0),
        ([1, 1], [1.0, 1.0], 0.0),
        ([1, 2], [1.0, 0.0], 0.0),
        ([1, 2], [1.0, 1.0], -1e-9),
    ],
)
def test_impossible_figures_are_refused(
    sizes: list[int], seconds: list[float], pair: float
) -> None:
    with pytest.raises(ValueError, match=r"ascend|above 0"):
        CostModel(sizes, seconds, pair)
