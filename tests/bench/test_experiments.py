"""Every experiment runs on a tiny pair, and its tables say what its runs were."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench import assisted, compare, concurrency, equality, gamma, levels, scenarios, speculation
from bench.concurrency import Batch
from bench.equality import Count
from bench.models import BenchModel
from bench.outcome import Outcome
from bench.prompts import CODE, CREATIVE, Prompt
from bench.scenarios import Runs
from bench.speculation import PLAIN
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
    exact = found["A: target alone"]["equal_exact"]
    assert all(row["equal_exact"] == exact for name, row in found.items() if name[0] == "C")


def test_a_scenario_with_another_answer_is_not_sound() -> None:
    same, other = run("abcdefghijk", 1.0), run("abcdeXghijk", 1.0)
    a, b = Runs([same], [same]), Runs([other], [other])
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


def test_adaptive_is_held_against_whichever_of_on_and_off_took_less() -> None:
    def batches(seconds: float) -> list[Batch]:
        return [Batch(seconds, 100, 50)] * 2

    ways = {PLAIN: batches(2.0), NGRAM: batches(1.0), ADAPTIVE: batches(1.25)}
    plan = concurrency.Plan(2, SIZES, loads=(4,))
    (line,) = concurrency.outcome(MODEL, {(CODE, 4): ways}, plan, "ngram").result["wanted"]
    assert line["measured"] == pytest.approx(0.8)
    ways[NGRAM] = batches(4.0)
    (line,) = concurrency.outcome(MODEL, {(CODE, 4): ways}, plan, "ngram").result["wanted"]
    assert line["measured"] == pytest.approx(1.6)
    assert "plain" in line["what"]


def test_levels_measure_every_length_at_the_acceptance_asked_for(tiny: BenchModel) -> None:
    plan = levels.Plan(1, speculation.Plan(24, exact=True), levels=(1.0, 0.0), lengths=(1, 3))
    outcome = levels.run(tiny, PROMPTS[:2], plan, quiet)
    (found,) = fits_json(outcome)["runs"]
    assert set(found["1"]) == {"k=0", "k=1", "k=3", "adaptive"}
    assert found["0"]["k=3"]["acceptance"] == 0
    assert found["0"]["k=3"]["tokens_per_jump"] == 1
    if not found["1"]["k=3"]["lost"]:
        assert found["1"]["k=3"]["acceptance"] == 1
    titles = [table.title.lower() for table in outcome.tables]
    assert all("simulated acceptance" in title for title in titles)


def test_levels_hold_adaptive_against_the_best_length_over_all_runs() -> None:
    def figures(*seconds: float) -> dict[str, Any]:
        return {
            "decode_seconds": list(seconds), "tokens": 63, "acceptance": 0.5,
            "tokens_per_jump": 1.5, "lost": 0,
        }  # fmt: skip

    first = {"0.5": {"k=0": figures(2, 2), "k=3": figures(1, 1), "adaptive": figures(1, 1.25)}}
    second = {"0.5": {"k=0": figures(2, 2), "k=3": figures(1, 1), "adaptive": figures(2, 2)}}
    outcome = levels.outcome(MODEL, [first, second], levels.Plan(2, SIZES))
    best, plain = outcome.result["wanted"]
    assert best["measured"] == pytest.approx((0.5 + 0.8) / 2)  # median of 0.5, 0.5, 0.8, 1
    assert plain["measured"] == pytest.approx((1 + 1.6) / 2)
    assert outcome.tables[0].rows[0][1] == "k=3"
    assert outcome.tables[0].rows[0][3] == "0.500\N{EN DASH}0.900"


def test_equality_goes_on_where_it_stopped(tiny: BenchModel, tmp_path: Path) -> None:
    prompts = [Prompt(CODE, f"def f{number}(a):\n") for number in range(12)]
    checkpoint = tmp_path / "checkpoint.json"
    told: list[str] = []
    plan = equality.Plan(12, 6, default_prompts=11)
    first = equality.run(tiny, prompts, replace(plan, seconds=0.0), checkpoint, told.append)
    assert first.result["prompts"] == 10
    assert not first.result["complete"]
    assert checkpoint.is_file()
    done = equality.run(tiny, prompts, plan, checkpoint, told.append)
    assert done.result["complete"]
    assert done.sound
    assert not checkpoint.exists()
    counts = {
        mode: {count["prompts"] for count in found.values()}
        for mode, found in done.result["counts"].items()
    }
    most = 12 if "exact" in counts else 11
    assert counts == {mode: {12 if mode == "exact" else 11} for mode in counts}
    assert told == [f"10 of {most} prompts", f"{most} of {most} prompts"]


def test_a_checkpoint_of_another_experiment_is_not_gone_on_with(
    tiny: BenchModel, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint.json"
    checkpoint.write_text(json.dumps({"key": "another", "counts": {}}))
    plan = equality.Plan(1, 4, 1)
    assert equality.run(tiny, PROMPTS[:1], plan, checkpoint, quiet).result["prompts"] == 1


def test_one_differing_answer_in_exact_mode_is_not_sound() -> None:
    whole, short = Count(10, 10, 110, 50), Count(10, 9, 110, 50, [4])
    plan = equality.Plan(10, 11, 10)
    fine = equality.outcome(MODEL, {"exact": {"a": whole}, "default": {"a": short}}, plan, 10)
    assert fine.sound
    assert fine.tables[0].rows[0] == (
        "a", "10/10", "1.83", "9/10", "1.83", "10.0%", f"{1e4 / 104:.1f}",
    )  # fmt: skip
    bad = equality.outcome(MODEL, {"exact": {"a": short}, "default": {"a": whole}}, plan, 10)
    assert not bad.sound


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
