"""The two protocols between the engine and drafters, and the data that they exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from specops.request import Draft, SamplingParams
from specops.runtime.kvcache.prefix_cache import common_prefix
from specops.speculation.acceptance import SpeculationState

__all__ = [
    "LEAST_REACH",
    "NO_DRAFT",
    "Asked",
    "Chain",
    "Draft",
    "DraftModel",
    "DraftRequest",
    "LookupDrafter",
    "better",
]

LEAST_REACH = 0.02  # a draft token that is reached less often is worth no place in a pass
NO_DRAFT = Draft()
_GREEDY = SamplingParams()


@dataclass(slots=True)
class Asked:
    """A drafter that was asked for a request in a step, because that seemed to pay.

    Attributes:
        seconds: that it took.
        before: the draft that the request had without it.
    """

    seconds: float = 0.0
    before: Draft = field(default_factory=lambda: NO_DRAFT)


@dataclass(slots=True)
class DraftRequest:
    """What drafters and the controller see of a request that decodes in a step.

    Attributes:
        slot: the request's slot.
        text: the whole text so far, prompt first. Between two steps it only grows: by accepted
            draft tokens and one token of the target's own.
        max_draft: largest number of draft tokens: those that were found, or that a drafter may be
            asked for.
        sampling: how the target draws its tokens.
        rng: the request's random numbers.
        noise: seed of the noise by which the target draws its tokens (`sampling.draw_seeded`), and
            drafters theirs; None: it draws by `rng`, or takes the likeliest.
        speculation: what speculation has gained for the request so far.
        start: number of tokens that the request's next token looks back at.
        adaptive: the controller chooses how many draft tokens are verified; otherwise all are.
        min_reach: with a smaller probability to be reached a draft token is not verified.
        draft: the draft tokens, maybe none.
        num_uncomputed: number of tokens that a draft model has to compute before the first draft
            token; 0 where the draft tokens were looked up.
        asked: by name, the drafters that were asked because that seemed to pay, in their order.
        draft_seconds: the request's share of the time that a draft model took.
        tokens: its tokens in the pass.
        emitted: number of new tokens from the pass.
        came: those at the positions of the draft: the accepted ones and the next one.
    """

    slot: int
    text: Sequence[int]
    max_draft: int = 0
    sampling: SamplingParams = _GREEDY
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    noise: int | None = None
    speculation: SpeculationState = field(default_factory=SpeculationState)
    start: int = 0
    adaptive: bool = True
    min_reach: float = LEAST_REACH
    draft: Draft = field(default_factory=lambda: NO_DRAFT)
    num_uncomputed: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)
    draft_seconds: float = 0.0
    tokens: Sequence[int] = ()
    emitted: int = 0
    came: Sequence[int] = ()


class LookupDrafter(ABC):
    """Proposes how a text continues without a draft model. Keeps its state by slot.

    A subclass that keeps something by slot overrides `begin` and `release`, too.

    Attributes:
        name: the name in requests, statistics and metrics.
        draws: it samples tokens with the target's noise where the target samples.
    """

    name: ClassVar[str]
    draws: ClassVar[bool] = False

    def read_seconds(self, slot: int) -> float:
        """Seconds that reading takes per token of the slot's prompt, after the target's pass."""
        return 0.0

    def take_reading(self) -> float:
        """Seconds that it has spent reading texts since the last call, drafting excluded."""
        return 0.0

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:  # noqa: B027
        """A client's request with this prompt begins in a free slot."""

    def prepare(self, requests: Sequence[DraftRequest], token_seconds: float) -> None:  # noqa: B027
        """Get ready for the requests that are looked up next, all together.

        A drafter that runs passes runs them here, for these requests alone. `token_seconds` is the
        time in which a request gets a token.
        """

    @abstractmethod
    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = LEAST_REACH
    ) -> Draft:
        """Propose up to `count` tokens that follow `tokens`; maybe none.

        A drafter that knows how likely its tokens are ends before the first one that is reached
        with less than the probability `min_reach`: it would not pay.
        """

    def follows(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has read as much of a text as it needs. Otherwise it is not asked."""
        return True

    def held(self, slot: int, tokens: Sequence[int]) -> int | None:
        """Number of first tokens that the drafter does not need the target to compute.

        None: it does not read the target's states, or can no longer.
        """
        return None

    def release(self, slot: int) -> None:  # noqa: B027
        """The slot's request has ended."""


class DraftModel(Protocol):
    """Proposes with a model of its own, which takes passes. Keeps its state by slot."""

    @property
    def name(self) -> str:
        """The name in requests, statistics and metrics."""

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """A client's request with this prompt begins in a free slot."""

    def num_uncomputed(self, slot: int, length: int) -> int:
        """Tokens of a text of `length` that it has to compute before it can propose."""

    def prefill(self, slot: int, tokens: Sequence[int], max_tokens: int) -> int:
        """Compute up to so many of the slot's uncomputed tokens; returns their number."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Propose up to `max_draft` tokens for each request, in their order; maybe none.

        It runs one pass per draft token for all of them.
        """

    def release(self, slot: int) -> None:
        """The slot's request has ended."""


class Chain(NamedTuple):
    """The drafters behind one name: lookups, the cheapest first, then a model if it gains more."""

    lookups: tuple[LookupDrafter, ...] = ()
    model: DraftModel | None = None

    @property
    def drafters(self) -> tuple[LookupDrafter | DraftModel, ...]:
        """All of them, in the order in which they are asked."""
        return self.lookups if self.model is None else (*self.lookups, self.model)


def better(one: Draft, other: Draft) -> Draft:
    """The one of a request's two drafts with more expected tokens.

    Where they agree, both get the larger of the two probabilities.
    """
    if not (one.accept_probs and other.accept_probs):  # one with known probabilities wins
        return other if other.accept_probs or not one.tokens else one
    agreed = common_prefix(one.tokens, other.tokens)
    surer = tuple(map(max, one.accept_probs[:agreed], other.accept_probs))
    drafts = (
        replace(draft, accept_probs=surer + draft.accept_probs[agreed:]) for draft in (one, other)
    )
    return max(drafts, key=lambda draft: draft.expected)
