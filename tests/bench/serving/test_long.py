"""Long contexts: all sides serve the same model, each with its own type of cache."""

import argparse
import math
from functools import partial
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from bench.models import CACHE, BenchModel, plain
from bench.peers import environment
from bench.serving import long
from bench.tools.quiet import Turns
from specops.runtime.kernels import NAMES
from tests.bench.peers.test_compare import write_checkpoint
from tests.models.convert.gguf.files import write_gguf


@pytest.mark.e2e
def test_prompts_and_texts_are_timed_on_all_sides_with_the_kernels_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp takes part where the peers are installed."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "it.gguf", lambda name: GGMLQuantizationType.Q4_0)
    tiny = BenchModel("tiny", "tiny", plain(file, tmp_path))
    monkeypatch.setattr(long, "configured", lambda preset: tiny)
    monkeypatch.setattr(long, "qwen", lambda name, cache: file)
    monkeypatch.setattr(long, "Turns", partial(Turns, allowed=math.inf))
    plan = long.Plan(1, (40,), past=40, answer=4, clients=(2,), each=10, output=4)
    asked = {"only": "tiny,Qwen3", "other": None, "kernels": NAMES[-1], "cache": CACHE}
    found = long.run(argparse.Namespace(**asked, llama=environment.installed()), plan)
    whole, (shape,) = ([*ms.values()] for ms in found.result["milliseconds"].values())
    assert len(whole) == 1 + 4 + 1
    servers, peers = ["the other, fp16", "this checkout, int8"], ["llama.cpp, q8_0"]
    assert [*whole[0]] == [*shape] == servers + peers * environment.installed()
    assert all([*sides] == servers for sides in whole[1:])
    assert all(ms > 0 for sides in (*whole, shape) for (ms,) in sides.values())
