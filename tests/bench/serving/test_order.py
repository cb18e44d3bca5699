"""The order of prompts over HTTP: a real service, and judgement on made-up figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.prompts import Prompt, from_file
from bench.serving import order
from bench.serving.load import greedy
from bench.serving.order import OTHER, OURS, QUICK, Plan, outcome
from specops.config import ConfigError, Settings


@pytest.mark.e2e
def test_a_real_service_is_measured_at_its_rate_and_with_two_people(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_TOKENS", range(3, 300))
    plan = replace(QUICK, document=40, question=10)
    model = BenchModel("target", "tiny", tiny_settings)
    prompts = [Prompt("own", f"line {number}", output=3) for number in range(4)]
    found = order.run(model, prompts, plan, rates=(50.0,))
    assert [len(table.rows[0]) for table in found.tables] == [2, 5]
    (waits,), (passes,) = found.result["waits"].values(), found.result["passes"].values()
    assert all(0 < first <= whole and tokens > 0 for first, whole, tokens, *_ in waits[OURS])
    assert [answer for *_, answer, _ in waits[OURS]] == [3] * 4
    assert passes[OURS]["seconds"] > min(passes[OURS]["costs"].values()) > passes[OURS]["pair"] > 0


def test_shares_and_times_of_alone_are_judged() -> None:
    alone = {"60": [0.1], "875": [1.0], "3500": [10.0]}
    people = {
        OTHER: {**alone, "question": [9.0], "document": [11.0]},
        OURS: {**alone, "question": [0.2], "document": [31.0]},
    }
    waits = {
        "1 a second": {OTHER: [(4.0, 5.0, 60, 9, 0.0)] * 3, OURS: [(1.0, 6.0, 60, 9, 0.0)] * 3}
    }
    targets = {target.what: target for target in outcome("m", waits, people, Plan()).targets}
    shares = [target.measured for target in targets.values()]
    assert shares == pytest.approx([0.25, 0.25, 1.2, 2.0, 3.1])
    assert [target.met for target in targets.values()] == [True, True, False, True, False]


def test_too_few_prompts_and_a_folder_that_is_no_checkout_are_said(tmp_path: Path) -> None:
    model = BenchModel("tiny", "tiny", Settings())
    with pytest.raises(ConfigError, match=r"no \.venv/bin/python"):
        order.run(model, [], QUICK, other=tmp_path)
    (tmp_path / "file").write_text('{"prompt": "a", "output_tokens_count": 5}\n')
    prompts = from_file(tmp_path / "file")
    assert [prompt.output for prompt in prompts] == [5]
    with pytest.raises(ConfigError, match="needs 4 different prompts"):
        order._turn([greedy("tiny", prompt.text, 5) for prompt in prompts], 4)
