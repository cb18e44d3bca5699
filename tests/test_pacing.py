"""A long prompt makes nobody wait longer than allowed, and does not wait long itself."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from specops.costs import CostCurve
from specops.pacing import Expected, Margin, Pace
from specops.request import GenerationRequest
from specops.scheduler import Scheduler
from tests.simulated_target import DECODE, VERIFY, SimulatedTarget, make_scheduler

PROMPT = 1500
_ids = count()


def request(prompt: int, output: int, **fields: object) -> GenerationRequest:
    number = next(_ids)
    return GenerationRequest(
        request_id=str(number),
        prompt_tokens=(1 + number % 30,) * prompt,
        max_new_tokens=output,
        **fields,  # type: ignore[arg-type]
    )


def read_prompt(target: SimulatedTarget, scheduler: Scheduler) -> tuple[float, list[float]]:
    """Add a long prompt: the time until its first token, and everybody else's pauses meanwhile."""
    item = request(PROMPT, 1)
    scheduler.add(item)
    start, last = target.now, dict[str, float]()
    pauses = []
    while True:
        for output in scheduler.step().outputs:
            if output.request_id == item.request_id:
                return target.now - start, pauses
            if output.request_id in last:
                pauses.append(target.now - last[output.request_id])
            last[output.request_id] = target.now


def alone(**machine: float) -> float:
    target = SimulatedTarget(rows=8, capacity=2048, **machine)  # type: ignore[arg-type]
    return read_prompt(target, make_scheduler(target))[0]


def beside(
    running: int, longest_pause: float = 0.25, **machine: float
) -> tuple[float, list[float]]:
    """Beside others that have been decoding for a while."""
    target = SimulatedTarget(rows=8, capacity=2048, **machine)  # type: ignore[arg-type]
    scheduler = make_scheduler(target, longest_pause=longest_pause)
    for _ in range(running):
        scheduler.add(request(20, 1000))
    for _ in range(30):
        scheduler.step()
    return read_prompt(target, scheduler)


@pytest.mark.parametrize(
    ("running", "scatter", "longer"),
    [
        (1, 0.0, 1.3),
        (2, 0.0, 1.3),
        (4, 0.0, 1.45),
        (7, 0.0, 1.65),  # 45 rounds of 52 ms, and as many passes of 43 ms at least
        (1, 0.1, 1.35),
        (2, 0.1, 1.45),
        (4, 0.1, 1.6),
    ],
)
def test_the_longest_pause_is_kept_and_the_prompt_hardly_slower(
    running: int, scatter: float, longer: float
) -> None:
    seconds, pauses = beside(running, scatter=scatter)
    assert len(pauses) >= 30
    assert np.quantile(pauses, 0.99) <= 0.25
    assert seconds <= longer * alone()


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_a_machine_of_another_speed_is_learned(slowness: float) -> None:
    """The costs that it begins with are wrong by a factor of 2."""
    _, pauses = beside(2, slowness=slowness)
    assert np.quantile(pauses, 0.95) <= 0.25
    assert max(pauses[8:]) <= 0.25  # of two streams: after four chunks


def test_a_shorter_pause_costs_the_prompt_more() -> None:
    long, short = (beside(2, longest_pause=pause) for pause in (0.25, 0.12))
    assert max(short[1]) <= 0.12 < max(long[1])
    assert short[0] > long[0]


def test_rounds_longer_than_the_bound_still_leave_a_share_to_the_prompt() -> None:
    seconds, pauses = beside(7, longest_pause=0.05)
    assert min(pauses) > 0.05
    assert seconds < 5 * alone()


def test_a_prompt_that_nobody_waits_for_is_read_in_the_widest_chunks() -> None:
    pace = Pace(CostCurve(VERIFY, DECODE), longest_pause=0.1, most=128)
    assert pace.chunk(0, 0) == 128
    assert pace.chunk(0, 1) < 128


def test_who_does_not_stream_does_not_hold_prompts_up() -> None:
    """Beside answers that are wanted whole a prompt's chunks are as wide as alone."""

    def passes(stream: bool) -> int:
        target = SimulatedTarget(rows=4, capacity=2048)
        scheduler = make_scheduler(target)
        scheduler.add(request(20, 1000, stream=stream))
        scheduler.step()
        scheduler.add(request(512, 1))
        kinds = [step.kind for _ in range(40) for step in scheduler.step().stats]
        return kinds.count("prefill")

    assert passes(stream=False) == 4 < passes(stream=True)


def test_chunks_shrink_as_a_long_prompt_gets_dearer() -> None:
    pace = Pace(CostCurve(VERIFY, DECODE), longest_pause=0.25, most=128)
    first = pace.chunk(0, 1)
    for position in range(0, 4096, 32):
        seconds = 0.0144 + 32 * (0.0056 + 0.000002 * position)
        pace.read(position, 32, seconds, watched=True)
    assert pace.chunk(4000, 1) < first / 2
    assert pace.chunk(10, 1) >= first - 4


def test_a_draft_model_reads_as_much_as_fits_into_the_pause() -> None:
    pace = Pace(CostCurve(VERIFY, DECODE, 0.002, feed=0.001), longest_pause=0.25, most=512)
    before = pace.draft_chunk(1)
    assert pace.chunk(0, 1) < before < 250
    for _ in range(20):
        pace.draft_read(32, 0.1)
    assert pace.draft_chunk(1) < before
    unbound = Pace(CostCurve(VERIFY, DECODE), longest_pause=float("inf"), most=512)
    assert unbound.draft_chunk(1) == unbound.chunk(0, 1) == 512


def test_what_is_left_of_prompts_tells_little_of_long_ones() -> None:
    """As where all but the end is in the cache: a pass has its least time, however narrow."""
    pace = Pace(CostCurve(VERIFY, DECODE), longest_pause=0.25, most=128)
    before = pace.chunk(0, 1)
    for _ in range(20):
        pace.read(190, 1, 0.040, watched=True)
    assert pace.chunk(0, 1) > before / 2
    position = 0
    for _ in range(5):
        tokens = pace.chunk(position, 1)
        pace.read(position, tokens, 0.034 + tokens * 0.0060, watched=True)
        position += tokens
    assert pace.chunk(position, 1) >= 0.7 * (0.25 - DECODE[0] - 0.034) / 0.0060


def test_however_bad_a_moment_chunks_become_what_they_were() -> None:
    """Also where the margin has made them so short that none of their pauses is long."""
    pace = Pace(CostCurve(VERIFY, DECODE), longest_pause=0.25, most=128)

    def read(chunks: int, slowness: float) -> int:
        for _ in range(chunks):
            tokens = pace.chunk(0, 1)
            pace.read(0, tokens, slowness * (0.0144 + tokens * 0.0056), watched=True)
            pace.decoded(1, slowness * DECODE[0])
        return pace.chunk(0, 1)

    before = read(30, 1.0)
    for _ in range(4):  # now slow, now fast: nothing is as expected
        read(2, 4.0)
        read(2, 0.5)
    assert pace.chunk(0, 1) < before / 2
    assert read(60, 1.0) >= before - 4


def test_prompts_shorter_than_a_chunk_teach_it_where_they_take_long() -> None:
    pace = Pace(CostCurve(VERIFY, DECODE), longest_pause=0.25, most=128)
    few = pace.chunk(0, 1) // 3
    for _ in range(20):
        pace.read(0, few, 0.24, watched=True)
    assert pace.chunk(0, 1) <= few


def test_an_expectation_follows_and_is_not_thrown_by_one_hiccup() -> None:
    expected = Expected(1.0)
    for _ in range(100):
        expected.saw(3.0)
    assert expected.seconds == pytest.approx(3.0, rel=1e-4)
    expected.saw(300.0)
    assert expected.seconds < 3.5


@pytest.mark.parametrize("scatter", [0.02, 0.2])
def test_hardly_any_pause_is_later_than_the_margin_allows(scatter: float) -> None:
    rng = np.random.default_rng(1)
    margin, late = Margin(), []
    for _ in range(20_000):
        took = 1 + scatter * rng.standard_normal()
        late.append(took > 1 + margin.share)
        margin.saw(1.0, took)
    assert 0 < np.mean(late) < 0.02


def test_a_machine_that_keeps_its_times_gets_nearly_all_of_the_pause() -> None:
    margin = Margin()
    for _ in range(30):
        margin.saw(1.0, 1.0)
    assert margin.share < 0.01


def test_a_bad_moment_is_forgotten_within_the_next_prompt() -> None:
    margin = Margin()
    for _ in range(10):
        margin.saw(1.0, 1.7)
    assert margin.share > 0.5
    for _ in range(30):
        margin.saw(1.0, 1.0)
    assert margin.share < 0.1


def test_short_pauses_that_come_late_do_not_narrow_the_long_ones() -> None:
    """As where a draft model reads the last tokens of a prompt: a pass has its least time."""
    pace = Pace(CostCurve(VERIFY, DECODE, 0.002, feed=0.001), longest_pause=0.25, most=512)
    before = pace.chunk(0, 1)
    for _ in range(20):
        pace.draft_read(2, 0.02)
        pace.decoded(1, DECODE[0])
    assert pace.chunk(0, 1) == before


def test_short_prompts_get_their_turn_in_the_order_of_their_coming() -> None:
    target = SimulatedTarget(rows=4, capacity=2048)
    scheduler = make_scheduler(target)
    items = [request(prompt, 3) for prompt in (600, 40, 40)]
    for item in items:
        scheduler.add(item)
    begun: list[str] = []
    while scheduler.busy:
        begun += [output.request_id for output in scheduler.step().outputs if output.pieces]
    assert list(dict.fromkeys(begun)) == [item.request_id for item in items]


@pytest.mark.parametrize("running", [3])
def test_rows_that_decode_share_one_pass_while_a_prompt_is_read(running: int) -> None:
    """Also where one of them ends and leaves a gap, and where the prompt then joins."""
    target = SimulatedTarget(rows=4, capacity=2048)
    scheduler = make_scheduler(target)
    for output in (40, 8, 60):
        scheduler.add(request(20, output))
    for _ in range(6):
        scheduler.step()
    scheduler.add(request(300, 30))
    widths = []
    while scheduler.busy:
        result = scheduler.step()
        decodes = [step.rows for step in result.stats if step.kind == "decode"]
        assert len(decodes) <= 1
        widths += decodes
    assert set(widths) == {1, 2, 3}
