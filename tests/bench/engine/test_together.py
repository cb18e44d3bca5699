"""What counts as decoding of several requests at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.engine.together import run_together
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest


@pytest.mark.parametrize(("to_the_last", "tokens"), [(False, 3 + 3), (True, 3 + 11)])
def test_passes_count_until_the_first_request_ends(
    tiny_settings: Settings, to_the_last: bool, tokens: int
) -> None:
    engine = Engine.load(replace(tiny_settings, draft="none", slots=2))
    requests = [
        GenerationRequest(
            request_id="",
            prompt_tokens=(5, 6, 7),
            max_new_tokens=count,
            drafter=NO_DRAFTER,
            k_draft=0,
            ignore_eos=True,
        )
        for count in (4, 12)
    ]
    batch = run_together(engine, requests, to_the_last=to_the_last)
    assert [len(answer.tokens) for answer in batch.answers] == [4, 12]
    assert (batch.tokens, batch.steps) == (tokens, tokens)
    assert 0 < batch.decode_seconds < batch.seconds
