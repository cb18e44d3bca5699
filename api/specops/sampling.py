"""From logits to probabilities to a token, vectorized over positions.

The same filters apply to the target and to the draft, in the order that the transformers library
uses: temperature, top-k, top-p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specops.request import SamplingParams

Floats = npt.NDArray[np.float32]


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
        kth = np.partition(scaled, vocab - params.top_k, axis=-1)[:, vocab - params.top_k]
        scaled[scaled < kth[:, None]] = -np.inf
    probs: Floats = np.exp(scaled, out=scaled)
    probs /= probs.sum(axis=-1, keepdims=True)
    if params.top_p < 1.0:
        probs = _nucleus(probs, params.top_p)
    return probs


def _nucleus(probs: Floats, top_p: float) -> Floats:
    """Keep the smallest set of most probable tokens that holds at least `top_p` together."""
    order = np.argsort(-probs, axis=-1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=-1)
    before = np.cumsum(ranked, axis=-1, dtype=np.float64) - ranked
    ranked[before >= top_p] = 0.0  # never the first: nothing lies before it
    np.put_along_axis(probs, order, ranked, axis=-1)
    probs /= probs.sum(axis=-1, keepdims=True)
    return probs


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
