"""What counts as decoding of several requests at once."""

from dataclasses import replace

import pytest

from bench.engine.together import run_together
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest


@pytest.mark.parametrize(
    ("at_once", "tokens"), [(None, 3 * 3), (2, 3 * 2 + 3 * 2), (1, 3 + 11 + 3)]
)
def test_passes_count_in_which_all_decode(
    tiny_settings: Settings, at_once: int | None, tokens: int
) -> None:
    engine = Engine.load(replace(tiny_settings, draft="none", slots=3))
    requests = [
        GenerationRequest(
            request_id="",
            prompt_tokens=(5, 6, 7),
            max_new_tokens=count,
            drafter=NO_DRAFTER,
            k_draft=0,
            ignore_eos=True,
        )
        for count in (4, 12, 4)
    ]
    batch = run_together(engine, requests, at_once)
    assert [len(answer.tokens) for answer in batch.answers] == [4, 12, 4]
    assert (batch.tokens, batch.steps) == (tokens, tokens)
    assert 0 < batch.decode_seconds < batch.seconds
