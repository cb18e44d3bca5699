"""What weights cost: the figures follow from the logits, and a picture shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.peers.compare import OURS, Measured
from bench.peers.models import LLAMA_CPP
from bench.peers.quality import FULL, Quality, Text, outcome, quality
from bench.tools.plots import save
from bench.tools.quiet import Turns

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


def test_a_row_for_each_kind_and_a_point_in_the_picture(tmp_path: Path) -> None:
    kinds = {OURS: Quality(0.0, 1.0, 1.2), LLAMA_CPP: Quality(0.01, 0.97, 1.3)}
    ms = {OURS: [2.0, 2.0], LLAMA_CPP: [4.0, 5.0]}
    turns = Turns(ms={"1 token": ms, "prompt of 512": ms})
    measured = Measured(FULL, turns, {OURS: "onnxruntime", LLAMA_CPP: "llama"})
    found = outcome("model", kinds, measured)
    assert [row[0] for row in found.tables[0].rows] == [OURS, LLAMA_CPP]
    assert any("2.25" in note and LLAMA_CPP in note for note in found.tables[0].notes)
    assert [series.across for series in found.charts[0].series] == [[2.0], [4.5]]
    assert save(tmp_path / "quality", found.charts).stat().st_size
