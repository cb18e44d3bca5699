"""From a checkpoint folder of any family to text: converted, loaded, drafted by a smaller one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.models.convert import Quantization, export_checkpoint
from specops.request import GenerationStats
from tests.checkpoints import (
    make_gpt2_checkpoint,
    make_opt_checkpoint,
    make_phi3_checkpoint,
    make_qwen2_checkpoint,
    make_relative_checkpoint,
)
from tests.conftest import CONTEXT, THREADS
from tests.generating import generate

# What target and draft of each family are made with, beside their sizes.
FAMILIES: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    "qwen2": (make_qwen2_checkpoint, {}, {}),
    "phi3": (make_phi3_checkpoint, {"window": 40}, {"window": None}),
    "gemma3": (
        make_relative_checkpoint,
        # Random and tied, an embedding says every token once more, whatever the layers do.
        {"kind": "gemma3_text", "config": {"tie_word_embeddings": False}},
        {"kind": "gemma3_text", "config": {"tie_word_embeddings": False, "sliding_window": 16}},
    ),
    "opt": (make_opt_checkpoint, {}, {"prefix": ""}),
    "opt-350m": (make_opt_checkpoint, {"projection": 64, "norm_before": False}, {"projection": 32}),
    "gpt2": (make_gpt2_checkpoint, {"prefix": "transformer."}, {}),
}
PROMPTS = ("a = 1\nb = 2\na = 1\nb =", "The quick fox jumps over the dog. The quick fox")
SLOTS = 3


@pytest.fixture(scope="module", params=FAMILIES)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    make, target, draft = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make(folder / "target", hidden=128, layers=2, context=CONTEXT, seed=1, **target)
    make(folder / "draft", hidden=64, layers=1, context=CONTEXT, seed=2, **draft)
    for name, quant in (("target", "int8-32"), ("target", "fp32"), ("draft", "int4-32-rtn")):
        into = folder / name / "onnx" / quant
        export_checkpoint(folder / name, into, quantization=Quantization.parse(quant))
    return Settings(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        quant="int8-32",
        draft_quant="int4-32-rtn",
        cache_dir=folder / "cache",
        threads=THREADS,
        slots=SLOTS,
        max_batched_tokens=16,
        queue_size=4,
    )


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Engine:
    return Engine.load(settings)


def tokens(engine: Engine, text: str, **fields: object) -> tuple[list[int], GenerationStats]:
    pieces, stats = generate(engine, text, 48, **fields)
    return [piece.token for piece in pieces], stats


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    """The tokens that follow each prompt without drafts."""
    return [tokens(engine, text, drafter="none")[0] for text in PROMPTS]


def assert_unchanged(
    engine: Engine, plain: list[list[int]], drafter: str, k_draft: int
) -> tuple[int, int]:
    """Speculative equals plain output on both prompts; returns the tokens drafted and accepted."""
    drafted = accepted = 0
    for text, expected in zip(PROMPTS, plain, strict=True):
        found, stats = tokens(engine, text, drafter=drafter, k_draft=k_draft)
        assert found == expected
        drafted += stats.draft_tokens
        accepted += stats.accepted_tokens
    return drafted, accepted


def test_target_and_draft_of_the_family_are_loaded(engine: Engine) -> None:
    info = engine.info
    assert (info.quant, info.draft_quant) == ("int8-32", "int4-32-rtn")
    assert info.drafters == ("draft", "suffix", "cascade", "none")
    assert info.draft_parameters is not None
    assert 0 < info.draft_parameters < info.parameters


def test_speculation_changes_no_token(engine: Engine, plain: list[list[int]]) -> None:
    """The draft is no relative of the target: most of it is wrong, and must leave no trace."""
    assert engine.info.batch_invariant
    for k_draft in (1, 8):
        drafted, accepted = assert_unchanged(engine, plain, "draft", k_draft)
        assert accepted < drafted
        assert_unchanged(engine, plain, "suffix", k_draft)


def test_the_target_in_other_weights_drafts_right(
    settings: Settings, plain: list[list[int]]
) -> None:
    """Draft after draft it must stand where the target stands, rejected tokens forgotten."""
    engine = Engine.load(replace(settings, draft=settings.target, draft_quant="fp32"))
    drafted, accepted = assert_unchanged(engine, plain, "draft", 4)
    assert 0.8 * drafted < accepted
