"""Filters keep what they must, and draws follow the weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from specops.request import SamplingParams
from specops.runtime.kernels import mask
from specops.runtime.sampling import draw, draw_seeded, filtered_probs, next_token

LOGITS = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32) * 3


def test_temperature_one_is_softmax() -> None:
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True)
    assert np.allclose(filtered_probs(LOGITS, SamplingParams(1.0)), expected, atol=1e-6)


def test_logits_are_not_changed() -> None:
    before = LOGITS.copy()
    filtered_probs(LOGITS, SamplingParams(0.7, top_k=5, top_p=0.5))
    assert np.array_equal(LOGITS, before)


@pytest.mark.parametrize("top_k", [1, 2, 49, 50, 1000])
def test_top_k_keeps_the_k_most_probable(top_k: int) -> None:
    probs = filtered_probs(LOGITS, SamplingParams(1.0, top_k=top_k))
    for row, logits in zip(probs, LOGITS, strict=True):
        kept = min(top_k, 50)
        assert set(np.flatnonzero(row)) == set(np.argsort(-logits)[:kept])


@given(
    st.floats(0.01, 1.0),
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, logits: list[float]) -> None:
    array = np.array([logits], np.float32)
    before = filtered_probs(array, SamplingParams(1.0))[0]
    after = filtered_probs(array, SamplingParams(1.0, top_p=top_p))[0]
    kept = after > 0
    assert after.sum() == pytest.approx(1.0, abs=1e-5)
    assert before[kept].sum() >= top_p - 1e-5
    least = before[kept].min()
    assert before[kept].sum() - least <= top_p + 1e-5
    assert np.all(before[~kept] <= least)


def plainly_filtered(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The same by sorting everything, in twice the precision."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[probs < probs[order[min(top_k, len(order)) - 1]]] = 0
    probs /= probs.sum()
    if top_p < 1:
        ranked = probs[order]
        probs[order[np.cumsum(ranked) - ranked >= top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [4, 300, 5000])
@pytest.mark.parametrize("top_k", [0, 1, 3, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.99, 0.5])
def test_the_short_way_to_the_top_leads_to_the_same_filter(
    spread: float, vocab: int, top_k: int, top_p: float
) -> None:
    """From peaked to flat, where the short way is none; steps in the logits make ties."""
    rng = np.random.default_rng(7)
    logits = (np.round(rng.standard_normal((2, vocab)) * 8) / 8 * spread).astype(np.float32)
    found = filtered_probs(logits, SamplingParams(1.0, top_k=top_k, top_p=top_p))
    for row, plain in zip(found, logits, strict=True):
        assert np.allclose(row, plainly_filtered(plain, top_k, top_p), rtol=1e-4, atol=1e-30)


def test_a_large_temperature_flattens() -> None:
    assert np.allclose(filtered_probs(LOGITS, SamplingParams(1e6)), 1 / 50, atol=1e-5)


def test_draws_follow_the_weights() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 5.0, 0.0], np.float32)
    rng = np.random.default_rng(0)
    counts = np.bincount([draw(weights, rng) for _ in range(20_000)], minlength=6)
    assert not counts[[0, 2, 5]].any()
    assert chisquare(counts[[1, 3, 4]], 20_000 * np.array([1, 2, 5]) / 8).pvalue > 1e-4


def test_greedy_takes_the_largest_and_no_random_number() -> None:
    rng = np.random.default_rng(0)
    state = rng.bit_generator.state
    assert next_token(LOGITS[1], SamplingParams(0.0), rng, 7) == int(LOGITS[1].argmax())
    assert rng.bit_generator.state == state


def test_a_token_with_a_seed_is_drawn_by_seed_and_position_alone() -> None:
    def tokens(seed: int, first: int, numbers: int) -> list[int]:
        params, rng = SamplingParams(1.0, seed=seed), np.random.default_rng(numbers)
        return [next_token(LOGITS[0], params, rng, first + index) for index in range(50)]

    assert tokens(1, 0, 0) == tokens(1, 0, 9)
    assert tokens(1, 0, 0)[20:] == tokens(1, 20, 0)[:30]
    assert tokens(1, 0, 0) != tokens(2, 0, 0)


def test_without_a_seed_the_requests_random_numbers_decide() -> None:
    def tokens(numbers: int) -> list[int]:
        rng = np.random.default_rng(numbers)
        return [next_token(LOGITS[0], SamplingParams(1.0), rng, 0) for _ in range(50)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("across", ["seeds", "positions", "large seeds"])
def test_seeded_draws_follow_the_weights(across: str) -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 5.0, 0.0], np.float32)
    places = {
        "seeds": lambda index: (index, 3),
        "positions": lambda index: (3, index),
        "large seeds": lambda index: ((1 << 63) - 1 - index, 3),
    }
    drawn = [draw_seeded(weights, *places[across](index)) for index in range(20_000)]
    counts = np.bincount(drawn, minlength=6)
    assert not counts[[0, 2, 5]].any()
    assert chisquare(counts[[1, 3, 4]], 20_000 * np.array([1, 2, 5]) / 8).pvalue > 1e-4


@pytest.mark.parametrize("apart", ["seeds", "positions"])
def test_seeded_draws_beside_each_other_are_independent(apart: str) -> None:
    """Chi-square over pairs of neighbours: shared noise would give equal pairs too often."""
    weights = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    counts = np.zeros((4, 4))
    for index in range(0, 40_000, 2):
        pair = (index, index + 1)
        first, second = (
            draw_seeded(weights, item, 8) if apart == "seeds" else draw_seeded(weights, 8, item)
            for item in pair
        )
        counts[first, second] += 1
    expected = np.outer(weights, weights) / weights.sum() ** 2 * 20_000
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-4


def test_noise_belongs_to_the_token_not_to_its_place_among_those_that_are_left() -> None:
    """Leaving out tokens that were not drawn changes nothing: filters may differ by one."""
    weights = np.random.default_rng(4).random(300).astype(np.float32)
    for seed in range(200):
        drawn = draw_seeded(weights, seed, 0)
        fewer = weights.copy()
        fewer[[index for index in range(0, 300, 7) if index != drawn]] = 0
        assert draw_seeded(fewer, seed, 0) == drawn
        assert draw_seeded(np.append(weights, np.zeros(50, np.float32)), seed, 0) == drawn


def test_similar_distributions_draw_the_same_as_often_as_theory_has_it() -> None:
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
    """With a word to spare, and whatever the number is that is left out."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((3, vocab)).astype(np.float32)
    logits[0, 0] = np.nan
    masks = rng.integers(0, 1 << 32, (3, -(-vocab // 32) + 1), np.uint32)
    masks[2] = 0
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab] == 1
    expected = np.where(bits, logits, -np.inf)
    mask(logits, masks)
    assert np.array_equal(logits, expected, equal_nan=True)


def test_what_is_masked_is_never_drawn() -> None:
    logits = LOGITS[:1].copy()
    masks = np.array([[0b1001, 0b10]], np.uint32)
    mask(logits, masks)
    probs = filtered_probs(logits, SamplingParams(1.0, top_p=0.99))[0]
    assert set(np.flatnonzero(probs)) <= {0, 3, 33}
    assert probs.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_keeps_what_is_near_the_likeliest(min_p: float, temperature: float) -> None:
    free = filtered_probs(LOGITS, SamplingParams(temperature))
    found = filtered_probs(LOGITS, SamplingParams(temperature, min_p=min_p))
    kept = free >= np.float32(min_p) * free.max(axis=-1, keepdims=True)
    assert np.array_equal(found > 0, kept)
    assert np.allclose(found.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("sigmas", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_top_n_sigma_keeps_the_same_at_any_temperature(sigmas: float, temperature: float) -> None:
    """Of the logits; what a grammar has taken out is none of them."""
    logits = LOGITS.copy()
    logits[:, ::7] = -np.inf
    allowed = np.isfinite(logits)
    found = filtered_probs(logits, SamplingParams(temperature, top_n_sigma=sigmas))
    for row, plain, finite in zip(found, logits, allowed, strict=True):
        edge = plain.max() - sigmas * plain[finite].std(dtype=np.float64)
        assert np.array_equal(row > 0, plain >= edge)


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
def test_typical_p_keeps_what_surprises_as_expected(mass: float) -> None:
    free = filtered_probs(LOGITS, SamplingParams(1.0)).astype(np.float64)
    found = filtered_probs(LOGITS, SamplingParams(1.0, typical_p=mass))
    for row, plain in zip(found, free, strict=True):
        off = np.abs(-np.log(plain) + (plain * np.log(plain)).sum())
        kept = row > 0
        assert off[kept].max() <= off[~kept].min()
        assert plain[kept].sum() >= mass - 1e-6
        assert plain[kept].sum() - plain[kept][off[kept].argmax()] < mass
