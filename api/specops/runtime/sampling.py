"""From logits to probabilities to a token; the kernels do the arithmetic (`kernels/sampling.h`).

Target and draft model use the same filters, in the order of the transformers library: temperature,
top-k, top-p and min-p.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specops.request import Logprob, SamplingParams
from specops.runtime.kernels import Filter, library

Floats = npt.NDArray[np.float32]

_MIN_TEMPERATURE = 1e-9  # in float32, a lower one would be 0 and divide 0 by 0
_NOT_FINITE = -2  # a status code of the kernel
_WORD = (1 << 64) - 1


class NotFinite(ArithmeticError):  # noqa: N818 - named as what it says
    """A model computed NaN or infinity; the message says what to do."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed NaN or infinity: its weights are damaged, or they need a larger "
            "range than they are stored in; download the model again"
        )


def address(array: npt.NDArray[Any]) -> int:
    """Address of a contiguous, writable array. (`array.ctypes.data` takes four times as long.)"""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def filtered_probs(logits: Floats, params: SamplingParams, out: Floats | None = None) -> Floats:
    """The distribution from which a token is drawn.

    Args:
        logits: [S, V].
        params: filters and a temperature above 0; greedy decoding needs no distribution.
        out: [S, V], contiguous, receives the result; None: a new array.

    Returns:
        [S, V] probabilities; each row sums to 1.

    Raises:
        MemoryError: there is no memory for the filters, a few arrays of V numbers.
        NotFinite: a logit is NaN or infinite, or all are -inf.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    probs = np.empty_like(logits) if out is None else out
    temperature = max(_MIN_TEMPERATURE, params.temperature)
    by = Filter(temperature, params.top_k, params.top_p, params.min_p)
    if status := library.specops_filter(address(logits), *logits.shape, by, address(probs)):
        raise NotFinite if status == _NOT_FINITE else MemoryError("out of memory while sampling")
    return probs


def likeliest(logits: Floats) -> int:
    """The index of the largest of logits [V].

    Raises:
        NotFinite: a logit is NaN or infinite, or all are -inf.
    """
    index = int(logits.argmax())  # a NaN counts as the largest
    if not math.isfinite(logits[index]):
        raise NotFinite
    return index


def mask(logits: Floats, masks: npt.NDArray[np.uint32]) -> None:
    """Set logits to -inf where the token's bit is 0.

    Args:
        logits: [S, V], contiguous.
        masks: [S, W], contiguous, with W * 32 >= V: token i has bit i % 32 of word i // 32.
    """
    library.specops_mask(address(logits), *logits.shape, address(masks), masks.shape[1])


def draw(weights: Floats, rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to its weight.

    Args:
        weights: [V], not negative, not all zero; they need not sum to 1.
        rng: provides one uniform number.
    """
    weights = np.ascontiguousarray(weights, np.float32)
    index: int = library.specops_draw(address(weights), len(weights), rng.random())
    return index


def draw_seeded(probs: Floats, seed: int, position: int) -> int:
    """Draw an index with noise that depends only on seed, position and index.

    This is the Gumbel-max trick, as a race: index i arrives after an exponential time with rate
    `probs[i]`, and the first one wins. A draft model with a similar distribution mostly draws the
    same token at the same position.

    Args:
        probs: [V], not negative, not all zero; they need not sum to 1.
        seed: at least 0; only the lowest 64 bits count.
        position: position of the token in its sequence.
    """
    probs = np.ascontiguousarray(probs, np.float32)
    index: int = library.specops_gumbel_argmax(address(probs), len(probs), seed & _WORD, position)
    return index


def logprob(logits: Floats, token: int, top: int, tokens: Sequence[int] = ()) -> Logprob:
    """The model's log probability of a token, before any filter.

    Args:
        logits: [V], from which the token was chosen.
        token: the chosen token.
        top: number of most likely tokens to report as well, at most V.
        tokens: tokens to report with the chosen one, instead of the most likely.

    Raises:
        NotFinite: a logit is NaN or infinite, or all are -inf.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    top = 0 if tokens else top
    indices = (ctypes.c_int64 * top)()
    log_sum: float = library.specops_top(address(logits), len(logits), top, indices)
    if math.isnan(log_sum):
        raise NotFinite
    told = dict.fromkeys((token, *tokens)) if tokens else indices
    values = tuple((index, float(logits[index]) - log_sum) for index in told)
    return Logprob(float(logits[token]) - log_sum, values)


def drawn_logprob(logits: Floats, token: int, top: int, params: SamplingParams | None) -> Logprob:
    """The log probability of drawing a token, and of drawing the most likely tokens.

    Args:
        logits, token, top: see `logprob`; the logits are those after penalties and masks.
        params: parameters of the draw; None: the token was forced.

    Raises:
        MemoryError, NotFinite: see `filtered_probs`.
    """
    if params is None or not params.temperature:
        return Logprob(0.0, ((token, 0.0),))
    with np.errstate(divide="ignore"):
        told = logprob(np.log(filtered_probs(logits[None], params)[0]), token, top)
    return Logprob(told.chosen, tuple(item for item in told.top if item[1] > -math.inf))
