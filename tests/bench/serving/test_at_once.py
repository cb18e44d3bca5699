"""Requests at once: clients of the real service, and judgement on made-up figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.peers.models import LLAMA_CPP, OPENVINO, TYPES
from bench.serving import at_once, server
from bench.serving.at_once import HttpSide, Measured, Plan
from bench.serving.server import serving
from specops.config import Settings
from tests.bench.peers.test_compare import VOCAB, model, needs_peers, use_small_models

__all__ = ["model"]  # a fixture


@pytest.mark.e2e
def test_clients_get_whole_answers_and_the_most_likely_first_tokens(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_once, "PROMPT", 20)  # fits a tiny model's context
    measured = Measured(Plan(starts=1, rounds=1, clients=(3,), output=8), {})
    with serving(server.environment(replace(tiny_settings, slots=3))) as running:
        side = HttpSide(running)
        seconds, firsts = side.complete([[5, 6], [7, 8], [9, 10]], 1)
        assert seconds > 0
        assert [len(likeliest) for likeliest in firsts] == [5] * 3
        assert measured.ask(3, VOCAB, side)[0] > 0
        assert side.complete([[5, 6]], 8)[1] == [[]]


@pytest.mark.e2e
@needs_peers
def test_the_real_peers_answer_beside_the_real_service(
    model: BenchModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_models(at_once, model, monkeypatch)
    plan = Plan(starts=1, rounds=1, clients=(1, 3), output=4)
    found = at_once.run(plan, tmp_path)
    assert len(found.tables[0].rows) == (1 + len(TYPES)) * len(plan.clients)
    assert all(set(case["over"]) == {LLAMA_CPP, OPENVINO} for case in found.result["cases"])
