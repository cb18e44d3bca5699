"""What weights cost: the figures follow from the logits, and a picture shows them."""

from pathlib import Path

import numpy as np
import pytest

from bench.peers.quality import Text, quality

TEXTS = [Text([5, 1, 2, 0], 1), Text([0, 3, 3], 0)]  # an answer of two tokens, and a document


def logits(odds: list[list[float]]) -> np.ndarray:
    return np.log(np.array(odds, np.float32)) + np.float32(3)  # a constant changes nothing


def test_quality_is_that_of_answers_and_bits_are_those_of_documents(tmp_path: Path) -> None:
    plain, sure = [0.25] * 4, [0.1, 0.2, 0.6, 0.1]
    files = tmp_path / "expected", tmp_path / "found"
    # Of each text the logits from its `first` on; the last token's are not used.
    logits([sure, plain, sure, plain, plain, sure]).tofile(files[0])
    logits([sure, sure, plain, [0.125, 0.25, 0.125, 0.5], plain, sure]).tofile(files[1])
    found = quality(*files, TEXTS, answers=1, nbytes=4)
    expected = np.mean([0, 0.25 * np.log(0.25**4 / np.prod(sure))])
    assert found.kl == pytest.approx(expected, rel=1e-5)
    assert found.agreement == 0.5
    assert found.bits_per_byte == pytest.approx((1 + 2) / 4, rel=1e-5)
