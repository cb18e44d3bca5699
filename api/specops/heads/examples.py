"""Training data of a head: positions of conversations, with the target's next distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.heads.storage import Conversation
from specops.runtime.sampling import Floats

_LABELS = 8  # number of likeliest tokens kept of a distribution
_PIECE = 1024  # approximate number of positions whose distributions are computed at a time
_HELD_OUT = 10  # one conversation of so many is held out


def held_out(conversation: Conversation) -> bool:
    """Whether a conversation is used for measuring only."""
    return conversation.number % _HELD_OUT == 0


def frequent_tokens(conversations: Iterable[Conversation], most: int) -> list[int]:
    """Return the most frequent tokens, the most frequent one first."""
    counts = Counter[int]()
    for conversation in conversations:
        counts.update(conversation.tokens.tolist())
    return [token for token, _ in counts.most_common(most)]


@dataclass(frozen=True, slots=True)
class Examples:
    """Positions [n] of conversations, one conversation after the other.

    Attributes:
        codes: [n], index of the last token in the table; the table's length stands for all others.
        states: [n, size] float16, hidden state from which this token was chosen.
        labels: [n, 8], indices of the likeliest next tokens.
        probs: [n, 8], probabilities of these.
        chosen: [n], index of the actual next token.
        followed: [n], whether the next position belongs to the same conversation.
    """

    codes: Tensor
    states: Tensor
    labels: Tensor
    probs: Tensor
    chosen: Tensor
    followed: Tensor

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(
        cls, conversations: Sequence[Conversation], tokens: Sequence[int], rows: Floats
    ) -> Examples:
        """Make examples of all positions except the last of each conversation.

        Args:
            conversations: conversations, at least one with two tokens.
            tokens: [V], tokens of the table.
            rows: [V, size], the target's output rows of these tokens.
        """
        other, codes_of = len(tokens), {token: code for code, token in enumerate(tokens)}
        table = torch.from_numpy(rows)
        learnt = [item for item in conversations if len(item.tokens) > 1]
        count = sum(len(item.tokens) - 1 for item in learnt)
        codes = [[codes_of.get(token, other) for token in item.tokens.tolist()] for item in learnt]
        # Written in place: parts in a list would fragment the memory of the freed distributions.
        labels = torch.empty(count, min(_LABELS, len(rows)), dtype=torch.int64)
        probs = torch.empty(labels.shape)
        done = 0
        for following in _pieces(learnt):
            piece = slice(done, done + len(following))
            labels[piece], probs[piece] = _likeliest(torch.from_numpy(following), table)
            done = piece.stop
        chosen = torch.tensor([code for one in codes for code in one[1:]])
        # Tokens outside of the table share the last index.
        outside = chosen == other
        labels[outside, 0], probs[outside] = other, torch.eye(_LABELS)[0]
        return cls(
            torch.tensor([code for one in codes for code in one[:-1]]),
            torch.from_numpy(np.concatenate([item.states[:-1] for item in learnt])),
            labels,
            probs,
            chosen,
            torch.tensor([more for one in codes for more in [True] * (len(one) - 2) + [False]]),
        )


def _pieces(conversations: Iterable[Conversation]) -> Iterator[NDArray[np.float16]]:
    """Yield the states after the first of each conversation, about `_PIECE` at a time."""
    held, count = list[NDArray[np.float16]](), 0
    for item in conversations:
        held.append(item.states[1:])
        count += len(held[-1])
        if count >= _PIECE:
            yield np.concatenate(held)
            held, count = [], 0
    if held:
        yield np.concatenate(held)


def _likeliest(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices [n, 8] and probabilities [n, 8] of the next tokens of states [n, size]."""
    with torch.no_grad():
        top = torch.softmax(states.float() @ rows.T, -1).topk(min(_LABELS, len(rows)))
    return top.indices, top.values
