"""Every experiment runs on a tiny pair, and its tables say what its runs were."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from bench.models import BenchModel
from bench.prompts import CODE, CREATIVE, Prompt
from bench.speculation import compare, concurrency, drafted, simulated
from bench.speculation.batches import Batch, run_batch
from bench.speculation.ways import PLAIN, Runner, Sizes
from bench.tools.report import Outcome
from specops.config import Settings
from tests.bench.speculation.runs import ADAPTIVE, MODEL, SUFFIX, measured, run

PROMPTS = [
    Prompt(CODE, "def add(a, b):\n"),
    Prompt(CODE, "return a + b\n"),
    Prompt(CREATIVE, "Once"),
]
SIZES = Sizes(new_tokens=8)


def quiet(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def tiny(tiny_settings: Settings) -> BenchModel:
    return BenchModel("tiny", "Tiny model", tiny_settings)


def fits_json(outcome: Outcome) -> dict[str, Any]:
    """The result, sure to survive a file."""
    text = json.dumps(
        {**outcome.result, "charts": list(map(asdict, outcome.charts))}, allow_nan=False
    )
    result: dict[str, Any] = json.loads(text)
    return result


def test_drafted_says_from_which_acceptance_on_a_draft_model_pays(tiny: BenchModel) -> None:
    plan = drafted.Plan(2, Sizes(12), levels=(1.0, 0.0), lengths=(2,))
    outcome = drafted.run({"int8-128": tiny}, PROMPTS, plan, quiet)
    found = {level["acceptance"]: level["ways"] for level in fits_json(outcome)["levels"]}
    for acceptance, ways in found.items():
        plain, fixed, adaptive = ways
        assert plain["acceptance"] == 0
        assert all(way["equal"] == way["greedy"] == 2 for way in (fixed, adaptive))
        # The draft says what the script says, and nothing of its own.
        assert fixed["acceptance"] == pytest.approx(acceptance, abs=0.1)
    assert [row[0] for row in outcome.tables[0].rows] == ["int8-128"]


def test_compare_runs_each_drafter_fixed_and_adaptively(tiny: BenchModel) -> None:
    found = fits_json(compare.run(tiny, PROMPTS, compare.Plan(2, SIZES), quiet))
    ways = [(row["drafter"], row["adaptive"]) for row in found["categories"][CODE]]
    assert ways[0] == ("none", False)
    names = ("draft", "suffix", "cascade")
    assert sorted(ways[1:]) == sorted((name, way) for name in names for way in (False, True))
    assert found["prompts"] == {CODE: 2, CREATIVE: 1}


def test_compare_judges_code_by_speed_and_jumps_and_other_text_by_speed() -> None:
    data = measured({CODE: [1.6, 1.4, 1.5], CREATIVE: [0.98, 0.9, 0.96]})
    outcome = compare.outcome(MODEL, data, SIZES, ADAPTIVE)
    lines = {line["what"]: line for line in outcome.result["wanted"]}
    assert lines["code: speed over plain"]["measured"] == pytest.approx(1.5)
    assert lines["code: tokens per jump"]["measured"] == pytest.approx(10 / 4)
    assert lines["creative: speed over plain"]["measured"] == pytest.approx(0.96)
    assert [row[-1] for row in outcome.tables[1].rows] == ["yes", "yes", "NO"]


def test_an_answer_that_is_not_plain_decodings_is_not_sound() -> None:
    data = measured({CODE: [1.5]})
    assert compare.outcome(MODEL, data, SIZES, ADAPTIVE).sound
    data.runs[ADAPTIVE] = [run("ab", 1.0)]
    assert not compare.outcome(MODEL, data, SIZES, ADAPTIVE).sound


def test_requests_run_at_once_and_all_to_their_end(tiny: BenchModel) -> None:
    plan = concurrency.Plan(2, SIZES, loads=(2,))
    found = fits_json(concurrency.run(tiny, PROMPTS[:2], plan, quiet))["loads"]
    assert {row["requests"] for row in found} == {2}
    assert all(row["tokens_per_second"]["median"] > 0 for row in found)
    assert found[0]["tokens_per_jump"] == pytest.approx(1.0)  # plain: a token a step and request


def batches(seconds: float) -> list[Batch]:
    return [Batch(2 * seconds, seconds, 100, 50)] * 2


def test_adaptive_is_held_against_plain_decoding_and_whichever_of_on_and_off_is_faster() -> None:
    ways = {PLAIN: batches(2.0), SUFFIX: batches(1.0), ADAPTIVE: batches(1.25)}
    plan = concurrency.Plan(2, SIZES, loads=(4,))
    found = concurrency.outcome(MODEL, {(CODE, 4): ways}, plan, "suffix").result["wanted"]
    of_plain, of_better = found
    assert (of_plain["measured"], of_plain["least"]) == (pytest.approx(1.6), 1.5)
    assert of_better["measured"] == pytest.approx(0.8)
    assert "k=4" in of_better["what"]
    ways[SUFFIX] = batches(4.0)
    (line,) = concurrency.outcome(MODEL, {(CODE, 4): ways}, plan, "suffix").result["wanted"]
    assert line["measured"] == pytest.approx(1.6)


def test_text_that_does_not_repeat_itself_may_lose_nothing_under_any_load() -> None:
    ways = {PLAIN: batches(1.0), SUFFIX: batches(2.0), ADAPTIVE: batches(1.02)}
    plan = concurrency.Plan(2, SIZES)
    found = {(CREATIVE, load): ways for load in plan.loads}
    wanted = concurrency.outcome(MODEL, found, plan, "suffix").result["wanted"]
    assert [line["least"] for line in wanted] == [0.97] * 3
    assert [line["measured"] for line in wanted] == pytest.approx([1 / 1.02] * 3)


def test_what_is_left_to_decode_after_the_last_prompt_is_what_is_timed(tiny: BenchModel) -> None:
    runner = Runner.load(replace(tiny, settings=replace(tiny.settings, slots=2)))
    found = run_batch(runner, PLAIN, PROMPTS[:2], 24)
    assert 0 < found.decode_seconds < found.seconds
    assert 23 <= found.tokens <= 46  # both came in one pass, or the second one later
    assert found.tokens == found.steps
    with pytest.raises(RuntimeError, match="more new tokens are needed"):
        run_batch(runner, PLAIN, PROMPTS[:1], 1)


LEVELS = simulated.Plan(2, 24, rounds={1: 1, 2: 2}, levels=(1.0, 0.0), lengths=(1, 3))


def test_every_length_is_measured_at_the_acceptance_asked_for(tiny: BenchModel) -> None:
    outcome = simulated.run(tiny, PROMPTS[:2], LEVELS, quiet)
    levels = fits_json(outcome)["levels"]
    assert [(lv["requests"], lv["acceptance"]) for lv in levels] == [
        (1, 1.0), (1, 0.0), (2, 1.0), (2, 0.0)
    ]  # fmt: skip
    for level in levels:
        ways = level["ways"]
        assert set(ways) == {"k=0", "k=1", "k=3", "adaptive"}
        for name, way in ways.items():
            tokens, steps = (sum(b[what] for b in way["batches"]) for what in ("tokens", "steps"))
            assert way["lost"] == 0
            if not level["acceptance"]:
                assert tokens == steps  # nothing was accepted
            elif name == "k=3":
                assert tokens > 2 * steps
    titles = [table.title.lower() for table in outcome.tables]
    assert all("simulated acceptance" in title for title in titles)


def test_adaptive_is_held_against_the_best_length() -> None:
    def figures(*seconds: float) -> simulated.Figures:
        return simulated.Figures([Batch(2 * value, value, 63, 42) for value in seconds])

    ways = {"k=0": figures(2, 2), "k=3": figures(1, 1), "adaptive": figures(1, 1.25)}
    outcome = simulated.outcome(MODEL, {(4, 0.7): ways}, LEVELS)
    plain, best = outcome.result["wanted"]
    assert best["measured"] == pytest.approx((1 + 0.8) / 2)
    assert plain["measured"] == pytest.approx((2 + 1.6) / 2)
    assert (plain["least"], best["least"]) == (1.15, 0.95)
    assert outcome.tables[0].rows[0][:3] == ("4", "0.7", "k=3")
