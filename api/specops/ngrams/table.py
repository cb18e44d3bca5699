"""Makes tables of n-grams: the most frequent successor of one to three tokens in a model's texts.

A lookup takes microseconds, and finds continuations that neither the request nor earlier ones
contain. `runtime/suffixes.py` describes the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specops.ngrams.storage import Conversation

_LONGEST = 3  # maximum number of tokens in a key
_LOAD = 0.75  # load factor of the hash table
_MIN_COUNT = 2  # rarer successors are chance
_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint64]


def make_table(conversations: Sequence[Conversation]) -> Words:
    """Count which token followed most often in the answers of conversations.

    Returns:
        The table [n]. A longer n-gram is only in it if it predicts another token than its suffix.
    """
    parts, shorter = [], None
    for order in range(1, _LONGEST + 1):
        counted = _counted(conversations, order)
        kept = slice(None) if shorter is None else counted.differs(shorter)
        often = np.clip(counted.shares[kept] * 256, 1, 255).astype(np.uint64)
        said = counted.following[kept] << np.uint64(8) | often
        parts.append((counted.hashes[kept], said))
        shorter = counted
    hashes, said = (np.concatenate(part) for part in zip(*parts, strict=True))
    size = max(1, int(len(hashes) / _LOAD))
    homes = ((hashes >> _HALF) * np.uint64(size) >> _HALF).astype(np.int64)
    by_home = np.argsort(homes, kind="stable")
    # Linear probing: each entry takes the first free place from its home on.
    ranks = np.arange(len(homes))
    places = np.maximum.accumulate(homes[by_home] - ranks) + ranks
    table = np.zeros(max(size, int(places.max(initial=0)) + 1) + 2, np.uint64)
    table[0] = size
    table[1 + places] = (hashes << _HALF | said)[by_home]
    return table


class _Counted(NamedTuple):
    """N-grams of one length.

    Attributes:
        hashes: [n], sorted.
        endings: [n], hashes of all their tokens but the first.
        following: [n], the most frequent successors.
        shares: [n], how often these followed, 0 to 1.
    """

    hashes: Words
    endings: Words
    following: Words
    shares: npt.NDArray[np.float64]

    def differs(self, shorter: _Counted) -> npt.NDArray[np.bool_]:
        """[n], whether each predicts another token than its ending does."""
        at = np.searchsorted(shorter.hashes, self.endings)
        hashes, following = (np.append(one, np.uint64(0)) for one in shorter[::2])
        other: npt.NDArray[np.bool_] = hashes[at] != self.endings
        other |= following[at] != self.following
        return other


def _counted(conversations: Sequence[Conversation], order: int) -> _Counted:
    said = (np.concatenate((item.prompt[-order:], item.tokens)) for item in conversations)
    windows = [
        np.lib.stride_tricks.sliding_window_view(tokens, order + 1)
        for tokens in said
        if len(tokens) > order
    ]
    rows = np.concatenate(windows).astype(np.uint64)
    hashes, following = _hash(rows[:, :order]), rows[:, order]
    _, first, counts = np.unique(
        hashes * _GOLDEN ^ following, return_index=True, return_counts=True
    )
    by_count = np.lexsort((-counts, hashes[first]))
    first, counts = first[by_count], counts[by_count]
    found, at = np.unique(hashes[first], return_index=True)
    totals, best = np.add.reduceat(counts, at), counts[at]
    kept = best >= _MIN_COUNT
    first, at = first[at][kept], at[kept]
    shares = (best[kept] - 0.5) / (totals[kept] + 0.5)
    return _Counted(found[kept], _hash(rows[first, 1:order]), following[first], shares)


def _hash(grams: Words) -> Words:
    """Hashes of n-grams [n, order], as in `kernels/suffixes.c`."""
    word = np.full(len(grams), grams.shape[1], np.uint64)
    for column in grams.T:
        word = (word ^ column) * _GOLDEN
    return (word ^ word >> np.uint64(29)) * _MIX
