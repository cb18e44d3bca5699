"""Long contexts: both sides serve the same model, each with its own type of cache."""

import math
from dataclasses import replace
from functools import partial

import pytest

from bench.models import BenchModel
from bench.serving import long
from bench.tools.quiet import Turns
from specops.config import Settings
from specops.runtime.kernels import NAMES


@pytest.mark.e2e
def test_prompts_and_texts_are_timed_on_both_sides_with_the_kernels_asked_for(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "Turns", partial(Turns, allowed=math.inf))
    plan = long.Plan(1, (40,), past=40, answer=4, clients=(2,), each=10, output=4)
    model = BenchModel("tiny", "tiny", replace(tiny_settings, prefix_cache="off"))
    found = long.run(model, plan, kernels=NAMES[-1])
    assert len(found.result["milliseconds"]) == 1 + 4 + 1
    for sides in found.result["milliseconds"].values():
        assert [*sides] == ["the other, fp16", "this checkout, int8"]
        assert all(ms > 0 for (ms,) in sides.values())
