"""Figures, tables and results say the same on the screen, in Markdown and in JSON."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tools import machine
from bench.tools.report import Outcome, Summary, Table, Target, ratios, write

TABLE = Table("Speed", ("side", "tok/s"), [("engine", "9.5"), ("API", "10.25")], ("one stream",))


def test_a_table_is_aligned_on_the_screen_and_a_section_in_markdown() -> None:
    assert TABLE.text() == (
        "Speed\n\nside    tok/s\n------  -----\nengine    9.5\nAPI     10.25\n* one stream\n"
    )
    assert TABLE.markdown() == (
        "### Speed\n\n| side | tok/s |\n| --- | ---: |\n| engine | 9.5 |\n| API | 10.25 |\n\n"
        "- one stream\n"
    )


def test_results_are_written_as_json_and_markdown(tmp_path: Path) -> None:
    outcome = Outcome({"rate": 2.5}, [TABLE], targets=[Target("speed", 0.97, 1.2)])
    data, page = write(tmp_path / "new", "overhead", {"quick": True}, outcome, "here")
    found = json.loads(data.read_text())
    first, targets = found["tables"]
    assert (found["benchmark"], found["quick"], found["rate"]) == ("overhead", True, 2.5)
    assert found["targets"] == [asdict(outcome.targets[0])]
    assert first == json.loads(json.dumps(asdict(TABLE)))
    assert targets["notes"] == ["here"]
    assert page.read_text().count("### ") == 2
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path, "overhead", {}, Outcome({"rate": float("nan")}, [TABLE]), "here")


def test_a_target_is_a_least_or_a_largest_value() -> None:
    targets = [
        Target("a", line, measured, at_most)
        for line, measured, at_most in (
            (0.97, 0.97, False), (0.97, 0.9699, False), (1.5, 1.5, True), (1.5, 1.501, True)
        )
    ]  # fmt: skip
    (table,) = Outcome({}, [], targets=targets).shown
    assert [row[-1] for row in table.rows] == ["yes", "NO", "yes", "NO"]
    assert [row[1] for row in table.rows[1:3]] == ["at least 0.97", "at most 1.50"]


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30))
def test_quartiles_lie_around_the_median_and_within_the_values(values: list[float]) -> None:
    summary = Summary.of(values)
    assert min(values) <= summary.low <= summary.median <= summary.high <= max(values)
    assert summary.count == len(values)


def test_figures_need_values_and_as_many_bases() -> None:
    assert Summary(0.981, 0.97, 0.99, 7).spread() == "0.98 [0.97\N{EN DASH}0.99]"
    assert ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    with pytest.raises(ValueError, match="nothing was measured"):
        Summary.of([])
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0], [1.0, 2.0])


def test_a_machine_is_described_with_its_commit_and_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "quality", "/home/me/a model.gguf", "--rounds", "2"])
    described = machine.describe()
    assert described.command == "python -m bench quality 'a model.gguf' --rounds 2"
    assert json.loads(json.dumps(asdict(described)))["onnxruntime"] in described.line
    clean = replace(described, commit="0123456789abcdef", modified=False)
    assert "commit 0123456789," in clean.line
    assert "commit 0123456789+," in replace(clean, modified=True).line
    assert "commit" not in replace(clean, commit=None).line
