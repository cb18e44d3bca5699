"""From logits to probabilities to a token, vectorized over the vocabulary.

The same filters apply to the target and to the draft, in the order that the transformers library
uses: temperature, top-k, top-p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specops.request import SamplingParams

Floats = npt.NDArray[np.float32]

# How far below the largest logit to look before all are looked at. The few hundred that
# matter among 32,000 are near the top; sorting all takes 0.6 ms.
_DEPTHS = (3.0, 6.0, 9.0, 12.0, float("inf"))


def filtered_probs(logits: Floats, params: SamplingParams) -> Floats:
    """The distribution that a token is drawn from.

    Args:
        logits: [S, V].
        params: a temperature above 0; greedy decoding draws from no distribution.

    Returns:
        [S, V] probabilities, each row sums to 1.
    """
    scaled = logits / np.float32(params.temperature)
    scaled -= scaled.max(axis=-1, keepdims=True)
    vocab = scaled.shape[-1]
    if 0 < params.top_k < vocab:
        for row in scaled:
            row[row < _kth_largest(row, params.top_k)] = -np.inf
    probs: Floats = np.exp(scaled, out=scaled)
    probs /= probs.sum(axis=-1, keepdims=True)
    if params.top_p < 1.0:
        for row in probs:
            _keep_nucleus(row, params.top_p)
    return probs


def _kth_largest(scaled: Floats, k: int) -> np.float32:
    """The k-th largest of [V] logits of which the largest is 0."""
    for depth in _DEPTHS:
        near = scaled[scaled >= -depth]
        if len(near) >= k:
            break
    kth: np.float32 = np.partition(near, len(near) - k)[len(near) - k]
    return kth


def _keep_nucleus(probs: Floats, top_p: float) -> None:
    """Keep the smallest set of most probable tokens that holds at least `top_p` together.

    Args:
        probs: [V], written to; what is kept sums to 1.
    """
    for depth in _DEPTHS:
        ranked = np.sort(probs[probs >= probs.max() * np.exp(-depth)])[::-1]
        if ranked.sum(dtype=np.float64) >= top_p:  # so no token beyond these is in it
            break
    before = np.cumsum(ranked, dtype=np.float64) - ranked
    count = np.count_nonzero(before < top_p)  # never 0: nothing lies before the first
    kept = np.flatnonzero(probs >= ranked[count - 1])
    if len(kept) > count:  # of equally probable ones the first stay
        kept = np.delete(
            kept, np.flatnonzero(probs[kept] == ranked[count - 1])[count - len(kept) :]
        )
    weights = probs[kept]
    probs[:] = 0.0
    probs[kept] = weights / weights.sum()


def draw(weights: Floats, rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to its weight.

    Args:
        weights: [V] not negative, not all zero; need not sum to 1.
        rng: one uniform number is taken from it.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return min(index, len(weights) - 1)


def next_token(logits: Floats, params: SamplingParams, rng: np.random.Generator) -> int:
    """Choose the token after one position's logits [V]."""
    if params.temperature == 0:
        return int(logits.argmax())
    return draw(filtered_probs(logits[None], params)[0], rng)
