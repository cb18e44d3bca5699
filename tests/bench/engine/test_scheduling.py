"""What requests cost each other is counted from the engine's own steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.engine import scheduling
from bench.engine.scheduling import Bench
from specops.config import Settings
from specops.engine.engine import Engine


@pytest.fixture
def bench(tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Sizes that fit a tiny model."""
    sizes = {"CONTEXT": 128, "LONG": 100, "CHAT": 48, "SHORT": 20, "_ANSWER": 8, "_ROUNDS": 6,
             "TINYLLAMA_VOCAB": 300, "_WARM_STEPS": 2}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(scheduling, name, value)
    settings = replace(tiny_settings, draft="none", slots=5, max_k_draft=8, prefix_cache="client")
    return Bench(Engine.load(settings))


def test_plain_streams_are_timed_together(bench: Bench) -> None:
    for streams in (1, 4):
        found = bench.decoding(streams)
        assert found.rate > 0
        assert 0 < found.in_passes < 1


def test_a_long_prompt_is_computed_anew_each_time_alone_and_beside_streams(bench: Bench) -> None:
    for running in (0, 4, 0):
        found = bench.reading(running)
        assert found.passes >= 3  # 100 tokens at 45 a pass: nothing came from the prefix cache
        assert found.seconds > 0
        assert bool(found.pauses) == bool(running)
