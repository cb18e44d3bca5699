"""Guesses from the first of several drafters that has any: the cheap one before the dear one.

A lookup costs microseconds and is right where text repeats itself; a draft model costs a pass per
guess and is right elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specops.drafters.base import NO_DRAFT, Draft, Drafter
from specops.request import SamplingParams


class CascadeDrafter:
    """Asks its parts in turn and says whose guesses they are.

    The parts are drafters that can be asked for by name, too, and keep their rows themselves:
    whoever starts and releases the rows of all drafters has told them already.

    Args:
        parts: from the cheapest to the dearest.
    """

    name = "cascade"

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self._parts = tuple(parts)
        lookups = [part.name for part in parts if not part.runs_model]
        self._found_nothing = Draft(origin=lookups[-1]) if lookups else NO_DRAFT

    def start(self, row: int, tokens: Sequence[int], like: int) -> None:
        """Nothing: the parts are told themselves."""

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Every part takes the prompt in: which one will be asked is not known yet."""
        for part in self._parts:
            part.prefill(row, tokens)

    @property
    def runs_model(self) -> bool:
        """Whether a part does."""
        return any(part.runs_model for part in self._parts)

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        """The first guesses that cost no pass; without any, the last part that looked is named."""
        for part in self._parts:
            draft = part.look_up(row, tokens, count)
            if draft.tokens:
                return draft if draft.origin else replace(draft, origin=part.name)
        return self._found_nothing

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        """The first guesses that there are; see `Drafter.propose`."""
        for part in self._parts:
            draft = part.propose(row, tokens, count, sampling, rng)
            if draft.tokens:
                return draft if draft.origin else replace(draft, origin=part.name)
        return NO_DRAFT

    def backlog(self, row: int, length: int) -> int:
        """What the part that is furthest behind has to take in."""
        return max(part.backlog(row, length) for part in self._parts)

    def release(self, row: int) -> None:
        """Nothing: the parts forget the row themselves."""
