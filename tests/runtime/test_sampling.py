"""Filters keep the right tokens, draws follow the weights, and all kernels agree to the bit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from specops.request import SamplingParams
from specops.runtime import kernels
from specops.runtime.sampling import draw, draw_seeded, filtered_probs, logprob, mask
from tests.option_costs import DRAWN, costs
from tests.runtime.kernels.operators import covering

LOGITS = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32) * 3


def uniform(number: float) -> Any:
    """A generator that gives this number."""
    return SimpleNamespace(random=lambda: number)


def plainly_filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[V] probabilities by sorting everything, in twice the precision."""
    temperature, top_k = np.float64(params.temperature), params.top_k
    probs = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    if top_k:
        probs[probs < np.sort(probs)[-min(top_k, len(probs))]] = 0
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        ranked = probs[order] / probs.sum()
        probs[order[np.cumsum(ranked) - ranked >= params.top_p]] = 0
    probs[probs < np.float32(params.min_p)] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("spread", "vocab", "forbidden", "temperature", "filters"),
    covering(
        [0.01, 1.0, 3.0, 30.0],
        [4, 300, 5000],
        [False, True],
        [0.5, 1.0, 3.0],
        [
            {},
            *({"top_k": number} for number in (1, 3, 200)),
            *({"top_p": share} for share in (0.99, 0.5)),
            *({"min_p": share} for share in (0.02, 0.5, 1.0)),
            *({"top_k": number, "top_p": share} for number in (3, 200) for share in (0.99, 0.5)),
            {"top_k": 200, "top_p": 0.9, "min_p": 0.1},
        ],
    ),
)
def test_filters_are_those_of_sorting_everything(
    *, spread: float, vocab: int, forbidden: bool, temperature: float, filters: dict[str, Any]
) -> None:
    """From flat to peaked distributions; steps make ties, and a grammar forbids tokens."""
    rng = np.random.default_rng(7)
    logits = (np.round(rng.standard_normal((2, vocab)) * 8) / 8 * spread).astype(np.float32)
    logits[1, 1::3] = -np.inf if forbidden else 0
    before, params = logits.copy(), SamplingParams(temperature, **filters)
    found = filtered_probs(logits, params)
    assert np.array_equal(logits, before)
    for row, plain in zip(found, logits, strict=True):
        expected = plainly_filtered(plain, params)
        assert np.allclose(row, expected, rtol=1e-4, atol=1e-30)
        assert np.array_equal(row > 1e-30, expected > 1e-30)


@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0])
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1023, 1025, 5000])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 7}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.1}],
    ids=str,
)
def test_kernels_agree_to_the_bit(vocab: int, spread: float, filters: dict[str, Any]) -> None:
    numbers = np.round(np.random.default_rng(vocab).standard_normal((3, vocab)) * 64) / 64
    logits, found = (numbers * spread).astype(np.float32), set()
    for name in kernels.NAMES:
        kernels.force(name)
        probs = filtered_probs(logits, SamplingParams(0.7, **filters))
        drawn = [draw(row, uniform(number / 50)) for row in probs for number in range(50)]
        raced = [draw_seeded(row, seed, 3) for row in probs for seed in range(50)]
        told = [logprob(row, 0, min(20, vocab)) for row in logits]
        found.add((probs.tobytes(), *drawn, *raced, *told))
    assert len(found) == 1


@pytest.mark.parametrize("vocab", [1, 3, 16, 1024, 3000])
def test_a_draw_takes_the_index_at_which_the_sum_passes(vocab: int) -> None:
    weights = np.random.default_rng(vocab).integers(0, 3, vocab).astype(np.float32)
    weights[vocab // 2] = 1
    bounds = np.cumsum(weights, dtype=np.float64)
    for number in np.linspace(0, 1, 301, endpoint=False):
        expected = np.searchsorted(bounds, number * bounds[-1], side="right")
        assert draw(weights, uniform(number)) == expected


def test_rounding_errors_go_to_the_last_index_with_a_weight() -> None:
    weights = np.zeros(2000, np.float32)
    weights[3], weights[1500] = 0.25, 0.5
    assert draw(weights, uniform(1.0)) == 1500


def test_arrays_of_another_order_or_type_are_read_right() -> None:
    expected = filtered_probs(LOGITS, SamplingParams(1.0))
    turned: Any = np.asfortranarray(LOGITS.astype(np.float64))
    assert np.array_equal(filtered_probs(turned, SamplingParams(1.0)), expected)
    assert draw_seeded(expected[0], 1, 1) == draw_seeded(np.repeat(expected, 2, 1)[0, ::2], 1, 1)


@pytest.mark.parametrize(
    "pair",
    [lambda index: (index, 8), lambda index: (8, index), lambda index: ((1 << 63) - 1 - index, 3)],
)
def test_seeded_draws_are_independent_and_follow_the_weights(
    pair: Callable[[int], tuple[int, int]],
) -> None:
    """Chi-square over pairs of neighbouring seeds, or positions."""
    weights = np.array([0.0, 2.0, 3.0, 0.0, 5.0], np.float32)
    drawn = [draw_seeded(weights, *pair(index)) for index in range(40_000)]
    counts = np.zeros((5, 5))
    np.add.at(counts, (drawn[::2], drawn[1::2]), 1)
    shares = np.outer(weights, weights)[weights > 0][:, weights > 0] / weights.sum() ** 2
    seen = counts[weights > 0][:, weights > 0]
    assert seen.sum() == 20_000
    assert chisquare(seen.ravel(), shares.ravel() * 20_000).pvalue > 1e-4


def test_noise_depends_on_the_token_and_not_on_the_other_tokens() -> None:
    """A draw stays the same when a filter drops tokens that were not drawn."""
    weights = np.random.default_rng(4).random(300).astype(np.float32)
    for seed in range(200):
        drawn = draw_seeded(weights, seed, 0)
        fewer = weights.copy()
        fewer[[index for index in range(0, 300, 7) if index != drawn]] = 0
        assert draw_seeded(fewer, seed, 0) == drawn
        assert draw_seeded(np.append(weights, np.zeros(50, np.float32)), seed, 0) == drawn


def test_similar_distributions_draw_the_same_token_as_often_as_theory_says() -> None:
    """Sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i): the race's share of equal draws.

    Daliri, Musco and Suresh 2024, https://arxiv.org/abs/2408.07978; at least (1 - d) / (1 + d).
    """
    rng = np.random.default_rng(1)
    first, second = (rng.dirichlet(np.ones(8)).astype(np.float32) for _ in range(2))
    seeds, ratio = 20_000, np.maximum(first / first[:, None], second / second[:, None])
    expected = float((1 / ratio.sum(axis=1)).sum())
    equal = sum(
        draw_seeded(first, seed, 0) == draw_seeded(second, seed, 0) for seed in range(seeds)
    )
    distance = np.abs(first - second).sum() / 2
    assert (1 - distance) / (1 + distance) < expected < 1 - distance
    assert abs(equal / seeds - expected) < 4 * (expected * (1 - expected) / seeds) ** 0.5


@pytest.mark.parametrize("vocab", [1, 15, 32, 33, 49152, 50003])
def test_a_mask_leaves_the_logits_of_its_bits(vocab: int) -> None:
    """Masks may have a word more than needed; NaN is masked as well."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((3, vocab)).astype(np.float32)
    logits[0, 0] = np.nan
    masks = rng.integers(0, 1 << 32, (3, -(-vocab // 32) + 1), np.uint32)
    masks[2] = 0
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab] == 1
    expected = np.where(bits, logits, -np.inf)
    mask(logits, masks)
    assert np.array_equal(logits, expected, equal_nan=True)


def test_no_option_takes_far_longer_than_to_draw_a_token_at_all() -> None:
    """All requests of a pass wait for the options of each; sorting the vocabulary took 360 times.

    `python -m tests.option_costs` prints the times.
    """
    found = costs(1 << 15, 1)
    assert {name for name, seconds in found.items() if seconds > 25 * found[DRAWN]} == set()


def test_the_least_temperature_draws_the_likeliest_token() -> None:
    (probs,) = filtered_probs(np.array([[1.0, 3.0, 2.0]], np.float32), SamplingParams(5e-324))
    assert probs.tolist() == [0, 1, 0]
