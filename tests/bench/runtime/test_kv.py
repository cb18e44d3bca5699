"""Kinds of KV cache are compared with fp32 by the distributions that they lead to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.models import BenchModel
from bench.runtime import kv
from bench.runtime.forward import Divergence, divergence, log_softmax, passes
from bench.runtime.kv import Kind
from specops.engine.engine import Engine


def test_divergence_is_that_of_the_two_distributions_and_zero_of_a_distribution_itself() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    p, q = log_softmax(logits), log_softmax(other)
    found = divergence(p, q)
    assert found.kl == pytest.approx([0.25 * np.log(2), 0.0], abs=1e-6)
    assert found.flipped.tolist() == [True, False]
    assert divergence(p, p).kl.tolist() == [0, 0]


def test_the_mean_is_over_positions_and_its_error_over_documents() -> None:
    documents = [
        Divergence(np.array([0.1, 0.3]), np.array([True, False])),
        Divergence(np.array([0.4, 0.4]), np.array([False, False])),
    ]
    figures = Kind(64.0, documents).figures()
    assert figures["mean_kl"] == pytest.approx(0.3)
    assert figures["error"] == pytest.approx(0.1)  # of 0.2 and 0.4
    assert figures["most_kl"] == pytest.approx(0.4)
    assert figures["flipped"] == 0.25


def test_the_logits_do_not_depend_on_the_pass_in_which_they_are_computed(tiny: BenchModel) -> None:
    tokens = [index * 7 % 300 for index in range(100)]  # more than one pass
    runner = Engine.load(replace(tiny.settings, prefix_cache="off")).scheduler.target

    def logits(tokens: list[int]) -> np.ndarray:
        return np.concatenate([part.copy() for part in passes(runner, tokens)])

    whole = logits(tokens)
    assert whole.shape[0] == len(tokens)
    np.testing.assert_array_equal(logits(tokens[:70]), whole[:70])


def test_every_kind_of_cache_is_measured(tiny: BenchModel, tiny_pair: Path) -> None:
    plan = kv.Plan(documents=2, tokens=80)
    outcome = kv.run(tiny, [tiny_pair / "target" / "onnx" / "fp32"], plan)
    found = json.loads(json.dumps(outcome.result))["models"]
    assert set(found) == {"Tiny model", "fp32"}
    for kinds in found.values():
        assert set(kinds) == {"fp32", "fp16", "int8"}
        assert kinds["fp32"]["mean_kl"] == 0
        assert 0 < kinds["fp16"]["mean_kl"] < kinds["int8"]["mean_kl"] < 0.1
        assert kinds["fp16"]["bytes_per_token"] == kinds["fp32"]["bytes_per_token"] / 2
        assert kinds["int8"]["bytes_per_token"] < kinds["fp16"]["bytes_per_token"]
    assert len(outcome.tables[0].rows) == 6
