"""A table says the same on the screen, in Markdown and in JSON, or refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.tools.report import SCHEMA_VERSION, Outcome, Table, Wanted, spread, write
from bench.tools.stats import Summary

TABLE = Table("Speed", ("side", "tok/s"), [("engine", "9.5"), ("API", "10.25")], ("one stream",))


def test_columns_are_aligned_whatever_their_cells_length() -> None:
    assert TABLE.text().splitlines() == [
        "Speed",
        "",
        "side    tok/s",
        "------  -----",
        "engine    9.5",
        "API     10.25",
        "* one stream",
    ]


def test_markdown_is_a_table_between_its_title_and_its_notes() -> None:
    assert TABLE.markdown().splitlines() == [
        "### Speed",
        "",
        "| side | tok/s |",
        "| --- | ---: |",
        "| engine | 9.5 |",
        "| API | 10.25 |",
        "",
        "- one stream",
    ]


def test_a_row_with_a_missing_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        Table("Speed", ("side", "tok/s"), [("engine",)])


def test_spread_shows_the_median_and_both_quartiles() -> None:
    assert spread(Summary(0.981, 0.97, 0.99, 7), 2) == "0.98 [0.97\N{EN DASH}0.99]"


def test_results_are_written_as_json_and_markdown(tmp_path: Path) -> None:
    outcome = Outcome({"rate": 2.5}, [TABLE], wanted=[Wanted("speed", 0.97, 1.2)])
    data, page = write(tmp_path / "new", "overhead", {"quick": True}, outcome, "here")
    found = json.loads(data.read_text())
    first, wanted = found.pop("tables")
    assert found == {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "overhead",
        "quick": True,
        "rate": 2.5,
        "wanted": [asdict(outcome.wanted[0])],
    }
    assert first == json.loads(json.dumps(asdict(TABLE)))
    assert wanted["notes"] == ["here"]
    assert page.read_text().count("### ") == 2


def test_a_result_that_is_no_number_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path, "overhead", {}, Outcome({"rate": float("nan")}, [TABLE]), "here")


def test_a_line_is_reached_from_its_figure_on_or_up_to_it() -> None:
    lines = [
        Wanted("a", 0.97, 0.97),
        Wanted("b", 0.97, 0.9699),
        Wanted("c", 1.5, 1.5, at_most=True),
        Wanted("d", 1.5, 1.501, at_most=True),
    ]
    (table,) = Outcome({}, [], wanted=lines).shown
    assert [row[1] for row in table.rows] == ["at least 0.97"] * 2 + ["at most 1.50"] * 2
    assert [row[-1] for row in table.rows] == ["yes", "NO"] * 2
