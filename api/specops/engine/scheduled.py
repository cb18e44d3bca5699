"""What one pass computes of a request; planner, drafting and scheduler fill it in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specops.engine.request_state import RequestState
from specops.speculation.drafters.base import DraftRequest


@dataclass(slots=True, kw_only=True)
class Scheduled(DraftRequest):
    """What the next pass computes of a request, and the outcome; see `DraftRequest`, too.

    Attributes:
        state: the request.
        num_logits: number of its last tokens in the pass that need logits, or states (`scored`).
        forced: tokens that the grammar forces; they precede the draft.
        missed: name of the drafter that was asked and proposed nothing.
        declined: name of the drafter whose draft tokens did not seem to pay.
        is_prompt: a piece of a prompt; otherwise the request decodes.
        ends_prompt: the prompt ends with this piece, which gives the answer's first token.
    """

    state: RequestState
    num_logits: int = 0
    forced: tuple[int, ...] = ()
    missed: str | None = None
    declined: str | None = None
    is_prompt: bool = False
    ends_prompt: bool = False

    @classmethod
    def of(cls, state: RequestState, **fields: Any) -> Scheduled:
        """The next pass's part of a request, from its next token on."""
        return cls(
            state.slot,
            state.tokens,
            sampling=state.request.sampling,
            rng=state.rng,
            noise=state.noise,
            speculation=state.speculation,
            start=state.num_computed,
            adaptive=state.request.adaptive,
            state=state,
            **fields,
        )

    @property
    def scored(self) -> bool:
        """Whether it needs logits; an embedding is made of hidden states alone."""
        return not self.state.request.embed

    @property
    def settled(self) -> int:
        """Number of the text's tokens that stay, whatever of the draft is rejected."""
        return self.start + 1 + len(self.forced)
