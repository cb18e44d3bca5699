"""A drafter with the acceptance that one asks for: true costs where the true weights are missing.

How long passes take depends on shapes alone, but how many guesses are right depends on weights.
This drafter knows the target's own greedy continuation from an earlier run and gets every
position wrong with a given probability, so a model with random weights shows what speculation
would cost and bring at that acceptance. Whoever shows such a figure says "simulated acceptance".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT, Draft
from specops.request import SamplingParams


@dataclass(frozen=True, slots=True)
class _Script:
    """A whole sequence, prompt first, and the positions at which the guess will be wrong."""

    tokens: list[int]
    wrong: npt.NDArray[np.bool_]


class SimulatedDrafter:
    """Guesses known continuations, wrong at random but fixed positions.

    Which positions are wrong depends on the seed and the sequence, not on how the guesses are cut
    into drafts: every draft length meets the same mistakes.

    Args:
        acceptance: probability that a guess is right, given that all before it were.
        vocab_size: the target's; a wrong guess is the right token's neighbour.
        seed: of the mistakes.
        model: a draft model whose passes are run and thrown away, so that guesses cost what that
            model's would; None: they cost nothing. As many rows as the target.

    Attributes:
        lost: times that it was asked about a sequence that it does not know, or that went another
            way than in the first run; it then has no guess. Figures with `lost` above 0 are not
            those of the acceptance that was asked for: exact mode avoids that.
    """

    name = "simulated"

    def __init__(
        self, acceptance: float, *, vocab_size: int, seed: int = 0, model: Decoder | None = None
    ) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"an acceptance is a probability, not {acceptance}")
        self.lost = 0
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._seed = seed
        self._model = model
        self._scripts: list[_Script] = []
        self._rows: dict[int, _Script] = {}
        self._fed: dict[int, list[int]] = {}  # row: the tokens in the draft model's cache

    @property
    def runs_model(self) -> bool:
        """Whether its guesses are paid for."""
        return self._model is not None

    def know(self, prompt: Sequence[int], continuation: Sequence[int]) -> None:
        """Take in what the target makes of a prompt, greedily."""
        tokens = [*prompt, *continuation]
        rng = np.random.default_rng([self._seed, len(self._scripts)])
        self._scripts.append(_Script(tokens, rng.random(len(tokens)) >= self._acceptance))

    def start(self, row: int, tokens: Sequence[int], like: int) -> None:
        """The row's last sequence is forgotten."""
        self.release(row)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """The draft model, if there is one, takes in what is new of the prompt."""
        if self._model is not None:
            fed = len(self._fed.get(row, ()))
            self._feed(self._model, row, tokens[fed : self._model.cache.capacity])

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        """What comes next, but for the mistakes; see `Drafter.propose`."""
        return self._guess(row, tokens, count)

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        """The guesses, if they cost nothing."""
        return NO_DRAFT if self._model is not None else self._guess(row, tokens, count)

    def backlog(self, row: int, length: int) -> int:
        """Tokens that the model, if there is one, has not been fed."""
        if self._model is None:
            return 0
        return max(1, min(length, self._model.cache.capacity) - len(self._fed.get(row, ())))

    def release(self, row: int) -> None:
        """Forget a row; the known continuations stay."""
        self._rows.pop(row, None)
        self._fed.pop(row, None)
        if self._model is not None:
            self._model.cache.truncate(row, 0)

    def _guess(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        script = self._script(row, tokens)
        if script is None:
            self.lost += 1
            return NO_DRAFT
        begin = len(tokens)
        if self._model is not None:
            count = min(count, self._model.cache.capacity - begin + 1)
        end = min(begin + count, len(script.tokens))
        guesses = tuple(
            (script.tokens[position] + int(script.wrong[position])) % self._vocab_size
            for position in range(begin, end)
        )
        if guesses and self._model is not None:
            self._pay(self._model, row, tokens, guesses)
        return Draft(guesses) if guesses else NO_DRAFT

    def _script(self, row: int, tokens: Sequence[int]) -> _Script | None:
        """The known sequence that goes on from `tokens`."""
        begun = list(tokens)
        last = [self._rows[row]] if row in self._rows else []
        for script in [*last, *self._scripts]:
            if script.tokens[: len(begun)] == begun:
                self._rows[row] = script
                return script
        return None

    def _pay(self, model: Decoder, row: int, tokens: Sequence[int], guesses: Sequence[int]) -> None:
        """The passes that the model would have needed: what is new, then all guesses but one."""
        fed = self._fed.setdefault(row, [])
        same = min(len(fed), len(tokens) - 1)
        while fed[:same] != list(tokens[:same]):  # goes back over rejected guesses only
            same -= 1
        del fed[same:]
        model.cache.truncate(row, same)
        self._feed(model, row, tokens[same:])
        for guess in guesses[:-1]:
            self._feed(model, row, [guess])

    def _feed(self, model: Decoder, row: int, tokens: Sequence[int]) -> None:
        known = [min(token, model.vocab_size - 1) for token in tokens]
        for start in range(0, len(known), model.max_width):
            # A draft model chooses from what it computes: that is part of the cost.
            model.extend(row, known[start : start + model.max_width], logits=1)[-1].argmax()
        self._fed.setdefault(row, []).extend(tokens)
