"""Drafters that are as right as a test wants them to be: they know what the target will say."""

from collections.abc import Sequence

import numpy as np

from specops.request import SamplingParams
from specops.speculation.drafters.base import Draft, DraftContext, LookupDrafter
from tests.simulated_target import GREEDY, VOCAB, Text


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

    def look_up(self, context: DraftContext) -> Sequence[int]:
        if self._rng.random() < self._silent:
            return ()
        count = context.max_draft
        known = self._text.continuation(context.text, count, self._sampling(context))
        wrong = self._rng.random(count) >= self._right
        shift = self._rng.integers(1, VOCAB, count)
        tokens: list[int] = ((known + shift * wrong) % VOCAB).tolist()
        return tokens

    def _sampling(self, context: DraftContext) -> SamplingParams:
        return GREEDY

    def release(self, slot: int) -> None:
        super().release(slot)
        self.released.append(slot)


class ScriptedModel(Scripted):
    """A draft model that proposes so, knows how requests sample, and notes what it computes.

    Args:
        reads: it has to compute prompts first; otherwise it knows them.

    Attributes:
        calls: names of its methods that computed, in order.
        computed: by slot, number of tokens that it has computed.
        asked: drafts per call of `propose`.
    """

    def __init__(
        self, text: Text, right: float = 1.0, *, name: str = "draft", reads: bool = False
    ) -> None:
        super().__init__(text, right, name=name)
        self._reads = reads
        self.calls: list[str] = []
        self.computed: dict[int, int] = {}
        self.asked: list[int] = []

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        self.computed[slot] = 0

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        return not self._reads or len(tokens) - self.computed[slot] <= 32

    def read(self, slot: int, tokens: Sequence[int], most: int) -> int:
        self.calls.append("read")
        taken = min(most, len(tokens) - 1 - self.computed[slot])
        self.computed[slot] += taken
        return taken

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.calls.append("propose")
        self.asked.append(len(contexts))
        self.computed |= {item.slot: len(item.text) for item in contexts}
        return super().propose(contexts)

    def _sampling(self, context: DraftContext) -> SamplingParams:
        return context.sampling

    def release(self, slot: int) -> None:
        super().release(slot)
        del self.computed[slot]
