"""Asking a drafter, with what tests rarely care about filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from specops.decoder import Decoder
from specops.drafters.base import Draft, Drafter
from specops.request import SamplingParams

GREEDY = SamplingParams()


def propose(
    drafter: Drafter,
    tokens: Sequence[int],
    count: int,
    row: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Draft:
    return drafter.propose(row, tokens, count, sampling, np.random.default_rng(1))


@contextmanager
def counted(decoder: Decoder) -> Iterator[list[int]]:
    """The number of tokens in each pass that the decoder makes meanwhile."""
    fed: list[int] = []
    extend = decoder.extend

    def counting(row: int, tokens: Sequence[int], *, logits: int | None = None) -> object:
        fed.append(len(tokens))
        return extend(row, tokens, logits=logits)

    decoder.extend = counting  # type: ignore[method-assign, assignment]
    try:
        yield fed
    finally:
        decoder.extend = extend  # type: ignore[method-assign]
