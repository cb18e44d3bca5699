"""The comparison of layers: rates, ratios and overhead follow from the times, by hand."""

from __future__ import annotations

import json

import pytest

from bench import overhead
from bench.models import BenchModel
from bench.overhead import API, BARE, ENGINE, STREAM, Measured, Timing
from specops.config import Settings

MODEL = BenchModel("made-up", "Made-up model", Settings(), large=True)


def timing(whole: float, decode: float, text: str | None = "x", *tokens: int) -> Timing:
    return Timing(whole, decode, text, tokens or None)


def a_round(**changed: Timing) -> dict[str, Timing]:
    """Eleven tokens, ten of them decoded."""
    return {
        BARE: Timing(1.1, 1.0, None, (1, 2)),
        ENGINE: changed.get("engine", timing(2.2, 1.25, "x", 1, 2)),
        API: timing(4.4, 2.5),
        STREAM: timing(5.5, 5.0),
    }


def measured(*rounds: dict[str, Timing]) -> Measured:
    found = Measured(MODEL, new_tokens=11, prompt_tokens=4, outside_target_ms=[0.125])
    for timings in rounds:
        found.take(timings)
    return found


def test_rates_count_decoded_tokens_by_decode_time_and_all_by_the_whole() -> None:
    found = measured(a_round())
    assert found.decode_rates == {BARE: [10.0], ENGINE: [8.0], API: [4.0], STREAM: [2.0]}
    assert found.whole_rates[BARE] == pytest.approx([10.0])
    assert found.whole_rates[API] == pytest.approx([2.5])


def test_overhead_per_step_is_the_engines_time_above_the_bare_loops() -> None:
    assert measured(a_round()).step_ms == pytest.approx([25.0])


def test_each_side_is_held_against_the_one_below_it() -> None:
    result = overhead.result(measured(a_round(), a_round()))
    assert result["ratios"][ENGINE]["against"] == BARE
    assert result["ratios"][ENGINE]["decode"]["median"] == pytest.approx(0.8)
    assert result["ratios"][API]["decode"]["median"] == pytest.approx(0.5)
    assert result["ratios"][API]["request"]["median"] == pytest.approx(0.5)
    assert result["ratios"][STREAM]["decode"]["count"] == 2
    assert json.loads(json.dumps(result)) == result


def test_one_round_with_another_text_marks_the_result() -> None:
    other_text = a_round(engine=timing(2.2, 1.25, "y", 1, 2))
    assert measured(a_round()).outputs_equal
    assert not measured(other_text, a_round()).outputs_equal


def test_one_round_with_other_tokens_marks_the_result() -> None:
    other_tokens = a_round(engine=timing(2.2, 1.25, "x", 1, 3))
    assert not measured(other_tokens).outputs_equal
    assert "same output on all sides: NO" in overhead.table(measured(other_tokens)).text()


def test_the_table_shows_every_side_and_what_is_wanted_of_a_large_model() -> None:
    rows = {row[0]: row for row in overhead.table(measured(a_round())).rows}
    assert list(rows) == [BARE, ENGINE, API, STREAM]
    assert rows[ENGINE][1:4] == ("8.0", "5.0", BARE)
    assert rows[ENGINE][-1] == "0.97"
    assert rows[API][-1] == "0.95"
    assert rows[STREAM][-1] == ""
