"""Two checkouts in turns: the same orders to both, and figures that follow from their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.runtime import before, before_worker
from bench.runtime.before import OTHER, OURS, Plan
from bench.tools.quiet import Turns
from specops.config import Settings
from tests.conftest import THREADS

PLAN = Plan(loads=1, rounds=2, steps=2, mixed_seconds=0.2)


def test_our_time_is_a_share_of_the_others_and_theirs_over_ours_the_speed() -> None:
    ms = {case.title: {OURS: [9.0, 9.5], OTHER: [10.0, 10.0]} for case in PLAN.cases()}
    outcome = before.outcome({"m": Turns(ms=ms)}, Path("old"), PLAN)
    assert [line.line for line in outcome.targets] == pytest.approx([1, 1 / 0.95, 1 / 0.97, 1.1])
    assert outcome.targets[0].measured == pytest.approx((10 / 9 + 10 / 9.5) / 2)
    assert outcome.tables[0].rows[0][3].startswith("0.93")
    assert json.loads(json.dumps(outcome.result))["other"] == "old"


def test_a_worker_times_steps_prompts_and_both_together(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_worker, "_PAST", 8)  # fits a tiny model's context
    worker = before_worker.Steps()
    settings = {
        "target": tiny_settings.target, "draft": "none", "quant": "int8-128", "threads": THREADS,
        "prefix_cache": "off", "cache_dir": str(tiny_settings.cache_dir), "no_such_setting": 1,
        "slots": 4,
    }  # fmt: skip
    worker.load(settings)
    assert len(worker.steps(4, 0, 5)) == 5
    assert len(worker.steps(1, 3, 2)) == 2
    assert not worker.scheduler.busy
    (seconds,) = worker.prompt(64)
    assert seconds > 0
    (by_token,) = worker.mixed(2, 40, 0.2)
    assert by_token > 0
    assert not worker.scheduler.busy
