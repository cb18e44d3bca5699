"""Whoever leaves, in whatever phase, is gone within a step, and nobody else notices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine import Engine
from tests.leavers import kinds, play

SETTINGS = Settings(threads=2)
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (SETTINGS.models_dir / "demo" / "heldout.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo-cache")


@pytest.mark.parametrize(("rows", "queue_order"), [(1, "arrival"), (5, "clients")])
def test_outputs_are_those_of_requests_that_are_alone(
    rows: int, queue_order: str, cache_dir: Path
) -> None:
    """Exact, on the demo pair, every drafter, seeded and greedy; prompts in chunks of 16."""
    settings = replace(
        SETTINGS, rows=rows, cache_dir=cache_dir, prefill_chunk=16, queue_order=queue_order
    )
    engine = Engine.load(settings)
    steps = iter(range(400))
    requests = kinds(engine, PROMPTS, 10)
    tally = play(engine, requests, lambda: next(steps, None) is not None, places=24)
    assert tally.stayed > 10
    assert tally.cached_tokens > 0
    if rows == 1:
        assert tally.left["waiting"]
    else:
        assert set(tally.left) == {"waiting", "prefilling", "decoding"}
        assert tally.wasted_tokens > 0
