"""Every experiment runs on a tiny pair, and its tables say what its runs were."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from bench.models import BenchModel
from bench.prompts import CODE, CREATIVE, Prompt
from bench.speculation import compare, concurrency, simulated
from bench.speculation.ways import PLAIN, Measured, Sizes
from bench.tools.report import Outcome
from specops.runtime.cost_model import CostModel
from tests.bench.speculation.runs import ADAPTIVE, MODEL, SUFFIX, measured, run

PROMPTS = [
    Prompt(CODE, "def add(a, b):\n"),
    Prompt(CODE, "return a + b\n"),
    Prompt(CREATIVE, "Once"),
]
SIZES = Sizes(new_tokens=8)


def fits_json(outcome: Outcome) -> dict[str, Any]:
    """The result, sure to survive a file."""
    whole = {**outcome.result, "charts": list(map(asdict, outcome.charts))}
    result: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
    return result


def test_compare_runs_each_drafter_fixed_and_adaptively(tiny: BenchModel) -> None:
    found = fits_json(compare.run(tiny, PROMPTS, compare.Plan(2, SIZES)))
    ways = [(row["drafter"], row["adaptive"]) for row in found["categories"][CODE]]
    assert ways[0] == ("none", False)
    names = ("draft", "suffix", "cascade")
    assert sorted(ways[1:]) == sorted((name, way) for name in names for way in (False, True))
    assert found["prompts"] == {CODE: 2, CREATIVE: 1}


def test_compare_judges_code_by_speed_and_jumps_and_other_text_by_speed() -> None:
    data = measured({CODE: [1.6, 1.4, 1.5], CREATIVE: [0.98, 0.9, 0.96]})
    lines = compare.outcome(MODEL, data, SIZES, ADAPTIVE).wanted
    assert [line.measured for line in lines] == pytest.approx([1.5, 0.96, 10 / 4])
    assert [line.met for line in lines] == [True, False, True]


def test_an_answer_that_is_not_plain_decodings_is_not_sound() -> None:
    data = measured({CODE: [1.5]})
    assert compare.outcome(MODEL, data, SIZES, ADAPTIVE).sound
    data.runs[ADAPTIVE] = [run("ab", 1.0)]
    assert not compare.outcome(MODEL, data, SIZES, ADAPTIVE).sound


def test_requests_run_at_once_and_all_to_their_end(tiny: BenchModel) -> None:
    plan = concurrency.Plan(2, Sizes(24), loads=(2,))
    (rows,) = fits_json(concurrency.run(tiny, PROMPTS[:2], plan))["loads"].values()
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["equal"] == row["greedy"] == 2 * 4 for row in rows)  # each prompt four times
    assert rows[0]["tokens_per_jump"] == pytest.approx(1.0)  # plain: a token a step and request


def of_seconds(**seconds: float) -> Measured:
    """Four requests at once for code: plain decoding, three draft tokens, and adaptively."""
    data = measured({CODE: [1.0, 1.0]}, at_once=4)
    for way, name in ((PLAIN, "plain"), (SUFFIX, "fixed"), (ADAPTIVE, "adaptive")):
        data.runs[way] = [run("aa", seconds[name], requests=4)] * 2
    return data


def test_adaptive_is_held_against_plain_decoding_and_whichever_of_on_and_off_is_faster() -> None:
    plan = concurrency.Plan(2, SIZES, loads=(4,))
    data = of_seconds(plain=2.0, fixed=1.0, adaptive=1.25)
    of_plain, of_best = concurrency.outcome(MODEL, {CODE: {4: data}}, plan, ADAPTIVE).wanted
    assert (of_plain.measured, of_plain.line) == (pytest.approx(1.6), 1.5)
    assert (of_best.measured, of_best.line) == (pytest.approx(0.8), 0.97)
    assert "k=4" in of_best.what
    data = of_seconds(plain=2.0, fixed=4.0, adaptive=1.25)
    (line,) = concurrency.outcome(MODEL, {CODE: {4: data}}, plan, ADAPTIVE).wanted
    assert line.measured == pytest.approx(1.6)


LEVELS = simulated.Plan(2, 24, rounds={1: 1, 2: 2}, levels=(1.0, 0.0), lengths=(1, 3))


def test_every_length_is_measured_at_the_acceptance_asked_for(tiny: BenchModel) -> None:
    outcome = simulated.run(tiny, PROMPTS[:2], LEVELS)
    levels = fits_json(outcome)["levels"]
    assert list(levels) == [f"{n} at once, acceptance {level}" for n in (1, 2) for level in (1, 0)]
    for name, rows in levels.items():
        found = {row["label"]: row for row in rows}
        lengths = ["simulated, k=1", "simulated, k=3", "simulated, adaptive"]
        assert list(found) == ["plain", *lengths]
        assert all(row["equal"] == row["greedy"] for row in rows)
        if name.endswith("acceptance 0"):
            assert all(row["tokens_per_jump"] == 1 for row in rows)  # nothing was accepted
        else:
            assert found["simulated, k=3"]["tokens_per_jump"] > 2
    assert "simulated acceptance" in outcome.tables[0].title
    assert [row[0] for row in outcome.tables[1].rows] == list(levels)


@pytest.mark.parametrize(
    ("acceptance", "tokens", "speedup"), [(1.0, 12, 12 / 7), (0.5, 6, 1.25), (0.0, 4, 1.0)]
)
def test_what_passes_cost_bounds_what_lengths_bring(
    acceptance: float, tokens: int, speedup: float
) -> None:
    """Up to 6 tokens cost the same, and each one behind them an eighth more."""
    costs = CostModel([1, 6, 18], [4.0, 4.0, 10.0])
    found = simulated.Ceiling.of(costs, 4, acceptance, 2, 0)
    assert (found.tokens, found.speedup) == (tokens, pytest.approx(speedup))
    assert (found.plain, found.twice) == (pytest.approx(4.0), pytest.approx(5.0))
