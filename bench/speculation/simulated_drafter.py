"""A drafter with the acceptance that one asks for: true costs where the true weights are missing.

How long passes take depends on shapes alone, but how many draft tokens are right depends on
weights. This drafter knows the target's own greedy continuation from an earlier run and gets every
position wrong with a given probability, so a model with random weights shows what speculation
would cost and bring at that acceptance. A table with such figures says "simulated acceptance".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specops.speculation.drafters.base import NO_DRAFT, Draft, LookupDrafter


class _Script(NamedTuple):
    """A whole sequence, prompt first, and the positions at which the draft token will be wrong."""

    tokens: list[int]
    wrong: npt.NDArray[np.bool_]


class SimulatedDrafter(LookupDrafter):
    """Proposes known continuations, wrong at random but fixed positions. Costs no forward pass.

    Which positions are wrong depends on the seed and the sequence, not on how the tokens are cut
    into drafts: every draft length meets the same mistakes.

    `acceptance` is the probability that a draft token is right, given that all before it were; a
    wrong token is the right one's neighbour. `lost` counts how often it was asked about a sequence
    that it does not know, or that went another way than in the first run; it then proposes nothing.
    Above 0 the figures are not those of the acceptance that was asked for.
    """

    name = "simulated"

    def __init__(self, acceptance: float, *, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"an acceptance is a probability, not {acceptance}")
        self.lost = 0
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._seed = seed
        self._scripts: list[_Script] = []
        self._slots: dict[int, _Script] = {}

    def know(self, prompt: Sequence[int], continuation: Sequence[int]) -> None:
        """Take in what the target makes of a prompt, greedily."""
        tokens = [*prompt, *continuation]
        rng = np.random.default_rng([self._seed, len(self._scripts)])
        self._scripts.append(_Script(tokens, rng.random(len(tokens)) >= self._acceptance))

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        """What comes next, but for the mistakes; see `Drafter.look_up`."""
        script = self._script(slot, tokens)
        if script is None:
            self.lost += 1
            return NO_DRAFT
        begin = len(tokens)
        proposed = tuple(
            (script.tokens[position] + int(script.wrong[position])) % self._vocab_size
            for position in range(begin, min(begin + count, len(script.tokens)))
        )
        return Draft(proposed) if proposed else NO_DRAFT

    def release(self, slot: int) -> None:
        """Forget a slot; the known continuations stay."""
        self._slots.pop(slot, None)

    def _script(self, slot: int, tokens: Sequence[int]) -> _Script | None:
        """The known sequence that goes on from `tokens`."""
        begun = list(tokens)
        last = [self._slots[slot]] if slot in self._slots else []
        for script in [*last, *self._scripts]:
            if script.tokens[: len(begun)] == begun:
                self._slots[slot] = script
                return script
        return None
