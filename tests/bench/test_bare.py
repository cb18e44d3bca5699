"""The bare loop is a fair opponent: it generates what the engine generates."""

from __future__ import annotations

import pytest

from bench.bare import BareLoop
from bench.models import BenchModel
from specops.config import Settings
from specops.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def engine(tiny_settings: Settings) -> Engine:
    return Engine.load(tiny_settings)


def generated(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    request = GenerationRequest(
        request_id="one",
        prompt_tokens=prompt,
        max_new_tokens=NEW_TOKENS,
        drafter=NO_DRAFTER,
        ignore_eos=True,
    )
    return [piece.token for output in engine.generate(request) for piece in output.pieces]


@pytest.mark.parametrize("length", [1, 2, 9, 14])
def test_the_bare_loop_and_the_engine_generate_the_same(
    engine: Engine, tiny_settings: Settings, length: int
) -> None:
    graph = BenchModel("tiny", "tiny", tiny_settings, large=False).graph()
    bare = BareLoop(
        graph.session,
        prompt_tokens=length,
        new_tokens=NEW_TOKENS,
        kv_dtype=engine.info.kv_dtype,
    )
    for first in (3, 70):  # the second run meets the first one's keys and values
        prompt = tuple(range(first, first + length))
        run = bare.run(prompt)
        assert run.tokens == generated(engine, prompt)
        assert len(run.tokens) == NEW_TOKENS
        assert run.prefill_seconds > 0
        assert run.decode_seconds > 0
