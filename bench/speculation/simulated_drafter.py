"""A drafter with a set acceptance: it shows real costs without trained weights.

The time of a pass depends on shapes alone, but the number of right draft tokens depends on the
weights. This drafter knows the target's own greedy continuation from an earlier run and gets every
position wrong with a given probability. So a model with random weights shows what speculation would
cost and gain at that acceptance. A table with such figures says "simulated acceptance".
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
"""Tokens of prompts, and of the target's greedy answer to each."""


def continuations(runner: Runner, prompts: Sequence[Prompt], new_tokens: int) -> Known:
    """Answer the prompts with plain decoding."""
    texts = (runner.engine.encode(prompt.text) for prompt in prompts)
    batches = (runner.run([prompt], PLAIN, new_tokens) for prompt in prompts)
    return [(text, batch.answers[0].tokens) for text, batch in zip(texts, batches, strict=True)]


class _Script(NamedTuple):
    """A whole sequence, prompt first, and at which positions the draft token will be wrong."""

    tokens: list[int]
    wrong: npt.NDArray[np.bool_]


class SimulatedDrafter(LookupDrafter):
    """Proposes known continuations, wrong at random but fixed positions, without a forward pass.

    Which positions are wrong depends on the seed and the sequence, not on the length of the drafts:
    every draft length meets the same mistakes. `acceptance` is the probability that a draft token
    is right if all before it were. A wrong token is the right token's neighbour. The
    drafter proposes nothing for a sequence that it does not know.
    """

    name = "simulated"

    def __init__(self, acceptance: float, known: Known, *, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._scripts = []
        for number, (prompt, continuation) in enumerate(known):
            tokens = [*prompt, *continuation]
            wrong = np.random.default_rng([seed, number]).random(len(tokens)) >= acceptance
            self._scripts.append(_Script(tokens, wrong))
        self._slots: dict[int, _Script] = {}

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = 0.0
    ) -> Draft:
        """Propose the continuation with its mistakes; see `LookupDrafter.look_up`."""
        begun = list(tokens)
        last = [self._slots[slot]] if slot in self._slots else []
        for script in [*last, *self._scripts]:
            if script.tokens[: len(begun)] == begun:
                self._slots[slot] = script
                places = range(len(begun), min(len(begun) + count, len(script.tokens)))
                proposed = ((script.tokens[at] + int(script.wrong[at])) for at in places)
                draft = tuple(token % self._vocab_size for token in proposed)
                return Draft(draft) if draft else NO_DRAFT
        return NO_DRAFT

    def release(self, slot: int) -> None:
        """Forget a slot; the known continuations stay."""
        self._slots.pop(slot, None)
