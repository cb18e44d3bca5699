"""What quantization costs in perplexity, on the demo target and text it was never trained on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from specops.models.convert import Quantization, export_checkpoint
from tests.models.convert.runner import Runner
from training.corpus import DEMO_DIR, read_held_out

TARGET = DEMO_DIR / "target"
WINDOW = 256  # tokens of context at most; each window starts afresh
TOKENS_PER_DOCUMENT = 300

pytestmark = pytest.mark.skipif(
    not (TARGET / "config.json").is_file(),
    reason=f"the demo target is not at {TARGET}; `make train` makes it",
)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    """The beginning of every other held-out document, in windows of a token more than count."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    documents = [tokenizer.encode(document.text).ids for document in read_held_out()[::2]]
    beginnings = [ids[:TOKENS_PER_DOCUMENT] for ids in documents]
    return [
        ids[start : start + WINDOW + 1]
        for ids in beginnings
        for start in range(0, len(ids) - 1, WINDOW)
    ]


def perplexity(windows: list[list[int]], quantization: str, folder: Path) -> float:
    """exp of the mean negative log-likelihood of every token given those before it."""
    model = export_checkpoint(TARGET, folder, quantization=Quantization.parse(quantization))
    runner = Runner(model, capacity=WINDOW)
    losses = []
    for window in windows:
        runner.rewind(0)
        logits = runner.step(window[:-1]).astype(np.float64)
        normalizers = np.logaddexp.reduce(logits, axis=-1)
        losses.append(normalizers - logits[np.arange(len(logits)), window[1:]])
    return math.exp(np.concatenate(losses).mean())


@pytest.fixture(scope="module")
def exact(windows: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> float:
    """Perplexity in fp32."""
    return perplexity(windows, "fp32", tmp_path_factory.mktemp("fp32") / "onnx")


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [
        ("int8-32", 0.01),
        ("int8-128", 0.01),
        ("int4-32-rtn", 0.05),
        ("int4-128-rtn", 0.05),
    ],
)
def test_perplexity_on_held_out_text_stays_close_to_fp32(
    windows: list[list[int]], exact: float, tmp_path: Path, quantization: str, tolerance: float
) -> None:
    quantized = perplexity(windows, quantization, tmp_path / "onnx")
    assert abs(quantized / exact - 1) < tolerance
