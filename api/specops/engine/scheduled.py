"""What one pass computes of a request: a prompt's next tokens, or a token and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specops.engine.request_state import RequestState
from specops.speculation.controller import Proposal


@dataclass(slots=True)
class Scheduled:
    """What the next pass computes of a request.

    Attributes:
        state: the request.
        slot: its slot.
        start: position of the first token.
        tokens: the tokens.
        num_logits: number of the last tokens that need logits, or hidden states (`scored`).
        proposal: of a request that decodes and may ask a drafter, and of all in a pass that
            verifies anything.
        forced: tokens that the grammar forces; they precede the draft.
        ends_prompt: the prompt ends with this piece, which gives the answer's first token.
    """

    state: RequestState
    slot: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    proposal: Proposal | None = None
    forced: tuple[int, ...] = ()
    ends_prompt: bool = False

    @classmethod
    def decoding(cls, state: RequestState) -> Scheduled:
        """A request's last token, without a draft."""
        return cls(state, state.slot, state.num_computed, state.tokens[-1:], 1)

    @property
    def scored(self) -> bool:
        """Whether it needs logits; an embedding is made of hidden states alone."""
        return not self.state.request.embed

    @property
    def num_committed(self) -> int:
        """Number of the text's tokens that stay, whatever of the draft is rejected."""
        return self.start + 1 + len(self.forced)
