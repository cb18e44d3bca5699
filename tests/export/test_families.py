"""Every family computes what transformers computes, in every form the decoder runs it.

Checkpoints have random weights and the true architecture's proportions, in small.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from specops.decoder import Decoder
from specops.exactness import exact_align
from specops.export import ExportedModel, Quantization, export_checkpoint
from specops.session import open_session, share_threads
from tests.checkpoints import (
    make_gpt2_checkpoint,
    make_llama_checkpoint,
    make_opt_checkpoint,
    make_phi3_checkpoint,
    make_qwen2_checkpoint,
)
from tests.conftest import THREADS

VOCAB = 320
CAPACITY = 192
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, VOCAB, 150)]
OTHER_TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 60)]

Make = Callable[..., Path]
Float = NDArray[np.float32]


class Case(NamedTuple):
    """A maker of checkpoints and what it is asked for."""

    make: Make
    options: dict[str, Any]


CASES = {
    "llama attention biases": Case(make_llama_checkpoint, {"config": {"attention_bias": True}}),
    "llama all biases": Case(
        make_llama_checkpoint,
        {"dtype": "bfloat16", "config": {"attention_bias": True, "mlp_bias": True}},
    ),
    "qwen2": Case(make_qwen2_checkpoint, {}),
    "qwen2 0.5b": Case(
        make_qwen2_checkpoint, {"hidden": 112, "heads": 7, "kv_heads": 1, "ffn": 152}
    ),
    "qwen2 untied": Case(make_qwen2_checkpoint, {"tie": False, "dtype": "bfloat16"}),
    "phi3 mini": Case(make_phi3_checkpoint, {"hidden": 96, "heads": 1, "kv_heads": 1, "ffn": 256}),
    "phi3 medium": Case(make_phi3_checkpoint, {"heads": 4, "kv_heads": 2, "dtype": "bfloat16"}),
    "phi3 no window": Case(make_phi3_checkpoint, {"window": None}),
    "phi3 window of 40": Case(make_phi3_checkpoint, {"window": 40}),
    "phi3 window of 1": Case(make_phi3_checkpoint, {"window": 1}),
    "phi3 partial rotary": Case(
        make_phi3_checkpoint,
        {"hidden": 128, "heads": 2, "kv_heads": 2, "config": {"partial_rotary_factor": 0.75}},
    ),
    "opt 125m": Case(make_opt_checkpoint, {}),
    "opt 350m": Case(make_opt_checkpoint, {"projection": 32, "norm_before": False}),
    "opt norms last": Case(make_opt_checkpoint, {"norm_before": False}),
    "opt 1.3b": Case(
        make_opt_checkpoint, {"hidden": 96, "heads": 3, "ffn": 384, "dtype": "float16"}
    ),
    "opt untied": Case(make_opt_checkpoint, {"tie": False}),
    "opt without prefix": Case(make_opt_checkpoint, {"prefix": ""}),
    "gpt2 untied": Case(make_gpt2_checkpoint, {"tie": False, "prefix": "transformer."}),
    "gpt2": Case(make_gpt2_checkpoint, {}),
    "gpt2 with its head": Case(make_gpt2_checkpoint, {"prefix": "transformer."}),
    "gpt2 odd widths": Case(
        make_gpt2_checkpoint, {"hidden": 80, "heads": 5, "config": {"n_inner": 147}}
    ),
    "distilgpt2": Case(make_gpt2_checkpoint, {"layers": 3, "dtype": "float16"}),
}


def export(folder: Path, quantization: str) -> ExportedModel:
    """Exports the checkpoint `source` in a folder to its neighbour."""
    quant = Quantization.parse(quantization)
    return export_checkpoint(folder / "source", folder / quantization, quantization=quant)


def open_decoder(model: ExportedModel, *, rows: int = 3, whole_scores: bool = False) -> Decoder:
    share_threads(THREADS)
    session = open_session(model.graph_file, whole_scores=whole_scores)
    return Decoder(session, rows=rows, capacity=CAPACITY, max_width=len(TOKENS))


def transformers_logits(source: Path, tokens: list[int]) -> Float:
    """Logits [tokens, vocab] of transformers in float32."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (takes seconds to import)

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Float = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def assert_same(actual: Float, expected: Float) -> None:
    """Equal within 1e-4 of the largest logit."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


class Reference(NamedTuple):
    """An fp32 export and what transformers says about both texts."""

    model: ExportedModel
    logits: Float
    other_logits: Float


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `source` is the case's checkpoint."""
    path = tmp_path_factory.mktemp("family")
    case = CASES[request.param]
    case.make(path / "source", vocab=VOCAB, **case.options)
    return path


@pytest.fixture(params=[False, True], ids=["tiles", "whole-scores"])
def whole_scores(request: pytest.FixtureRequest) -> bool:
    """Both ways in which attention may be computed."""
    whole: bool = request.param
    return whole


@pytest.fixture(scope="module")
def fp32(folder: Path) -> ExportedModel:
    return export(folder, "fp32")


@pytest.fixture(scope="module")
def reference(fp32: ExportedModel, folder: Path) -> Reference:
    texts = (TOKENS, OTHER_TOKENS)
    return Reference(fp32, *(transformers_logits(folder / "source", text) for text in texts))


@pytest.mark.reference
def test_one_pass_gives_transformers_logits(reference: Reference, whole_scores: bool) -> None:
    assert_same(
        open_decoder(reference.model, whole_scores=whole_scores).extend(0, TOKENS), reference.logits
    )


@pytest.mark.reference
def test_chunks_then_single_tokens_give_transformers_logits(
    reference: Reference, whole_scores: bool
) -> None:
    decoder = open_decoder(reference.model, whole_scores=whole_scores)
    steps = [decoder.extend(1, TOKENS[start : start + 32]).copy() for start in range(0, 128, 32)]
    steps += [decoder.decode(1, [token]).copy() for token in TOKENS[128:140]]
    steps.append(decoder.extend(1, TOKENS[140:]).copy())
    assert_same(np.concatenate(steps), reference.logits)


@pytest.mark.reference
def test_ragged_rows_give_transformers_logits(reference: Reference, whole_scores: bool) -> None:
    """Rows of 100, 3 and 50 tokens go on together, one token each."""
    decoder = open_decoder(reference.model, whole_scores=whole_scores)
    starts = (100, 3, 50)
    texts = (TOKENS, TOKENS, OTHER_TOKENS)
    expected = (reference.logits, reference.logits, reference.other_logits)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        decoder.extend(row, text[:start])
    for step in range(8):
        tokens = [text[start + step] for text, start in zip(texts, starts, strict=True)]
        logits = decoder.decode(0, tokens)
        for row, start in enumerate(starts):
            assert_same(logits[row], expected[row][start + step])


@pytest.mark.reference
def test_a_rejected_guess_leaves_no_trace(reference: Reference, whole_scores: bool) -> None:
    decoder = open_decoder(reference.model, whole_scores=whole_scores)
    decoder.extend(0, TOKENS[:100])
    decoder.extend(0, [(token + 1) % VOCAB for token in TOKENS[100:108]])
    decoder.cache.truncate(0, 100)
    assert_same(decoder.extend(0, TOKENS[100:108]), reference.logits[100:108])


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [
        ("int8-32", 0.05),
        ("int8-128", 0.05),
        ("int4-32", 0.4),
        ("int4-128", 0.4),
        ("int4-32-zp", 0.4),
    ],
)
def test_quantized_logits_stay_close_to_fp32(
    fp32: ExportedModel, folder: Path, quantization: str, tolerance: float
) -> None:
    expected = open_decoder(fp32).extend(0, TOKENS)
    actual = open_decoder(export(folder, quantization)).extend(0, TOKENS)
    assert np.linalg.norm(actual - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("quantization", ["int8-128", "int4-128", "int4-32", "int4-128-zp"])
def test_logits_have_the_same_bits_however_passes_are_cut(
    folder: Path, quantization: str, whole_scores: bool
) -> None:
    """What exact speculation rests on, also where a window has moved past the first tokens."""
    decoder = open_decoder(export(folder, quantization), whole_scores=whole_scores)
    align = exact_align(decoder)
    if align is None:
        pytest.skip("this processor's kernels round differently")
    tokens = TOKENS[:96]
    whole = decoder.extend(0, tokens).copy()
    parts, start = [], 0
    for width in cycle((align, 3 * align, 1, 2 * align, 5)):
        parts.append(decoder.extend(1, tokens[start : start + width], align=align).copy())
        start += width
        if start >= len(tokens):
            break
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("make", [make_gpt2_checkpoint, make_opt_checkpoint])
def test_learned_positions_are_an_input_and_a_layer_is_eight_nodes(
    tmp_path: Path, make: Make
) -> None:
    source = make(tmp_path / "source")
    model = export_checkpoint(source, tmp_path / "onnx", quantization=Quantization.parse("int8-32"))
    graph = onnx.load(model.graph_file, load_external_data=False).graph
    inputs = [value.name for value in graph.input if not value.name.startswith("past_")]
    assert inputs == ["input_ids", "attention_mask", "logits_start", "position_ids"]
    nodes = [node.op_type for node in graph.node if node.op_type != "Slice"]
    block = [
        "SkipLayerNormalization",
        "MatMulNBits",
        "GroupQueryAttention",
        "MatMulNBits",
        "SkipLayerNormalization",
        "MatMulNBits",
        "FastGelu" if make is make_gpt2_checkpoint else "Relu",
        "MatMulNBits",
    ]
    end = [*block, *block, "SkipLayerNormalization", "MatMulNBits"]
    assert nodes[-len(end) :] == end
