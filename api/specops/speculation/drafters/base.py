"""The protocol between the engine and a source of draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from specops.request import SamplingParams
from specops.runtime.sampling import Floats

LEAST_REACH = 0.02  # a draft token that is reached less often is worth no place in a pass


class Draft(NamedTuple):
    """Draft tokens of one request.

    Attributes:
        tokens: [k].
        probs: [k, V], the distribution that each token was drawn from; None where no token was
            drawn (greedy, or looked up), or where the request has a seed: verification then
            compares tokens, see `verify_seeded`.
        origin: name of the drafter that made the draft, where another drafter was asked; without
            tokens: name of the drafter that has looked them up in vain.
        promised: [k], the drafter's own estimate that each token is accepted, given that those
            before it are. The controller believes it, so a drafter learns from the tokens that
            come. Empty where the drafter makes no estimate: the controller then goes by the
            acceptance of earlier drafts.
    """

    tokens: tuple[int, ...] = ()
    probs: Floats | None = None
    origin: str | None = None
    promised: tuple[float, ...] = ()

    def cut(self, count: int) -> Draft:
        """Its first `count` tokens."""
        return Draft(self.tokens[:count], self.probs, self.origin, self.promised[:count])


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request's part in `Drafter.propose`.

    Attributes:
        slot: the request's slot.
        tokens: the whole sequence so far, prompt first. Between two calls it only grows: by
            accepted draft tokens and one token of the target's own.
        count: largest number of draft tokens, at least 1.
        sampling: how the target draws its tokens.
        rng: the request's random numbers, for draft tokens that are drawn. With a seed they are
            drawn by `sampling.draw_seeded` at their place in the sequence: the target's noise.
    """

    slot: int
    tokens: Sequence[int]
    count: int
    sampling: SamplingParams
    rng: np.random.Generator


class Drafter(Protocol):
    """Proposes how sequences go on. Keeps its state by slot."""

    @property
    def name(self) -> str:
        """The name in requests, statistics and metrics."""

    @property
    def runs_model(self) -> bool:
        """Whether `propose` may run forward passes; `look_up` never does."""

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """A client's sequence with this prompt begins in a free slot."""

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """Propose up to `count` tokens that cost no forward pass; maybe none.

        A drafter that knows how likely its tokens are ends before the first one that is reached
        with less than the probability `least`: it would not pay.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Propose for several slots at once, in the order of the requests; maybe no tokens.

        A draft model runs one pass per draft token for all of them.
        """

    def backlog(self, slot: int, length: int) -> int:
        """Tokens of a sequence of `length` that a model has to compute before it can propose."""

    def prefill(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Let a model compute up to `most` tokens of the slot's backlog; returns their number."""

    def release(self, slot: int) -> None:
        """The slot's sequence has ended."""


class LookupDrafter(ABC):
    """The part that all drafters without a model share: they only look up.

    A subclass that keeps something by slot overrides `release`, too.
    """

    name: str
    runs_model = False

    @abstractmethod
    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """Propose up to `count` tokens that follow `tokens`; see `Drafter.look_up`."""

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:  # noqa: B027
        """Nothing: the drafter takes tokens in when it looks them up."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The same as `look_up`, however the target draws its tokens."""
        return [self.look_up(item.slot, item.tokens, item.count) for item in requests]

    def backlog(self, slot: int, length: int) -> int:
        """0: there is no model."""
        return 0

    def prefill(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """0: there is nothing to compute."""
        return 0

    def release(self, slot: int) -> None:  # noqa: B027
        """Nothing is kept."""
