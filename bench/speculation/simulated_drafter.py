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

from bench.prompts import Prompt
from bench.speculation.ways import PLAIN, Runner
from specops.speculation.drafters.base import NO_DRAFT, Draft, LookupDrafter

Known = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Prompts, and what the target makes of each, greedily; tokens."""


def continuations(runner: Runner, prompts: Sequence[Prompt], new_tokens: int) -> Known:
    """Run the prompts plainly."""
    texts = (runner.engine.encode(prompt.text) for prompt in prompts)
    batches = (runner.run([prompt], PLAIN, new_tokens) for prompt in prompts)
    return [(text, batch.answers[0].tokens) for text, batch in zip(texts, batches, strict=True)]


class _Script(NamedTuple):
    """A whole sequence, prompt first, and the positions at which the draft token will be wrong."""

    tokens: list[int]
    wrong: npt.NDArray[np.bool_]


class SimulatedDrafter(LookupDrafter):
    """Proposes known continuations, wrong at random but fixed positions. Costs no forward pass.

    Which positions are wrong depends on the seed and the sequence, not on how the tokens are cut
    into drafts: every draft length meets the same mistakes. `acceptance` is the probability that a
    draft token is right, given that all before it were; a wrong token is the right one's neighbour.
    It proposes nothing for a sequence that it does not know.
    """

    name = "simulated"

    def __init__(self, acceptance: float, known: Known, *, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"an acceptance is a probability, not {acceptance}")
        self._vocab_size = vocab_size
        self._scripts = []
        for number, (prompt, continuation) in enumerate(known):
            tokens = [*prompt, *continuation]
            wrong = np.random.default_rng([seed, number]).random(len(tokens)) >= acceptance
            self._scripts.append(_Script(tokens, wrong))
        self._slots: dict[int, _Script] = {}

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        """What comes next, but for the mistakes; see `Drafter.look_up`."""
        script = self._script(slot, tokens)
        if script is None:
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
