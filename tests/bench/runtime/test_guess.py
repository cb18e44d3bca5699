"""A guess is timed beside a pass over one token, of a pair loaded as the service loads it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench.runtime import guess
from specops.config import Settings
from tests.checkpoints import make_llama_checkpoint
from tests.eagle_heads import LAYERS, write_head


def test_a_guess_is_timed_beside_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_llama_checkpoint(tmp_path / "target", layers=LAYERS, vocab=320, context=256)
    head = write_head(tmp_path / "head", target=target)
    settings = Settings(quant="int8-32", draft_quant="int8-32", cache_dir=tmp_path, threads=1)
    monkeypatch.setattr(guess, "shape", lambda *_: target)
    monkeypatch.setattr(guess, "head_shape", lambda *_: head)
    monkeypatch.setattr(guess, "plain", lambda *_: replace(settings, target=str(target)))
    options = Namespace(only="qwen3-4b", cache=tmp_path)
    outcome = guess.run(options, guess.QUICK)
    (line,) = outcome.targets
    assert 0 < line.measured < 10
    assert [len(found) for found in outcome.result["seconds"]["qwen3-4b"]] == [3, 3]
