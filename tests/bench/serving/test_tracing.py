"""What traces cost: real services in turns, and shares that follow from their seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.serving import tracing
from bench.serving.tracing import OFF, ON, OTHER, Plan
from specops.config import ConfigError, Settings

PLAN = Plan(rounds=2, requests=10)


def test_seconds_are_shares_of_the_other_checkout_round_by_round() -> None:
    seconds = {OTHER: [10.0, 20.0], OFF: [10.0, 20.2], ON: [10.2, 20.8]}
    found = tracing.outcome(seconds, PLAN, OTHER, 340.0)
    assert [(one.line, one.at_most) for one in found.wanted] == [(1.01, True), (1.03, True)]
    assert [one.measured for one in found.wanted] == pytest.approx([1.005, 1.03])
    assert found.tables[0].rows[0][:3] == (OTHER, "30.00", "1500.00")
    assert json.loads(json.dumps(found.result))["seconds"] == seconds


def test_a_folder_without_an_interpreter_is_refused_by_name(
    tmp_path: Path, tiny_settings: Settings
) -> None:
    model = BenchModel("tiny", "tiny", tiny_settings)
    with pytest.raises(ConfigError, match=f"{tmp_path} has no .venv/bin/python"):
        tracing.run(model, ["a"], PLAN, tmp_path)


def test_settings_that_another_checkout_lacks_are_found() -> None:
    names = {"SPECOPS_SLOTS", "SPECOPS_NEW", "HOME"}
    assert tracing._unknown(Path(sys.executable), names) == {"SPECOPS_NEW"}


def test_services_with_traces_and_without_take_turns(tiny_settings: Settings) -> None:
    plan = Plan(rounds=1, requests=2, tokens=4)
    found = tracing.run(BenchModel("tiny", "tiny", tiny_settings), ["a", "b"], plan, None)
    seconds = found.result["seconds"]
    assert set(seconds) == {OFF, ON}
    assert all(one > 0 for values in seconds.values() for one in values)
    assert found.result["bytes_per_span"] > 100  # the collector got them
