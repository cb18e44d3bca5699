"""Two checkouts in turns: the same orders to both, and figures that follow from their times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.runtime import before, before_worker
from bench.runtime.before import OTHER, OURS, Case, Plan
from bench.tools.quiet import Turns
from specops.config import ConfigError, Settings
from tests.conftest import THREADS

PLAN = Plan(loads=1, rounds=2, steps=2, mixed_seconds=0.2)
CASE = Case("1 token", 1, most=0.95)


def quiet(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fit a tiny model's context."""
    monkeypatch.setattr(before_worker, "_PAST", 8)


def test_our_time_is_a_share_of_the_others_and_theirs_over_ours_the_speed() -> None:
    found = {"m": {CASE.title: {OURS: [9.0, 9.5], OTHER: [10.0, 10.0]}}}
    outcome = before.outcome(found, Path("old"), replace(PLAN, cases=(CASE,)), Turns())
    (line,) = outcome.wanted
    assert line.line == pytest.approx(1 / 0.95)
    assert line.measured == pytest.approx((10 / 9 + 10 / 9.5) / 2)
    assert outcome.tables[0].rows[0][3].startswith("0.93")
    assert json.loads(json.dumps(outcome.result))["other"] == "old"


def test_a_folder_without_an_interpreter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no .venv/bin/python"):
        before.run([], tmp_path, PLAN, quiet)


@pytest.mark.usefixtures("small")
def test_a_worker_times_steps_prompts_and_both_together(tiny_settings: Settings) -> None:
    worker = before_worker.Worker()
    settings = {
        "target": tiny_settings.target, "draft": "none", "quant": "int8-128", "threads": THREADS,
        "prefix_cache": "off", "cache_dir": str(tiny_settings.cache_dir), "no_such_setting": 1,
        "slots": 4,
    }  # fmt: skip
    worker.load(settings)
    assert len(worker.steps(4, 0, 5)["seconds"]) == 5
    assert len(worker.steps(1, 3, 2)["seconds"]) == 2
    assert not worker.scheduler.busy
    (seconds,) = worker.prompt(64)["seconds"]
    assert seconds > 0
    (by_token,) = worker.mixed(2, 40, 0.2)["seconds"]
    assert by_token > 0
    assert not worker.scheduler.busy
