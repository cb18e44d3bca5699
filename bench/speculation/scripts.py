"""Drafters with a preset acceptance: real costs without trained weights.

The time of a pass depends only on shapes, but the number of right draft tokens depends on the
weights. So a script knows the target's own greedy continuations from an earlier run, and gets each
position wrong with a given probability, whichever drafter uses it. Tables of such figures say so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.prompts import Prompt
from bench.speculation.ways import PLAIN, Runner
from specops.runtime.sampling import Floats
from specops.speculation.drafters.base import DraftContext, LookupDrafter
from specops.speculation.drafters.guessing import GuessingDrafter

Known = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Tokens of prompts, and of the target's greedy answer to each."""


def continuations(runner: Runner, prompts: Sequence[Prompt], new_tokens: int) -> Known:
    """Answer the prompts with plain decoding."""
    texts = (runner.engine.encode(prompt.text) for prompt in prompts)
    batches = (runner.run([prompt], PLAIN, new_tokens) for prompt in prompts)
    return [(text, batch.answers[0].tokens) for text, batch in zip(texts, batches, strict=True)]


class _Text(NamedTuple):
    """A whole sequence, prompt first, and the draft token at each of its positions."""

    tokens: list[int]
    said: list[int]


_UNKNOWN = _Text([], [])


class Script:
    """Known continuations, wrong at random but fixed positions.

    The wrong positions depend on the seed and the sequence, not on the length of drafts: every
    draft length meets the same mistakes. A wrong token is the right token's neighbour.

    Args:
        acceptance: the probability that a draft token is right if all before it were.
        known: prompts and their continuations.
        vocab_size: the target's.
        seed: seed of the mistakes.
    """

    def __init__(self, acceptance: float, known: Known, *, vocab_size: int, seed: int = 0) -> None:
        self.acceptance = acceptance
        self._texts = []
        for number, (prompt, continuation) in enumerate(known):
            tokens = [*prompt, *continuation]
            wrong = np.random.default_rng([seed, number]).random(len(tokens)) >= acceptance
            said = (np.array(tokens) + wrong) % vocab_size
            self._texts.append(_Text(tokens, said.tolist()))
        self._known: dict[int, tuple[_Text, int]] = {}  # by slot, with the length of its text

    def after(self, slot: int, text: Sequence[int], count: int) -> list[int]:
        """The next tokens of a slot's text with their mistakes; none if the text is unknown.

        This must be as fast as a lookup: so only the new part of a text is compared.

        Args:
            slot: the slot.
            text: its whole text.
            count: maximum number of tokens.
        """
        length = len(text)
        script, known = self._known.get(slot, (self._texts[0], length + 1))
        if known > length or script.tokens[known:length] != text[known:]:
            same = (item for item in self._texts if item.tokens[:length] == [*text])
            script = next(same, _UNKNOWN)
        self._known[slot] = script, length
        return script.said[length : length + count]


class ScriptedLookup(LookupDrafter):
    """Proposes a script's tokens, without a forward pass."""

    name = "simulated"

    def __init__(self, script: Script) -> None:
        self._script = script

    def look_up(self, context: DraftContext) -> Sequence[int]:
        """See `LookupDrafter.look_up`."""
        return self._script.after(context.slot, context.text, context.max_draft)


def follow(drafter: GuessingDrafter, script: Script) -> None:
    """Make a head or a draft model propose a script's tokens; it still runs its passes."""
    choose = type(drafter)._choose

    def chosen(guess: int, context: DraftContext, logits: Floats) -> tuple[int, float]:
        token, _ = choose(drafter, guess, context, logits)
        said = script.after(context.slot, context.text, guess + 1)
        return said[guess] if guess < len(said) else token, script.acceptance

    drafter._choose = chosen  # type: ignore[method-assign]
