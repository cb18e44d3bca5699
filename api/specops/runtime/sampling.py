"""From logits to probabilities to a token.

The same filters apply to the target and to the draft: temperature and top-n-sigma, then in the
order that the transformers library uses: top-k, top-p, min-p, typical-p. The kernels do the
arithmetic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specops.request import Logprob, SamplingParams
from specops.runtime import kernels

Floats = npt.NDArray[np.float32]

_WORD = (1 << 64) - 1


def filtered_probs(logits: Floats, params: SamplingParams) -> Floats:
    """The distribution that a token is drawn from.

    Args:
        logits: [S, V].
        params: a temperature above 0; greedy decoding draws from no distribution.

    Returns:
        [S, V] probabilities, each row sums to 1.
    """
    probs = kernels.filtered(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        top_n_sigma=params.top_n_sigma,
    )
    if params.typical_p < 1:
        for row in probs:
            _keep_typical(row, params.typical_p)
    return probs


def _keep_typical(probs: Floats, mass: float) -> None:
    """Keep the tokens whose surprise is nearest to the expected one, until they hold the mass.

    Locally typical sampling (Meister et al. 2023, https://arxiv.org/abs/2202.00666).
    """
    (tokens,) = probs.nonzero()
    kept = probs[tokens].astype(np.float64)
    surprise = -np.log(kept)
    order = np.argsort(np.abs(surprise - kept @ surprise), kind="stable")
    held = np.cumsum(kept[order])
    last = int(np.searchsorted(held, mass * held[-1]))
    probs[tokens[order[last + 1 :]]] = 0
    probs /= probs.sum(dtype=np.float64)


def draw(weights: Floats, rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to its weight.

    Args:
        weights: [V] not negative, not all zero; need not sum to 1.
        rng: one uniform number is taken from it.
    """
    return kernels.draw(weights, rng.random())


def draw_seeded(probs: Floats, seed: int, position: int) -> int:
    """Draw an index by noise that seed, position and index alone determine.

    An exponential race, which is the Gumbel-max trick: index i arrives after an exponential time
    with rate `probs[i]`, the first one is drawn, and it is each with its probability. A draft
    model with a similar distribution at the same position mostly draws the same.

    Args:
        probs: [V] not negative, not all zero; need not sum to 1.
        seed: at least 0; what is above 64 bits does not count.
        position: of the token in its sequence.
    """
    return kernels.race(probs, seed & _WORD, position)


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
