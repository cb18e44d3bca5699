"""Logits of whole texts, and how far two models' logits are apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.runtime.forward import divergence, log_softmax, passes
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.runtime.model_runner import ModelRunner

TOKENS = [index * 7 % 300 for index in range(100)]  # more than one pass


def runner(settings: Settings, **changed: str) -> ModelRunner:
    plain = replace(settings, draft=NO_DRAFTER, prefix_cache="off", **changed)
    return Engine.load(plain).scheduler.target


def logits(runner: ModelRunner, tokens: list[int]) -> np.ndarray:
    return np.concatenate([part.copy() for part in passes(runner, tokens)])


def test_divergence_is_that_of_the_two_distributions_and_zero_of_a_distribution_itself() -> None:
    one = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    p, q = log_softmax(one), log_softmax(other)
    found = divergence(p, q)
    assert found.kl == pytest.approx([0.25 * np.log(2), 0.0], abs=1e-6)
    assert found.flipped.tolist() == [True, False]
    assert divergence(p, p).kl.tolist() == [0, 0]


def test_the_logits_do_not_depend_on_the_pass_in_which_they_are_computed(
    tiny_settings: Settings,
) -> None:
    target = runner(tiny_settings)
    whole = logits(target, TOKENS)
    assert whole.shape[0] == len(TOKENS)
    np.testing.assert_array_equal(logits(target, TOKENS[:70]), whole[:70])


@pytest.mark.parametrize("quant", ["fp32", "int8-128"])
def test_a_smaller_cache_moves_the_distributions_a_little_and_int8_more_than_fp16(
    tiny_settings: Settings, quant: str
) -> None:
    runners = {
        dtype: runner(tiny_settings, kv_dtype=dtype, quant=quant)
        for dtype in ("fp32", "fp16", "int8")
    }
    logs = {dtype: log_softmax(logits(target, TOKENS)) for dtype, target in runners.items()}
    kl = {dtype: divergence(logs["fp32"], found).kl.mean() for dtype, found in logs.items()}
    assert 0 == kl["fp32"] < kl["fp16"] < kl["int8"] < 0.1
    size = {dtype: target.cache.shape.bytes_per_token for dtype, target in runners.items()}
    assert size["fp16"] == size["fp32"] / 2
    assert size["int8"] < size["fp16"]
