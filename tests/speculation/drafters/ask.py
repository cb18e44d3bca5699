"""Asking a draft model, with what tests rarely care about filled in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specops.request import SamplingParams
from specops.speculation.drafters.base import Draft, DraftModel, DraftRequest

GREEDY = SamplingParams()


def ask(
    tokens: Sequence[int], count: int, slot: int = 0, sampling: SamplingParams = GREEDY
) -> DraftRequest:
    """A request's part in a call."""
    noise = sampling.seed if sampling.temperature else None
    return DraftRequest(slot, tokens, count, sampling, np.random.default_rng(1), noise)


def propose(
    drafter: DraftModel,
    tokens: Sequence[int],
    count: int,
    slot: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Draft:
    """What a draft model proposes for one slot alone."""
    (draft,) = drafter.propose([ask(tokens, count, slot, sampling)])
    return draft
