"""Every experiment runs on a tiny pair, and its tables say what its runs were."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench import (
    assisted,
    compare,
    concurrency,
    experiments,
    gamma,
    levels,
    scenarios,
    speculation,
)
from bench.batches import Batch, run_batch
from bench.models import BenchModel
from bench.outcome import Outcome
from bench.prompts import CODE, CREATIVE, Prompt
from bench.speculation import PLAIN, Runner
from specops.config import ConfigError, Settings
from tests.bench.runs import ADAPTIVE, MODEL, NGRAM, measured, run

PROMPTS = [
    Prompt(CODE, "def add(a, b):\n"),
    Prompt(CODE, "return a + b\n"),
    Prompt(CREATIVE, "Once"),
]
SIZES = speculation.Plan(new_tokens=8)


def quiet(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def tiny(tiny_settings: Settings) -> BenchModel:
    return BenchModel("tiny", "Tiny model", tiny_settings, large=False)


def fits_json(outcome: Outcome) -> dict[str, Any]:
    """The result, sure to survive a file."""
    text = json.dumps(
        {**outcome.result, "charts": list(map(asdict, outcome.charts))}, allow_nan=False
    )
    result: dict[str, Any] = json.loads(text)
    return result


def test_compare_runs_each_drafter_fixed_and_adaptively(tiny: BenchModel) -> None:
    found = fits_json(compare.run(tiny, PROMPTS, SIZES, quiet))
    ways = [(row["drafter"], row["adaptive"]) for row in found["categories"][CODE]]
    assert ways[0] == ("none", False)
    names = ("draft", "ngram", "cascade")
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


def test_gamma_draws_speed_and_acceptance_over_the_length(tiny: BenchModel) -> None:
    plan = gamma.Plan(2, SIZES, lengths=(1, 3))
    outcome = gamma.run(tiny, PROMPTS[:2], plan, quiet)
    fits_json(outcome)
    speed, accepted = outcome.charts
    assert speed.places == ["0", "1", "3"]
    assert [series.name for series in accepted.series] == ["draft", "ngram", "cascade"]
    assert all(len(series.values) == 3 for chart in outcome.charts for series in chart.series)
    assert speed.series[0].values[0] == 1.0


def test_scenarios_answer_as_the_target_does(tiny: BenchModel) -> None:
    outcome = scenarios.run(tiny, PROMPTS[:2], scenarios.Plan(2, SIZES), quiet)
    found = fits_json(outcome)["scenarios"]
    assert outcome.sound
    assert list(found)[:2] == ["A: target alone", "B: draft alone"]
    assert all(row["of_a"]["median"] > 0 for row in found.values())
    assert all(row["equal"] == 2 for name, row in found.items() if name[0] == "C")


def test_a_scenario_with_another_answer_is_not_sound() -> None:
    a, b = [run("abcdefghijk", 1.0)], [run("abcdeXghijk", 1.0)]
    plan = scenarios.Plan(1, SIZES)
    names = ("A: target alone", "B: draft alone", "C: both")
    found = scenarios.outcome(MODEL, dict(zip(names, (a, b, a), strict=True)), plan)
    assert found.sound
    assert found.result["scenarios"]["B: draft alone"]["same_tokens"] == pytest.approx(5 / 11)
    assert not scenarios.outcome(MODEL, dict(zip(names, (a, b, b), strict=True)), plan).sound


def test_without_a_draft_there_are_no_scenarios(tiny: BenchModel) -> None:
    alone = replace(tiny, settings=replace(tiny.settings, draft="none"))
    with pytest.raises(ConfigError, match="no scenario B"):
        scenarios.run(alone, PROMPTS, scenarios.Plan(1, SIZES), quiet)


def test_requests_run_at_once_and_all_to_their_end(tiny: BenchModel) -> None:
    plan = concurrency.Plan(2, SIZES, loads=(2,))
    found = fits_json(concurrency.run(tiny, PROMPTS[:2], plan, quiet))["loads"]
    assert {row["requests"] for row in found} == {2}
    assert all(row["tokens_per_second"]["median"] > 0 for row in found)
    assert found[0]["tokens_per_jump"] == pytest.approx(1.0)  # plain: a token a step and request


def batches(seconds: float) -> list[Batch]:
    return [Batch(2 * seconds, seconds, 100, 50)] * 2


def test_adaptive_is_held_against_plain_decoding_and_whichever_of_on_and_off_is_faster() -> None:
    ways = {PLAIN: batches(2.0), NGRAM: batches(1.0), ADAPTIVE: batches(1.25)}
    plan = concurrency.Plan(2, SIZES, loads=(4,))
    found = concurrency.outcome(MODEL, {(CODE, 4): ways}, plan, "ngram").result["wanted"]
    of_plain, of_better = found
    assert (of_plain["measured"], of_plain["least"]) == (pytest.approx(1.6), 1.5)
    assert of_better["measured"] == pytest.approx(0.8)
    assert "k=4" in of_better["what"]
    ways[NGRAM] = batches(4.0)
    (line,) = concurrency.outcome(MODEL, {(CODE, 4): ways}, plan, "ngram").result["wanted"]
    assert line["measured"] == pytest.approx(1.6)


def test_text_that_does_not_repeat_itself_may_lose_nothing_under_any_load() -> None:
    ways = {PLAIN: batches(1.0), NGRAM: batches(2.0), ADAPTIVE: batches(1.02)}
    plan = concurrency.Plan(2, SIZES)
    found = {(CREATIVE, load): ways for load in plan.loads}
    wanted = concurrency.outcome(MODEL, found, plan, "ngram").result["wanted"]
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


LEVELS = levels.Plan(2, 24, rounds={1: 1, 2: 2}, levels=(1.0, 0.0), lengths=(1, 3))


def test_levels_measure_every_length_at_the_acceptance_asked_for(tiny: BenchModel) -> None:
    outcome = levels.run(tiny, PROMPTS[:2], LEVELS, quiet)
    (found,) = fits_json(outcome)["runs"]
    assert set(found) == {"1", "2"}
    for load, ways in (("1", {"k=1", "k=3"}), ("2", {"k=1", "k=3"})):
        assert set(found[load]["1"]) == {"k=0", "adaptive"} | ways
        for way in found[load]["0"].values():
            assert way["tokens"] == way["steps"]  # nothing was accepted
            assert way["lost"] == 0
        always = found[load]["1"]["k=3"]
        assert sum(always["tokens"]) > 2 * sum(always["steps"])
    titles = [table.title.lower() for table in outcome.tables]
    assert all("simulated acceptance" in title for title in titles)


def test_levels_hold_adaptive_against_the_best_length_over_all_runs() -> None:
    def figures(*seconds: float) -> dict[str, Any]:
        count = len(seconds)
        return {
            "decode_seconds": list(seconds), "tokens": [63] * count, "steps": [42] * count,
            "lost": 0,
        }  # fmt: skip

    first = {"0.7": {"k=0": figures(2, 2), "k=3": figures(1, 1), "adaptive": figures(1, 1.25)}}
    second = {"0.7": {"k=0": figures(2, 2), "k=3": figures(1, 1), "adaptive": figures(2, 2)}}
    outcome = levels.outcome(MODEL, [{"4": first}, {"4": second}], LEVELS)
    plain, best = outcome.result["wanted"]
    assert best["measured"] == pytest.approx((0.5 + 0.8) / 2)  # median of 0.5, 0.5, 0.8, 1
    assert plain["measured"] == pytest.approx((1 + 1.6) / 2)
    assert (plain["least"], best["least"]) == (1.15, 0.95)
    assert outcome.tables[0].rows[0][:3] == ("4", "0.7", "k=3")
    assert outcome.tables[0].rows[0][4] == "0.500\N{EN DASH}0.900"


def test_earlier_runs_of_another_plan_are_not_shown_beside_new_ones(tmp_path: Path) -> None:
    class Options:
        results, add = tmp_path, True

    kept = {"plan": asdict(LEVELS), "runs": [{"4": {}}]}
    (tmp_path / "simulated.json").write_text(json.dumps(kept))
    earlier = experiments._earlier
    assert earlier("simulated", Options, LEVELS) == kept["runs"]  # type: ignore[arg-type]
    assert earlier("simulated", Options, levels.QUICK) == []  # type: ignore[arg-type]
    assert earlier("watched", Options, LEVELS) == []  # type: ignore[arg-type]


@pytest.mark.reference
def test_transformers_generates_the_same_number_of_tokens(tiny: BenchModel) -> None:
    pytest.importorskip("torch")
    outcome = assisted.run(tiny, PROMPTS[:2], speculation.Plan(6), quiet)
    sides = fits_json(outcome)["sides"]
    assert {side["library"] for side in sides} == {"Spec-Ops", "transformers"}
    plain = [side for side in sides if side["way"] == "plain"]
    assert [side["speedup"]["median"] for side in plain] == [1.0, 1.0]
    assert all(side["equal"] == 2 for side in plain)


def test_gains_are_compared_between_the_best_of_each_library() -> None:
    def side(library: str, way: str) -> assisted.Side:
        return assisted.Side(library, way, lambda prompt: ())

    found = {
        side("Spec-Ops", "plain"): assisted.Times([1.0], [(1,)]),
        side("Spec-Ops", "ngram"): assisted.Times([0.5], [(1,)]),
        side("transformers", "plain"): assisted.Times([4.0], [(1,)]),
        side("transformers", "lookup"): assisted.Times([2.5], [(1,)]),
        side("transformers", "assisted"): assisted.Times([5.0], [(2,)]),
    }
    outcome = assisted.outcome(MODEL, found, [CODE], SIZES, threads=2)
    gain, rate = outcome.result["wanted"]
    assert gain["measured"] == pytest.approx(2 / 1.6)
    assert rate["measured"] == pytest.approx(2.5 / 0.5)
    assert [row[-1] for row in outcome.tables[0].rows] == ["1/1", "1/1", "1/1", "1/1", "0/1"]
