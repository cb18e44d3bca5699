"""A model whose numbers are NaN or infinite ends every request in an error, and never with text."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.test_stored_tensors import rewrite

DRAWN = SamplingParams(temperature=0.8)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, with drafts": {"drafter": "suffix", "k_draft": 4},
    "drawn": {"sampling": DRAWN},
    "drawn, with drafts": {"sampling": DRAWN, "drafter": "suffix", "k_draft": 4},
    "with a seed": {"sampling": replace(DRAWN, seed=7)},
    "from the likeliest": {"sampling": replace(DRAWN, top_k=5)},
    "from a nucleus": {"sampling": replace(DRAWN, top_p=0.5, min_p=0.1)},
    "with penalties": {"sampling": SamplingParams(repetition_penalty=1.3)},
    "by a grammar": {"sampling": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "yes|no+"))},
    "with probabilities": {"logprobs": 3},
    "of the prompt": {"logprobs": 1, "prompt_logprobs": 1, "max_new_tokens": 0},
    "embedding": {"embed": True, "max_new_tokens": 0},
}


@pytest.fixture(scope="module")
def engine(tiny_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Of weights that are finite, but too large for what is computed with them."""
    folder: Path = tmp_path_factory.mktemp("damaged")
    source = make_llama_checkpoint(folder / "source")

    def damage(tensors: dict[str, Any]) -> dict[str, Any]:
        return {**tensors, "model.norm.weight": np.full_like(tensors["model.norm.weight"], 3e38)}

    rewrite(source, damage)
    return Engine.load(replace(tiny_settings, target=str(source), draft="none"))


@pytest.mark.parametrize("way", WAYS)
def test_every_request_ends_in_an_error(
    engine: Engine, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"request_id": way, "prompt_tokens": (5, 6, 7, 5, 6, 7, 5, 6), "max_new_tokens": 8}
    with caplog.at_level(logging.ERROR):
        outputs = list(engine.generate(GenerationRequest(**{**given, **WAYS[way]})))
    assert [piece for output in outputs for piece in output.pieces] == []
    assert outputs[-1].finish is FinishReason.ERROR
    assert outputs[-1].error is not None
    assert "NaN or infinity" in outputs[-1].error
    assert "download the model again" in outputs[-1].error
    (record,) = caplog.records
    assert record.exc_info is None  # it is foreseen: a traceback would say nothing
