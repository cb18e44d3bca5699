"""What a head is trained on: positions of conversations, with what the target thinks comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.heads.shards import Conversation
from specops.runtime.sampling import Floats

_LABELS = 8  # likeliest tokens that are kept of a distribution
_PIECE = 1024  # positions, about, whose distributions are computed at a time
_HELD_OUT = 10  # every such conversation is never trained on


def held_out(conversation: Conversation) -> bool:
    """Whether a conversation is for measuring alone."""
    return conversation.number % _HELD_OUT == 0


def frequent_tokens(conversations: Iterable[Conversation], most: int) -> list[int]:
    """The tokens that are written most often, the most frequent first."""
    counts = Counter[int]()
    for conversation in conversations:
        counts.update(conversation.tokens.tolist())
    return [token for token, _ in counts.most_common(most)]


@dataclass(frozen=True, slots=True)
class Examples:
    """Positions [n], one conversation's behind the other's.

    Attributes:
        codes: [n], the last token's place in the table; the table's length stands for all others.
        states: [n, size] float16, that it was chosen by.
        labels: [n, 8], places of the likeliest next tokens.
        probs: [n, 8], of these.
        chosen: [n], the place of the token that did come next.
        followed: [n], whether the next position is the same conversation's.
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
        """Look at every position but a conversation's last, whose next token is not known.

        Args:
            conversations: at least one of two tokens.
            tokens: [V], those of the table.
            rows: [V, size], the target's output rows of them.
        """
        other, places = len(tokens), {token: place for place, token in enumerate(tokens)}
        table = torch.from_numpy(rows)
        told = [item for item in conversations if len(item.tokens) > 1]
        count = sum(len(item.tokens) - 1 for item in told)
        codes = [[places.get(token, other) for token in item.tokens.tolist()] for item in told]
        # Written in place: what a list holds meanwhile would stay between the freed distributions.
        labels = torch.empty(count, min(_LABELS, len(rows)), dtype=torch.int64)
        probs = torch.empty(labels.shape)
        done = 0
        for following in _pieces(told):
            piece = slice(done, done + len(following))
            labels[piece], probs[piece] = _likeliest(torch.from_numpy(following), table)
            done = piece.stop
        chosen = torch.tensor([code for one in codes for code in one[1:]])
        # A token that is not in the table was chosen for all of them.
        outside = chosen == other
        labels[outside, 0], probs[outside] = other, torch.eye(_LABELS)[0]
        return cls(
            torch.tensor([code for one in codes for code in one[:-1]]),
            torch.from_numpy(np.concatenate([item.states[:-1] for item in told])),
            labels,
            probs,
            chosen,
            torch.tensor([more for one in codes for more in [True] * (len(one) - 2) + [False]]),
        )


def _pieces(conversations: Iterable[Conversation]) -> Iterator[NDArray[np.float16]]:
    """The states behind the first of each conversation, of `_PIECE` positions or a few more."""
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
    """Places [n, 8] and probabilities [n, 8] of what follows the states [n, size]."""
    with torch.no_grad():
        found = torch.softmax(states.float() @ rows.T, -1).topk(min(_LABELS, len(rows)))
    return found.indices, found.values
