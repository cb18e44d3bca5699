"""The load test's figures: stages, limits, the knee, and the prompts and shapes that it uses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.shapes import SHAPES, Stage, stage_at
from specops.metrics.metrics import LOAD_SHAPES
from tests.stack.support import ROOT


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The load test's own modules; they import each other without a package, as Locust does."""
    monkeypatch.syspath_prepend(str(ROOT / "loadtest"))
    names = ("record", "shapes", "slo")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def figures(load: SimpleNamespace, rate: float, **changed: float) -> dict[str, float]:
    made: dict[str, float] = load.record.summary(load.record.Tally(answered=10), 10)
    return made | {"arrived_per_second": rate, "asked_per_second": rate} | changed


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([], 0.95, 0), ([7], 0.5, 7), ([3, 1, 2], 0.5, 2), (list(range(1, 101)), 0.95, 95)],
)
def test_a_quantile_is_one_of_the_values(
    values: list[float], q: float, expected: float, load: SimpleNamespace
) -> None:
    assert load.record.quantile(values, q) == expected


def test_a_request_counts_in_the_stage_in_which_it_was_sent(load: SimpleNamespace) -> None:
    stages = (load.shapes.Stage(10, 1, open_loop=True), load.shapes.Stage(5, 8, open_loop=True))
    recorder = load.record.Recorder(stages, time_scale=2, started=1000)
    for sent in (999, 1000, 1019, 1020, 1029, 1050):
        recorder.at(sent).answered += 1
    first, second = recorder.rows(rate_scale=0.5)
    assert (first["answered"], second["answered"]) == (3, 3)
    assert (first["seconds"], second["seconds"]) == (20, 10)
    assert (first["asked_per_second"], second["asked_per_second"]) == (0.5, 4)
    assert recorder.whole()["answered"] == 6


def test_answers_that_come_after_the_last_stage_take_their_time(load: SimpleNamespace) -> None:
    recorder = load.record.Recorder((load.shapes.Stage(10, 2),), time_scale=1, started=1000)
    for ended in (1008.0, 1016.0):
        tally = recorder.at(1001)
        tally.answered, tally.tokens, tally.last = tally.answered + 1, tally.tokens + 40, ended
    whole = recorder.whole()
    assert (whole["tokens_per_second"], whole["answered_per_second"]) == (5, 0.125)


def test_figures_of_workers_add_up(load: SimpleNamespace) -> None:
    stages = (load.shapes.Stage(10, 1),)
    worker, master = (load.record.Recorder(stages, 1, 0) for _ in range(2))
    for tokens in (3, 4):
        tally = worker.at(5)
        tally.answered += 1
        tally.tokens += tokens
        tally.latency.append(tokens / 10)
        master.add(json.loads(json.dumps(worker.take())))
    whole = master.whole()
    assert (whole["answered"], whole["tokens"], whole["latency_p99"]) == (2, 7, 0.4)
    assert worker.whole()["answered"] == 0
    shares = load.record.summary(load.record.Tally(answered=6, shed=3, failed=1), 5)
    assert (shares["shed_share"], shares["failed_share"]) == (0.3, 0.1)
    assert shares["arrived_per_second"] == 2


def test_limits_can_be_changed_and_are_on_measured_figures(load: SimpleNamespace) -> None:
    assert load.slo.limits({"a": 1.0, "b": 2.0}, ["a=0.5", "b=", "c=3"]) == {"a": 0.5, "c": 3.0}
    with pytest.raises(ValueError, match="NAME=LIMIT"):
        load.slo.limits({}, ["a"])
    for limits in (load.slo.GATES, load.slo.OBJECTIVES):
        assert all(verdict.good for verdict in load.slo.judge(figures(load, 1), limits))
    with pytest.raises(ValueError, match="no such figure: latency_p42"):
        load.slo.judge(figures(load, 1), {"latency_p42": 1})


def test_the_knee_is_the_last_stage_before_the_first_bad_one_and_is_drawn(
    load: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts = {1: 0.0, 2: 0.9, 4: 1.1, 8: 0.0}
    stages = [figures(load, rate, ttft_p95=seconds) for rate, seconds in firsts.items()]
    found = load.slo.knee(stages, load.slo.OBJECTIVES)
    assert found["arrived_per_second"] == 2
    assert load.slo.knee(stages[2:], load.slo.OBJECTIVES) is None
    assert load.slo.knee([figures(load, 1, answered=0)], load.slo.OBJECTIVES) is None
    pytest.importorskip("matplotlib")
    report = {"stages": stages, "whole": {"failed": 0}, "objectives": load.slo.OBJECTIVES}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**report, "knee": found}))
    picture, table = tmp_path / "a.png", tmp_path / "a.md"
    arguments = ["knee", f"fast={path}", "--output", str(picture), "--table", str(table)]
    monkeypatch.setattr("sys.argv", arguments)
    importlib.import_module("knee").main()
    assert picture.stat().st_size > 10_000
    assert "| fast | 2 | 2.0 |" in table.read_text()


def test_shapes_end_and_have_their_mark_on_the_dashboards() -> None:
    for stages in SHAPES.values():
        total = sum(stage.seconds for stage in stages)
        assert total <= 900
        assert stage_at(stages, total - 0.01) == len(stages) - 1
        assert stage_at(stages, total) is None
    stages = (Stage(10, 1), Stage(5, 8))
    assert [stage_at(stages, second) for second in (0, 9, 10, 14, 15)] == [0, 0, 1, 1, None]
    assert {*SHAPES, "other"} == set(LOAD_SHAPES)


def test_prompts_are_many_and_of_every_category() -> None:
    lines = (ROOT / "loadtest" / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    found: dict[str, set[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt["category"], set()).add(prompt["prompt"])
    assert set(found) == {"code", "structured", "extractive", "creative", "chat"}
    assert len(found["chat"]) >= 60
    assert sum(map(len, found.values())) == len(prompts)
    held_out = (ROOT / "api" / "models" / "demo" / "heldout.jsonl").read_text().splitlines()
    assert found["code"] <= {json.loads(line)["prompt"] for line in held_out}
