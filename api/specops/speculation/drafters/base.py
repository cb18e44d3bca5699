"""The protocol between the engine and drafters, and the records that they exchange.

A frozen `DraftContext` goes in, a `Draft` comes out: tokens, and for each the calibrated
probability that it is accepted. A lookup, a head and a draft model are the same to the engine. What
they cost it measures; which of their tokens stand the target decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from specops.request import Draft, SamplingParams
from specops.runtime.kvcache.prefix_cache import common_prefix

__all__ = [
    "MIN_REACH",
    "NO_DRAFT",
    "Draft",
    "DraftContext",
    "Drafter",
    "LookupDrafter",
    "better",
]

MIN_REACH = 0.02  # a draft token that is reached less often is worth no place in a pass
NO_DRAFT = Draft()
_UNTRIED = 0.6  # how often a lookup is believed to be right before any of its tokens was judged
_REMEMBERED = 1000  # most judged tokens of a lookup; then half of them are forgotten


class DraftContext(NamedTuple):
    """What a drafter sees of a request that asks it.

    Attributes:
        slot: the request's slot.
        text: the whole text so far, prompt first. Between two steps it only grows: by accepted
            draft tokens and one token of the target's own.
        max_draft: most draft tokens, at least 1.
        rng: the request's random numbers.
        sampling: how the target draws its tokens.
        noise: seed of the noise by which the target draws its tokens (`sampling.draw_seeded`), and
            drafters theirs; None: it draws by `rng`, or takes the likeliest.
        adaptive: draft tokens are verified where they pay; otherwise all are.
        min_reach: an adaptive request's draft token that is reached with a smaller probability is
            not verified.
        token_seconds: in which the request gets a token; what takes longer does not pay.
        draft: what cheaper drafters have proposed, maybe nothing.
    """

    slot: int
    text: Sequence[int]
    max_draft: int
    rng: np.random.Generator
    sampling: SamplingParams = SamplingParams()
    noise: int | None = None
    adaptive: bool = True
    min_reach: float = MIN_REACH
    token_seconds: float = float("inf")
    draft: Draft = NO_DRAFT


class Drafter(ABC):
    """Proposes how texts continue. Keeps its state by slot.

    A drafter that raises an error is asked nothing more while the service runs.

    Attributes:
        name: the name in requests, statistics and metrics.
        draws: it draws tokens by the target's noise where the target draws.
        follows: it gets the target's states of every text that it has begun, asked or not.
    """

    name: ClassVar[str]
    draws: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:  # noqa: B027
        """A client's request with this prompt begins in a free slot."""

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has read as much of a text as it needs. Otherwise it is not asked."""
        return True

    def read(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Read up to `most` more tokens of a text; returns their number."""
        return 0

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Propose a draft for each request, in their order; maybe an empty one.

        All that ask in a step ask together: they share its passes. Drafts of adaptive requests end
        before the first token that would not pay.
        """

    def read_seconds(self, slot: int) -> float:
        """Seconds that reading takes per token of the slot's prompt, after the target's pass."""
        return 0.0

    def take_reading(self) -> float:
        """Seconds that it has read the target's states since the last call."""
        return 0.0

    def required_prefix(self, slot: int, tokens: Sequence[int]) -> int | None:
        """Number of first tokens that the drafter does not need the target to compute.

        None: it does not read the target's states, or can no longer.
        """
        return None

    def release(self, slot: int) -> None:  # noqa: B027
        """The slot's request has ended."""

    def stop(self) -> None:  # noqa: B027
        """It raised an error, and no other method is called any more."""


class LookupDrafter(Drafter):
    """A drafter that knows which tokens may follow, and not how likely: it counts that.

    A subclass that overrides `release` calls this one's, too.
    """

    _num_right = _num_judged = 0.0  # tokens of late

    @cached_property
    def _latest(self) -> dict[int, tuple[int, Sequence[int]]]:
        """By slot, how long its text was at the last call, and what seemed to follow."""
        return {}

    @abstractmethod
    def look_up(self, context: DraftContext) -> Sequence[int]:
        """The tokens that may follow, at most `max_draft`; maybe none."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See `Drafter.propose`."""
        drafts = []
        for context in contexts:
            length, tokens = self._latest.get(context.slot, (0, ()))
            if tokens:
                self._judge(tokens, context.text[length : length + len(tokens)])
            tokens = self.look_up(context)
            self._latest[context.slot] = len(context.text), tokens
            probability = (self._num_right + _UNTRIED) / (self._num_judged + 1)
            drafts.append(Draft(tuple(tokens), accept_probs=(probability,) * len(tokens)))
        return drafts

    def _judge(self, tokens: Sequence[int], came: Sequence[int]) -> None:
        """Count how many of the tokens were right, up to the first that was not."""
        right = common_prefix(tokens, came)
        self._num_right += right
        self._num_judged += min(right + 1, len(came))
        if self._num_judged > _REMEMBERED:
            self._num_right, self._num_judged = self._num_right / 2, self._num_judged / 2

    def release(self, slot: int) -> None:
        """See `Drafter.release`."""
        self._latest.pop(slot, None)


def better(one: Draft, other: Draft) -> Draft:
    """The one of a request's two drafts with more expected tokens.

    Where they agree, both get the larger of the two probabilities.
    """
    drafts = [one, other]
    if agreed := common_prefix(one.tokens, other.tokens):
        surer = tuple(map(max, one.accept_probs[:agreed], other.accept_probs))
        drafts = [
            replace(draft, accept_probs=surer + draft.accept_probs[agreed:]) for draft in drafts
        ]
    return max(drafts, key=lambda draft: draft.expected)
