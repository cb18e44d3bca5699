"""A draft head changes no output, whatever it guesses, and is refused where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.models.prepare import ModelError
from specops.request import GenerationRequest, SamplingParams
from tests.generating import run

_ids = count()
PROMPTS = [np.random.default_rng(seed).integers(0, 320, 20).tolist() for seed in range(4)]
SAMPLED = SamplingParams(1.0, top_k=5, seed=3)


@pytest.fixture(scope="module")
def settings(tiny_settings: Settings, tiny_head: Path) -> Settings:
    return replace(tiny_settings, draft=str(tiny_head))


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Engine:
    return Engine.load(settings)


def request(prompt: list[int], **fields: object) -> GenerationRequest:
    given = {"max_new_tokens": 40, "ignore_eos": True, "k_draft": 4, **fields}
    return GenerationRequest(request_id=str(next(_ids)), prompt_tokens=tuple(prompt), **given)  # type: ignore[arg-type]


def together(engine: Engine, *prompts: list[int], **fields: object) -> tuple[list[list[int]], int]:
    """The tokens after prompts that run beside each other, and how many were drafted."""
    requests = [request(prompt, **fields) for prompt in prompts]
    served = run(engine, *requests)
    tokens = [served.tokens(item) for item in requests]
    return tokens, sum(served.stats(item).draft_tokens for item in requests)


def test_the_engine_tells_of_the_head(engine: Engine) -> None:
    assert engine.info.drafters == ("head", "suffix", "cascade", "none")
    assert engine.info.default_drafter == "cascade"
    assert engine.info.draft_parameters is None


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_output_is_that_of_plain_decoding(
    engine: Engine, sampling: SamplingParams, adaptive: bool
) -> None:
    """Alone and among others; with few tokens to choose from, some guesses are right."""
    plain = [together(engine, one, sampling=sampling)[0][0] for one in PROMPTS]
    for drafter in ("head", "cascade", "suffix"):
        fields = {"drafter": drafter, "adaptive": adaptive, "sampling": sampling}
        tokens, drafted = together(engine, *PROMPTS, **fields)
        assert tokens == plain
        if drafter == "head" and not adaptive:
            assert drafted > 10


def test_a_guess_is_made_again_for_the_next_sequence_of_a_slot(engine: Engine) -> None:
    first, again = (together(engine, PROMPTS[0], drafter="head")[0] for _ in range(2))
    assert again == first


@pytest.fixture
def manifest(settings: Settings) -> Iterator[Path]:
    """A head's manifest, which a test may change."""
    path = Path(settings.draft) / "head.json"
    text = path.read_text()
    yield path
    path.write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 400}, "made for target, a model of 400 tokens and hidden states of 256"),
        ({"tokens": [1, 2]}, "make it again"),
        ({"tokens": [320]}, "head.json cannot be used"),
        ({"calibration": []}, "head.json cannot be used"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    settings: Settings, manifest: Path, change: dict[str, object], message: str
) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(RuntimeError, match=message):
        Engine.load(settings)


def test_a_manifest_that_is_cut_short_is_refused(settings: Settings, manifest: Path) -> None:
    manifest.write_text(manifest.read_text()[:100])
    with pytest.raises(ModelError, match="make another head"):
        Engine.load(settings)
