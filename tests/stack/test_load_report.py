"""The load test's figures: quantiles, stages, limits, and where the knee is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.stack.support import ROOT


class Modules:
    """The load test's own modules; they import each other without a package, as for Locust."""

    def __init__(self) -> None:
        self.record, self.shapes, self.slo = map(
            importlib.import_module, ("record", "shapes", "slo")
        )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Modules:
    monkeypatch.syspath_prepend(str(ROOT / "loadtest"))
    return Modules()


def figures(load: Modules, rate: float, **changed: float) -> dict[str, float]:
    made: dict[str, float] = load.record.summary(load.record.Tally(answered=10), 10)
    return made | {"arrived_per_second": rate, "asked_per_second": rate} | changed


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([], 0.95, 0), ([7], 0.5, 7), ([3, 1, 2], 0.5, 2), (list(range(1, 101)), 0.95, 95)],
)
def test_a_quantile_is_one_of_the_values(
    values: list[float], q: float, expected: float, load: Modules
) -> None:
    assert load.record.quantile(values, q) == expected


def test_a_request_counts_where_it_was_sent(load: Modules) -> None:
    stages = (load.shapes.Stage(10, 1, open_loop=True), load.shapes.Stage(5, 8, open_loop=True))
    recorder = load.record.Recorder(stages, time_scale=2, started=1000)
    for sent in (999, 1000, 1019, 1020, 1029, 1050):
        recorder.at(sent).answered += 1
    first, second = recorder.rows(rate_scale=0.5)
    assert (first["answered"], second["answered"]) == (3, 3)
    assert (first["seconds"], second["seconds"]) == (20, 10)
    assert (first["asked_per_second"], second["asked_per_second"]) == (0.5, 4)
    assert recorder.whole()["answered"] == 6


def test_answers_that_come_after_the_last_stage_take_their_time(load: Modules) -> None:
    recorder = load.record.Recorder((load.shapes.Stage(10, 2),), time_scale=1, started=1000)
    for ended in (1008.0, 1016.0):
        tally = recorder.at(1001)
        tally.answered, tally.tokens, tally.last = tally.answered + 1, tally.tokens + 40, ended
    whole = recorder.whole()
    assert (whole["tokens_per_second"], whole["answered_per_second"]) == (5, 0.125)


def test_what_workers_saw_adds_up(load: Modules) -> None:
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


def test_shares_are_of_everything_that_was_sent(load: Modules) -> None:
    made = load.record.summary(load.record.Tally(answered=6, shed=3, failed=1), 5)
    assert (made["shed_share"], made["failed_share"]) == (0.3, 0.1)
    assert made["arrived_per_second"] == 2


def test_the_knee_is_the_last_stage_before_the_first_bad_one(load: Modules) -> None:
    firsts = {1: 0.0, 2: 0.9, 4: 1.1, 8: 0.0}
    stages = [figures(load, rate, ttft_p95=seconds) for rate, seconds in firsts.items()]
    assert load.slo.knee(stages, load.slo.OBJECTIVES)["arrived_per_second"] == 2
    assert load.slo.knee(stages[2:], load.slo.OBJECTIVES) is None
    assert load.slo.knee([figures(load, 1, answered=0)], load.slo.OBJECTIVES) is None


def test_limits_can_be_changed_and_taken_away(load: Modules) -> None:
    assert load.slo.limits({"a": 1.0, "b": 2.0}, ["a=0.5", "b=", "c=3"]) == {"a": 0.5, "c": 3.0}
    with pytest.raises(ValueError, match="NAME=LIMIT"):
        load.slo.limits({}, ["a"])


def test_every_limit_is_on_a_figure_that_is_measured(load: Modules) -> None:
    for limits in (load.slo.GATES, load.slo.OBJECTIVES):
        assert all(verdict.good for verdict in load.slo.judge(figures(load, 1), limits))
    with pytest.raises(ValueError, match="no such figure: latency_p42"):
        load.slo.judge(figures(load, 1), {"latency_p42": 1})


def test_ramps_are_drawn_and_compared(
    load: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    knee: ModuleType = importlib.import_module("knee")
    stages = [figures(load, rate, ttft_p95=rate / 10) for rate in (2, 8, 32)]
    report = {
        "stages": stages,
        "whole": {"failed": 0},
        "objectives": load.slo.OBJECTIVES,
        "knee": load.slo.knee(stages, load.slo.OBJECTIVES),
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report))
    arguments = ["knee", f"fast={path}", "--output", str(tmp_path / "a.png")]
    monkeypatch.setattr("sys.argv", [*arguments, "--table", str(tmp_path / "a.md")])
    knee.main()
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "| fast | 8 | 8.0 |" in (tmp_path / "a.md").read_text()
