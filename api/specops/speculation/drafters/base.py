"""The protocol between the engine and drafters, and the records that they exchange.

A frozen `DraftContext` goes in, a `Draft` comes out: tokens, and for each the calibrated
probability that it is accepted. To the engine a lookup, a head and a draft model are the same. It
measures their costs, and the target decides which tokens to accept.
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

MIN_REACH = 0.02  # a draft token that is reached less often is never worth verifying
NO_DRAFT = Draft()
_UNTRIED = 0.6  # assumed accuracy of a lookup before any of its tokens was judged
_REMEMBERED = 1000  # maximum number of a lookup's judged tokens; then both counts are halved


class DraftContext(NamedTuple):
    """A drafter's view of a request.

    Attributes:
        slot: the request's slot.
        text: the whole text so far, prompt first. Between two steps it only grows: by accepted
            draft tokens and one of the target's own tokens.
        max_draft: maximum number of draft tokens, at least 1.
        rng: the request's random numbers.
        sampling: the target's sampling parameters.
        noise: seed of the noise by which target and drafters draw tokens (`sampling.draw_seeded`);
            None: the target draws by `rng`, or takes the most likely token.
        adaptive: whether draft tokens are verified only if they pay; otherwise all are.
        min_reach: an adaptive request's draft tokens that are reached with a lower probability are
            not verified.
        reaches: for each place, the probability from which on verifying it may pay, if the places
            before it are verified; may be empty.
        token_seconds: seconds in which the request gets a token; anything slower does not pay.
        draft: the proposal of cheaper drafters, possibly empty.
    """

    slot: int
    text: Sequence[int]
    max_draft: int
    rng: np.random.Generator
    sampling: SamplingParams = SamplingParams()
    noise: int | None = None
    adaptive: bool = True
    min_reach: float = MIN_REACH
    reaches: Sequence[float] = ()
    token_seconds: float = float("inf")
    draft: Draft = NO_DRAFT


class Drafter(ABC):
    """Proposes continuations of texts. Keeps its state by slot.

    A drafter that raises an error is not called again while the service runs.

    Attributes:
        name: its name in requests, statistics and metrics.
        draws: whether it draws tokens by the target's noise if the target draws.
        follows: whether it gets the target's states of every text that it has begun, asked or not.
        lags: whether it has texts to read, so that `is_synced` may be false.
    """

    name: ClassVar[str]
    draws: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    lags: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.lags = cls.is_synced is not Drafter.is_synced

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:  # noqa: B027
        """Start a client's request in a free slot.

        Args:
            slot: the slot.
            tokens: the prompt.
            client: name of the client.
        """

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has read enough of a text to be asked."""
        return True

    def read(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Read more of a text.

        Args:
            slot: the request's slot.
            tokens: the whole text.
            most: maximum number of tokens to read.

        Returns:
            The number of tokens read.
        """
        return 0

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Propose a draft, possibly empty, for each request, in their order.

        All requests of a step ask together, so that they share the drafter's passes. Drafts of
        adaptive requests end before the first token that would not pay.
        """

    def read_seconds(self, slot: int) -> float:
        """Seconds that reading adds per token of the slot's prompt, after the target's pass."""
        return 0.0

    def take_reading(self) -> float:
        """Seconds spent reading the target's states since the last call."""
        return 0.0

    def required_prefix(self, slot: int, tokens: Sequence[int]) -> int | None:
        """Number of leading tokens whose states the drafter does not need from the target.

        None: it does not read the target's states, or no longer can.
        """
        return None

    def release(self, slot: int) -> None:  # noqa: B027
        """End the slot's request."""

    def stop(self) -> None:  # noqa: B027
        """End all work after an error. No other method is called from now on."""


class LookupDrafter(Drafter):
    """A drafter that only finds likely tokens; how often they are right gives the probability.

    A subclass that overrides `release` calls this one's, too.
    """

    _num_right = _num_judged = 0.0  # recent tokens

    @cached_property
    def _latest(self) -> dict[int, tuple[int, Sequence[int]]]:
        """By slot, the length of its text at the last call and the tokens found then."""
        return {}

    @abstractmethod
    def look_up(self, context: DraftContext) -> Sequence[int]:
        """The tokens that may follow: at most `max_draft`, possibly none."""

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
        """Count the right tokens before the first wrong one."""
        right = common_prefix(tokens, came)
        self._num_right += right
        self._num_judged += min(right + 1, len(came))
        if self._num_judged > _REMEMBERED:
            self._num_right, self._num_judged = self._num_right / 2, self._num_judged / 2

    def release(self, slot: int) -> None:
        """See `Drafter.release`."""
        self._latest.pop(slot, None)


def better(one: Draft, other: Draft) -> Draft:
    """Whichever of a request's two drafts has more expected tokens.

    Tokens that both propose get the larger of the two probabilities first.
    """
    drafts = [one, other]
    if agreed := common_prefix(one.tokens, other.tokens):
        surer = tuple(map(max, one.accept_probs[:agreed], other.accept_probs))
        drafts = [
            replace(draft, accept_probs=surer + draft.accept_probs[agreed:]) for draft in drafts
        ]
    return max(drafts, key=lambda draft: draft.expected)
