"""All kernels sample alike: the same bits of a distribution, the same tokens drawn from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from specops.runtime import kernels


@pytest.fixture(autouse=True)
def best_kernels_afterwards() -> Iterator[None]:
    yield
    kernels.force(None)


def random_logits(vocab: int, spread: float) -> np.ndarray:
    """Rounded, so that some are equal."""
    numbers = np.random.default_rng(vocab).standard_normal((3, vocab))
    return (np.round(numbers * 64) / 64 * spread).astype(np.float32)


@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0])
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1023, 1025, 5000])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.9), (40, 0.5)])
def test_kernels_agree_to_the_bit(vocab: int, spread: float, top_k: int, top_p: float) -> None:
    logits, found = random_logits(vocab, spread), []
    for name in kernels.NAMES:
        kernels.force(name)
        probs = kernels.filtered(logits, temperature=0.7, top_k=top_k, top_p=top_p)
        drawn = [kernels.draw(row, number / 50) for row in probs for number in range(50)]
        raced = [kernels.race(row, seed, 3) for row in probs for seed in range(50)]
        found.append((probs.tobytes(), drawn, raced))
    assert len(found) >= 1
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("vocab", [1, 3, 16, 1024, 3000])
def test_draws_take_the_index_at_which_the_sum_passes(vocab: int) -> None:
    weights = np.random.default_rng(vocab).integers(0, 3, vocab).astype(np.float32)
    weights[vocab // 2] = 1
    bounds = np.cumsum(weights, dtype=np.float64)
    for uniform in np.linspace(0, 1, 301, endpoint=False):
        expected = np.searchsorted(bounds, uniform * bounds[-1], side="right")
        assert kernels.draw(weights, uniform) == expected


def test_what_rounding_leaves_falls_to_the_last_that_weighs() -> None:
    weights = np.zeros(2000, np.float32)
    weights[3], weights[1500] = 0.25, 0.5
    assert kernels.draw(weights, 1.0) == 1500


def test_rows_of_another_order_or_type_are_read_right() -> None:
    logits = random_logits(40, 2.0)
    expected = kernels.filtered(logits, temperature=1.0, top_k=0, top_p=1.0)
    turned = np.asfortranarray(logits.astype(np.float64))
    found = kernels.filtered(turned, temperature=1.0, top_k=0, top_p=1.0)  # type: ignore[arg-type]
    assert np.array_equal(found, expected)
    assert kernels.race(expected[0], 1, 1) == kernels.race(np.repeat(expected, 2, 1)[0, ::2], 1, 1)
