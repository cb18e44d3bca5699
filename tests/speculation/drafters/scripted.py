"""Drafters that are as right as a test wants them to be: they know what the target will say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftRequest, LookupDrafter
from tests.simulated_target import GREEDY, VOCAB, SamplingParams, Text


class Scripted(LookupDrafter):
    """Looks up the target's own continuation, each token wrong with a given probability.

    Args:
        text: what the target says.
        right: probability that a draft token is the target's, given that those before it were.
        name: of the drafter.
        silent: share of the times that it has nothing.

    Attributes:
        begun, released: slots, in the order in which it was told.
    """

    def __init__(
        self, text: Text, right: float, *, name: str = "scripted", silent: float = 0.0
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.begun: list[int] = []
        self.released: list[int] = []
        self._text = text
        self._right = right
        self._silent = silent
        self._rng = np.random.default_rng(3)

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        self.begun.append(slot)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = 0.0
    ) -> Draft:
        return self._draft(tokens, count, GREEDY)

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def _draft(self, tokens: Sequence[int], count: int, sampling: SamplingParams) -> Draft:
        if self._rng.random() < self._silent:
            return NO_DRAFT
        known = self._text.continuation(tokens, count, sampling)
        wrong = self._rng.random(count) >= self._right
        shift = self._rng.integers(1, VOCAB, count)
        return Draft(tuple(((known + shift * wrong) % VOCAB).tolist()))


class ScriptedModel:
    """A draft model that proposes so, knows how requests sample, and notes what it computes.

    Args:
        reads: it has to compute prompts first; otherwise it knows them.

    Attributes:
        calls: names of its methods that computed, in order.
        read: by slot, number of tokens that it has computed.
        asked: drafts per call of `propose`.
    """

    def __init__(
        self, text: Text, right: float = 1.0, *, name: str = "draft", reads: bool = False
    ) -> None:
        self.name = name
        self._reads = reads
        self.calls: list[str] = []
        self.read: dict[int, int] = {}
        self.asked: list[int] = []
        self._script = Scripted(text, right)

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        self.read[slot] = 0

    def num_uncomputed(self, slot: int, length: int) -> int:
        return max(1, length - self.read[slot]) if self._reads else 1

    def prefill(self, slot: int, tokens: Sequence[int], max_tokens: int) -> int:
        self.calls.append("prefill")
        taken = min(max_tokens, len(tokens) - 1 - self.read[slot])
        self.read[slot] += taken
        return taken

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls.append("propose")
        self.asked.append(len(requests))
        self.read |= {item.slot: len(item.text) for item in requests}
        draft = self._script._draft
        return [draft(item.text, item.max_draft, item.sampling) for item in requests]

    def release(self, slot: int) -> None:
        del self.read[slot]
