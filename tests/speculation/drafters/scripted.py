"""Drafters that are as right as a test wants them to be: they know what the target will say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftRequest, LookupDrafter
from tests.simulated_target import GREEDY, VOCAB, SamplingParams, Text


class Scripted(LookupDrafter):
    """Proposes the target's own continuation, each token wrong with a given probability.

    Args:
        text: what the target says.
        right: probability that a draft token is the target's, given that those before it were.
        name: of the drafter.
        model: it proposes as a draft model does, where it knows how the request samples; else it
            looks up, and takes every request for a greedy one.
        silent: share of the times that it has nothing.

    Attributes:
        begun, released: slots, in the order in which it was told.
        asked: drafts per call of `propose`.
    """

    def __init__(
        self,
        text: Text,
        right: float,
        *,
        name: str = "scripted",
        model: bool = False,
        silent: float = 0.0,
    ) -> None:
        self.name = name
        self.runs_model = model
        self.begun: list[int] = []
        self.released: list[int] = []
        self.asked: list[int] = []
        self._text = text
        self._right = right
        self._silent = silent
        self._rng = np.random.default_rng(3)

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        self.begun.append(slot)

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        return NO_DRAFT if self.runs_model else self._draft(tokens, count, GREEDY)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked.append(len(requests))
        return [self._draft(item.tokens, item.count, item.sampling) for item in requests]

    def backlog(self, slot: int, length: int) -> int:
        return int(self.runs_model)

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def _draft(self, tokens: Sequence[int], count: int, sampling: SamplingParams) -> Draft:
        if self._rng.random() < self._silent:
            return NO_DRAFT
        known = self._text.continuation(tokens, count, sampling)
        wrong = self._rng.random(count) >= self._right
        shift = self._rng.integers(1, VOCAB, count)
        return Draft(tuple(((known + shift * wrong) % VOCAB).tolist()))
