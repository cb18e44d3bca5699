"""A request that ends early leaves within a step, in any phase, and changes no other request."""

from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from tests.conftest import THREADS
from tests.leavers import heldout, kinds, play

SETTINGS = Settings(model="demo", threads=THREADS)
PROMPTS = heldout(SETTINGS)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo-cache")


@pytest.mark.parametrize(("slots", "kv_tokens"), [(1, 0), (5, 0), (5, 448)])
def test_outputs_are_those_of_plain_requests_that_are_alone(
    slots: int, kv_tokens: int, cache_dir: Path
) -> None:
    """On the demo pair, every drafter, seeded and greedy, in narrow passes; also preempted."""
    settings = replace(
        SETTINGS,
        slots=slots,
        kv_tokens=kv_tokens,
        cache_dir=cache_dir,
        max_batched_tokens=16,
    )
    engine = Engine.load(settings)
    steps = iter(range(400))
    # Long answers outgrow the blocks that were free when their requests were admitted.
    requests = kinds(engine, PROMPTS, 10, longest=200 if kv_tokens else 60)
    tally = play(engine, requests, lambda: next(steps, None) is not None, at_once=24)
    assert tally.stayed > 10
    assert tally.cached_tokens > 0
    assert (tally.preemptions > 0) == bool(kv_tokens)
    if slots == 1:
        assert tally.left["waiting"]
    else:
        assert set(tally.left) == {"waiting", "prefilling", "decoding"}
        assert tally.wasted_tokens > 0
