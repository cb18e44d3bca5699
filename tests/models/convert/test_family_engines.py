"""From checkpoint folders of several families to text: converted, loaded and speculated with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_gpt2_checkpoint, make_opt_checkpoint, make_relative_checkpoint
from tests.conftest import CONTEXT, THREADS
from tests.generating import generate

# The options of each family's target and draft model, beside their sizes.
FAMILIES: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        make_relative_checkpoint,
        # A random tied embedding would repeat every token, whatever the layers compute.
        {"kind": "gemma3_text", "config": {"tie_word_embeddings": False}},
        {"kind": "gemma3_text", "config": {"tie_word_embeddings": False, "sliding_window": 16}},
    ),
    "ministral3": (
        make_relative_checkpoint,
        {"kind": "ministral3", "config": {"tie_word_embeddings": False}},
        {"kind": "ministral3", "config": {"tie_word_embeddings": False}},
    ),
    "cohere2": (
        make_relative_checkpoint,
        {"kind": "cohere2", "config": {"tie_word_embeddings": False}},
        {"kind": "cohere2", "config": {"tie_word_embeddings": False}},
    ),
    "opt-350m": (make_opt_checkpoint, {"projection": 64, "norm_before": False}, {"prefix": ""}),
    "gpt2": (make_gpt2_checkpoint, {"prefix": "transformer."}, {}),
}
PROMPTS = ("a = 1\nb = 2\na = 1\nb =", "The quick fox jumps over the dog. The quick fox")


@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_no_token(family: str, tmp_path: Path) -> None:
    """Drafts of a random model are mostly wrong and of the target itself mostly right."""
    make, target, draft = FAMILIES[family]
    make(tmp_path / "target", hidden=128, layers=2, context=CONTEXT, seed=1, **target)
    make(tmp_path / "draft", hidden=64, layers=1, context=CONTEXT, seed=2, **draft)
    for name, quant in (("target", "int8-32"), ("target", "fp32"), ("draft", "int4-32-rtn")):
        into = tmp_path / name / "onnx" / quant
        export_checkpoint(tmp_path / name, into, quantization=Quantization.parse(quant))
    settings = Settings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        quant="int8-32",
        draft_quant="int4-32-rtn",
        cache_dir=tmp_path / "cache",
        threads=THREADS,
        slots=3,
        max_batched_tokens=16,
        queue_size=4,
    )
    engine = Engine.load(settings)
    info = engine.info
    assert info.batch_invariant
    assert (info.quant, info.draft_quant) == ("int8-32", "int4-32-rtn")
    assert info.drafters == ("draft", "suffix", "cascade", "none")
    assert info.draft_parameters is not None
    assert 0 < info.draft_parameters < info.parameters

    def tokens(engine: Engine, drafter: str, k_draft: int) -> tuple[list[list[int]], int, int]:
        """What follows the prompts, and the numbers of draft tokens and accepted tokens."""
        answers = [generate(engine, text, 48, drafter=drafter, k_draft=k_draft) for text in PROMPTS]
        return (
            [[piece.token for piece in pieces] for pieces, _ in answers],
            sum(stats.draft_tokens for _, stats in answers),
            sum(stats.accepted_tokens for _, stats in answers),
        )

    plain, _, _ = tokens(engine, "none", 1)
    for k_draft in (1, 8):
        found, drafted, accepted = tokens(engine, "draft", k_draft)
        assert found == plain
        assert accepted < drafted
        assert tokens(engine, "suffix", k_draft)[0] == plain
    twin = Engine.load(replace(settings, draft=settings.target, draft_quant="fp32"))
    found, drafted, accepted = tokens(twin, "draft", 4)
    assert found == plain
    assert 0.8 * drafted < accepted
