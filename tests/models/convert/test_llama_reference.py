"""An fp32 export computes what transformers computes, in every form a decoder runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specops.models.convert import ExportedModel, Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.runner import Runner

pytestmark = pytest.mark.reference

FP32 = Quantization.parse("fp32")
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, 320, 150)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "grouped heads, untied": {"heads": 4, "kv_heads": 2, "tie": False},
    "grouped heads, tied": {"heads": 4, "kv_heads": 1, "tie": True},
    "multi-head": {"heads": 4, "kv_heads": 4, "tie": True},
    "explicit head_dim": {"hidden": 96, "heads": 4, "config": {"head_dim": 32}},
    "bfloat16 in shards": {"dtype": "bfloat16", "shards": 3, "layers": 3},
    "float16": {"dtype": "float16"},
    "odd widths": {"hidden": 80, "heads": 5, "kv_heads": 5, "ffn": 147, "vocab": 331},
    "old rope_theta": {"config": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6}},
    "new rope_parameters": {
        "config": {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        }
    },
    "linear rope scaling": {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    "llama3 rope scaling": {"config": {"rope_scaling": LLAMA3_ROPE}},
    "llama3 rope_parameters": {
        "config": {"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}
    },
}


def transformers_logits(source: Path, tokens: list[int]) -> NDArray[np.float32]:
    """Logits [tokens, vocab] of transformers in float32."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (takes seconds to import)

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda name: name.replace(" ", "-"))
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ExportedModel, NDArray[np.float32]]:
    """An export and what transformers says about TOKENS."""
    folder = tmp_path_factory.mktemp("reference")
    source = make_llama_checkpoint(folder / "source", **CHECKPOINTS[request.param])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    model = export_checkpoint(source, folder / "onnx", quantization=FP32)
    return model, transformers_logits(source, TOKENS)


def assert_same(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Equal within 1e-4 of the largest logit."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


def test_one_pass_gives_transformers_logits(
    exported: tuple[ExportedModel, NDArray[np.float32]],
) -> None:
    model, expected = exported
    assert_same(Runner(model).step(TOKENS), expected)


def test_chunks_then_single_tokens_in_place_give_transformers_logits(
    exported: tuple[ExportedModel, NDArray[np.float32]],
) -> None:
    model, expected = exported
    runner = Runner(model)
    steps = [runner.step(TOKENS[:64]), runner.step(TOKENS[64:128], mask_length=192)]
    steps += [runner.step([token], mask_length=192) for token in TOKENS[128:140]]
    steps.append(runner.step(TOKENS[140:]))
    assert_same(np.concatenate(steps), expected)


def test_a_rejected_draft_leaves_no_trace(
    exported: tuple[ExportedModel, NDArray[np.float32]],
) -> None:
    model, expected = exported
    runner = Runner(model)
    runner.step(TOKENS[:100])
    runner.step([(token + 1) % 320 for token in TOKENS[100:108]])
    runner.rewind(100)
    assert_same(runner.step(TOKENS[100:108]), expected[100:108])
