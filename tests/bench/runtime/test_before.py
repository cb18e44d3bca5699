"""Two checkouts in turns: the same orders to both, and figures that follow from their times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.runtime import before, before_worker
from bench.runtime.before import OTHER, OURS, Case, Measured, Plan
from specops.config import ConfigError, Settings

PLAN = Plan(loads=1, rounds=2, steps=2, mixed_rounds=1, mixed_seconds=0.2)
CASE = Case("1 token", 1, most=0.95)


def quiet(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fit a tiny model's context."""
    monkeypatch.setattr(before_worker, "_PAST", 8)
    monkeypatch.setattr(before_worker, "_ARRIVING", 40)


def test_our_time_is_a_share_of_the_others_and_theirs_over_ours_the_speed() -> None:
    measured = Measured("m", {CASE.title: {OURS: [9.0, 9.5], OTHER: [10.0, 10.0]}})
    measured.mixed = {OURS: [(30.0, 90.0)], OTHER: [(50.0, 50.0)]}
    plan = Plan(1, 2, 2, 1, 1.0, cases=(CASE,))
    outcome = before.outcome([measured], Path("old"), plan)
    steps, mixed = outcome.result["wanted"]
    assert steps["least"] == pytest.approx(1 / 0.95)
    assert steps["measured"] == pytest.approx((10 / 9 + 10 / 9.5) / 2)
    assert (mixed["least"], mixed["measured"]) == (1.1, pytest.approx(1.2))
    assert outcome.tables[0].rows[0][3].startswith("0.93")
    assert json.loads(json.dumps(outcome.result))["other"] == "old"


def test_a_folder_without_an_interpreter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no .venv/bin/python"):
        before.run([], tmp_path, PLAN, quiet)


@pytest.mark.usefixtures("small")
def test_a_worker_times_steps_prompts_and_both_together(tiny_settings: Settings) -> None:
    worker = before_worker.Worker()
    settings = {
        "target": tiny_settings.target, "draft": "none", "quant": "int8-128", "threads": 2,
        "prefix_cache": "off", "cache_dir": str(tiny_settings.cache_dir), "no_such_setting": 1,
    }  # fmt: skip
    worker.load(settings, slots=4)
    assert len(worker.steps(4, 0, 5)["seconds"]) == 5
    assert len(worker.steps(1, 3, 2)["seconds"]) == 2
    assert not worker.scheduler.busy
    (seconds,) = worker.prompt(64)["seconds"]
    assert seconds > 0
    rates = worker.mixed(2, 0.2)
    assert rates["streams"] > 0
    assert rates["prompts"] > 0
    assert not worker.scheduler.busy


def test_verifying_steps_verify_all_the_draft_tokens_that_were_asked_for(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    worker = before_worker.Worker()
    settings = {"target": tiny_settings.target, "draft": "none", "quant": "int8-128", "threads": 2}
    worker.load({**settings, "cache_dir": str(tiny_settings.cache_dir)}, slots=2)
    seen = []
    step = worker.scheduler.step

    def watched() -> object:
        result = step()
        if result.stats is not None and result.stats.decoding:
            seen.append(result.stats.draft_tokens)
        return result

    monkeypatch.setattr(worker.scheduler, "step", watched)
    worker.steps(2, 3, 4)
    assert set(seen) <= {0, 3, 6}
    assert seen.count(6) >= 4


@pytest.mark.e2e
def test_a_checkout_against_itself(
    tiny_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this interpreter on both sides; no time is looked at."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    interpreter = tmp_path / ".venv" / "bin" / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    interpreter.chmod(0o755)
    monkeypatch.setattr(before, "_WORKER", small_worker(tmp_path))
    monkeypatch.setattr(before, "_CONTEXT", 0)
    model = BenchModel("tiny", "tiny", tiny_settings)
    cases = (CASE, Case("2 requests", 2, 1), Case("prompt", prompt=20))
    plan = Plan(1, 2, 2, 1, 0.1, cases)
    outcome = before.run([model], tmp_path, plan, quiet)
    (measured,) = outcome.result["models"]
    assert set(measured["ms"]) == {case.title for case in cases}
    for times in measured["ms"].values():
        assert {side: len(found) for side, found in times.items()} == {OURS: 2, OTHER: 2}
    assert set(measured["mixed"]) == {OURS, OTHER}


def small_worker(folder: Path) -> Path:
    """The worker with prompts that fit a tiny model's context."""
    text = Path(before_worker.__file__).read_text(encoding="utf-8")
    for name, value in (("_PAST = 200", "_PAST = 8"), ("_ARRIVING = 256", "_ARRIVING = 40")):
        assert name in text
        text = text.replace(name, value)
    script = folder / "worker.py"
    script.write_text(text, encoding="utf-8")
    return script
