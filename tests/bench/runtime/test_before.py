"""A worker of either checkout does what it is asked to."""

import pytest

from bench.runtime import before_worker
from specops.config import Settings
from tests.conftest import THREADS


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
