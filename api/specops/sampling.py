"""From logits to probabilities to a token, vectorized over the vocabulary.

The same filters apply to the target and to the draft, in the order that the transformers library
uses: temperature, top-k, top-p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specops.request import Logprob, SamplingParams

Floats = npt.NDArray[np.float32]

# How far below the largest logit to look before all are looked at. The few hundred that
# matter among 32,000 are near the top; sorting all takes 0.6 ms.
_DEPTHS = (3.0, 6.0, 9.0, 12.0, float("inf"))

_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2^64 by the golden ratio


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


def draw_seeded(probs: Floats, seed: int, position: int) -> int:
    """Draw an index by noise that seed, position and index alone determine.

    An exponential race, which is the Gumbel-max trick: index i arrives after an exponential time
    with rate `probs[i]`, the first one is drawn, and it is each with its probability. Whoever
    draws from a similar distribution at the same position mostly draws the same.

    Args:
        probs: [V] not negative, not all zero; need not sum to 1.
        seed: at least 0; what is above 64 bits does not count.
        position: of the token in its sequence.
    """
    kept = np.flatnonzero(probs > 0)
    return int(kept[(_exponential(seed, position, kept) / probs[kept]).argmin()])


def _exponential(
    seed: int, position: int, indices: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """Exponential noise of rate 1 for each index, of any set of them.

    SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195), whose n-th
    number takes no knowledge of those before it: 200 of 32,000 cost as much as 200.
    """
    start = _mixed(_mixed(np.array([seed & _WORD], np.uint64)) + np.uint64(position))
    words = _mixed(start + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0 or 1
    noise: npt.NDArray[np.float64] = -np.log(uniform)
    return noise


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit over the whole word; sums and products wrap around."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def next_token(
    logits: Floats, params: SamplingParams, rng: np.random.Generator, position: int
) -> int:
    """Choose the token after one position's logits [V].

    Args:
        logits: [V].
        params: how.
        rng: the request's random numbers, for sampling without a seed.
        position: of the token in its sequence, for sampling with one.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    probs = filtered_probs(logits[None], params)[0]
    if params.seed is not None:
        return draw_seeded(probs, params.seed, position)
    return draw(probs, rng)


def logprob(logits: Floats, token: int, top: int) -> Logprob:
    """How probable the model found a token, whatever it was drawn by.

    Args:
        logits: [V] that it was chosen from.
        token: the one that was chosen.
        top: likeliest tokens to tell beside it, at most V.
    """
    likeliest = np.argpartition(logits, -top)[-top:] if top else np.empty(0, np.intp)
    likeliest = likeliest[np.lexsort((likeliest, -logits[likeliest]))]
    largest = logits.max()
    # Summed in double precision: rounding errors of 100,000 terms would show in the last digits.
    log_sum = largest + np.log(np.exp(logits - largest).sum(dtype=np.float64))
    values = [(int(index), float(logits[index] - log_sum)) for index in likeliest]
    return Logprob(float(logits[token] - log_sum), tuple(values))
