"""What the engine asks of a source of guesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specops.request import SamplingParams
from specops.sampling import Floats


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens.

    Attributes:
        tokens: the guesses, [k].
        probs: [k, V], the distribution that each token was drawn from; None where the guesses
            were certain (greedy, or looked up) or the request has a seed: verification then
            compares tokens, see `verify_seeded`.
        origin: the drafter that made them, where that is not the one that was asked; without
            tokens: the one that has looked them up in vain.
        match_length: how many of the last tokens a lookup found again; 0 where nothing was looked
            up. The longer the match, the more of the guesses are right.
    """

    tokens: tuple[int, ...] = ()
    probs: Floats | None = None
    origin: str | None = None
    match_length: int = 0


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses how a sequence goes on. Keeps its state per row.

    A row here is a number that a sequence has from its start to its end; where the target's cache
    holds the sequence may change.
    """

    @property
    def name(self) -> str:
        """The name in requests, statistics and metrics."""

    @property
    def runs_model(self) -> bool:
        """Whether `propose` may run forward passes; what `look_up` finds never costs one."""

    def start(self, row: int, tokens: Sequence[int], like: int) -> None:
        """A sequence with this prompt begins in a row.

        What was computed for the row's last sequence may be used as far as both begin alike, and
        what was computed for the one in row `like`: the target found a common beginning there.
        """

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Take in what is new of a prompt; for drafters that run a model.

        Called before the first guess and after the target's first token, chunk by chunk; not at
        all where the drafter's guesses have not paid: `propose` then has to catch up. `tokens` is
        the prompt from its start to the end of the chunk.
        """

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        """Guess like `propose`, but only what costs no forward pass; maybe nothing."""

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        """Guess up to `count` tokens that follow `tokens`; none is a good answer.

        Args:
            row: the sequence's row.
            tokens: the whole sequence so far, prompt first. Between two calls it only grows:
                by accepted guesses and one token of the target's own.
            count: at least 1.
            sampling: how the target draws its tokens.
            rng: the request's random numbers, for guesses that are drawn. With a seed draw by
                `sampling.draw_seeded` at the guess's place in `tokens`: it is the target's noise.
        """

    def backlog(self, row: int, length: int) -> int:
        """Tokens of a sequence of `length` that a model has to take in before its first guess."""

    def release(self, row: int) -> None:
        """Forget a row."""


class LookupDrafter(ABC):
    """What all drafters have in common that run no model: they only have to look up.

    One that keeps something per row overrides `release`, too.
    """

    name: str
    runs_model = False

    @abstractmethod
    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        """Guess up to `count` tokens that follow `tokens`; see `Drafter.look_up`."""

    def start(self, row: int, tokens: Sequence[int], like: int) -> None:
        """The row's last sequence is forgotten."""
        self.release(row)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:  # noqa: B027 - may do nothing
        """Nothing: tokens are taken in when guesses are asked for."""

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        """What there is to find, however the target draws its tokens."""
        return self.look_up(row, tokens, count)

    def backlog(self, row: int, length: int) -> int:
        """No model has to keep up."""
        return 0

    def release(self, row: int) -> None:  # noqa: B027
        """Nothing is kept."""
