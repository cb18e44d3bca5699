"""Asking a drafter, with what tests rarely care about filled in."""

from collections.abc import Sequence

import numpy as np

from specops.request import SamplingParams
from specops.speculation.drafters.base import Draft, DraftContext, Drafter

GREEDY = SamplingParams()


def ask(
    tokens: Sequence[int],
    count: int,
    slot: int = 0,
    sampling: SamplingParams = GREEDY,
    **fields: object,
) -> DraftContext:
    """A request's part in a call; it is not adaptive."""
    noise = sampling.seed if sampling.temperature else None
    given = {"sampling": sampling, "noise": noise, "adaptive": False, **fields}
    return DraftContext(slot, tokens, count, np.random.default_rng(1), **given)  # type: ignore[arg-type]


def propose(
    drafter: Drafter, tokens: Sequence[int], count: int, slot: int = 0, **fields: object
) -> Draft:
    """What a drafter proposes for one slot alone, once it has read the text."""
    while not drafter.is_synced(slot, tokens) and drafter.read(slot, tokens, len(tokens)):
        pass
    (draft,) = drafter.propose([ask(tokens, count, slot, **fields)])  # type: ignore[arg-type]
    return draft
