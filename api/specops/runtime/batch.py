"""The input of one forward pass: the tokens of several requests, one span per request.

A span is the next tokens of one slot: a single token in plain decoding, a token followed by its
draft tokens, or a chunk of a prompt. A pass takes any mix of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Consecutive tokens of one slot.

    Attributes:
        slot: the slot's number.
        start: position of the first token.
        tokens: token ids, at least one.
        num_logits: number of tokens that need logits; always the last ones of the span.
        num_committed: in models with recurrent states, the number of the slot's tokens that can no
            longer be rejected; None: all up to the span's end.
        scored: False if these tokens need their last hidden states instead of logits.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    num_committed: int | None = None
    scored: bool = True


class Batch:
    """The spans of one pass, in the order in which they were added.

    Attributes:
        spans: one per slot.
        tokens: token ids of all spans, concatenated.
        logit_rows: indices into `tokens` of the tokens that need logits or last hidden states,
            ascending.
        attention_work: number of token pairs in attention, the sum of n * (start + n / 2).
        hidden: whether the pass returns the last hidden states of `logit_rows`.
    """

    __slots__ = ("_slots", "attention_work", "hidden", "logit_rows", "spans", "tokens")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tokens: list[int] = []
        self.logit_rows: list[int] = []
        self.attention_work = 0.0
        self.hidden = False
        self._slots: set[int] = set()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the pass."""
        return len(self.tokens)

    @property
    def num_logits(self) -> int:
        """Number of tokens that need logits."""
        return len(self.scored_rows)

    @property
    def scored_rows(self) -> Sequence[int]:
        """Indices into `logit_rows` of the tokens that need logits."""
        if not self.hidden:
            return range(len(self.logit_rows))
        scored = [span.scored for span in self.spans for _ in range(span.num_logits)]
        return [row for row, needed in enumerate(scored) if needed]

    def add(
        self,
        slot: int,
        start: int,
        tokens: Sequence[int],
        num_logits: int = 0,
        num_committed: int | None = None,
        *,
        scored: bool = True,
    ) -> None:
        """Add a span; see `Span`.

        Raises:
            ValueError: the span is empty, has more logits than tokens, or is the slot's second.
        """
        count = len(tokens)
        if not 0 <= num_logits <= count or not count:
            raise ValueError(f"a span of {count} tokens cannot have {num_logits} logits")
        if slot in self._slots:
            raise ValueError(f"slot {slot} has a span in this pass already")
        self._slots.add(slot)
        self.spans.append(Span(slot, start, tokens, num_logits, num_committed, scored))
        self.tokens += tokens
        end = len(self.tokens)
        if num_logits == 1:  # plain decoding: a range would take longer than all the rest here
            self.logit_rows.append(end - 1)
        else:
            self.logit_rows += range(end - num_logits, end)
        self.hidden |= not scored
        self.attention_work += count * (start + count / 2)
