"""Draft tokens from what other requests said after the same few, where the own text has none.

Users of one service ask alike and get alike answers. What is shared can be observed: a request
that runs faster than expected tells that another client had the same words. So this is a drafter
of its own, off by default; a request that asks for another one neither reads the table nor
teaches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specops.speculation.drafters.base import NO_DRAFT, Draft, LookupDrafter
from specops.speculation.drafters.ngram import NgramDrafter

ORDER = 3
ENTRY_BYTES = 250  # at most: the key, its place in the order and the token, half-empty tables
_TOKEN_BITS = 32


class NgramTable:
    """The token that last followed each n-gram; the least recently used n-gram is forgotten.

    Args:
        entries: n-grams in memory, at least 1, `ENTRY_BYTES` each.
        order: tokens per n-gram, at least 1.
    """

    def __init__(self, entries: int, *, order: int = ORDER) -> None:
        if entries < 1 or order < 1:
            raise ValueError(f"{entries} entries of {order} tokens: at least 1 of 1")
        self.entries = entries
        self.order = order
        self._mask = (1 << _TOKEN_BITS * order) - 1
        self._next: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Take in what followed what, for the tokens from index `start` on."""
        start = max(start, self.order)
        key = self._key(tokens[start - self.order : start])
        following, mask = self._next, self._mask
        for token in tokens[start:]:
            following[key] = token
            following.move_to_end(key)
            key = (key << _TOKEN_BITS | token) & mask
        while len(following) > self.entries:
            following.popitem(last=False)

    def follow(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may come after `tokens`, as far as the table goes."""
        draft: list[int] = []
        if len(tokens) < self.order:
            return ()
        key = self._key(tokens[-self.order :])
        while len(draft) < count:
            token = self._next.get(key)
            if token is None:
                break
            self._next.move_to_end(key)
            draft.append(token)
            key = (key << _TOKEN_BITS | token) & self._mask
        return tuple(draft)

    def clear(self) -> None:
        """Forget everything."""
        self._next.clear()

    @staticmethod
    def _key(tokens: Sequence[int]) -> int:
        """The n-gram as one number: half the memory of a tuple, and it can be rolled on."""
        key = 0
        for token in tokens:
            key = key << _TOKEN_BITS | token
        return key


class NgramCacheDrafter(LookupDrafter):
    """Asks the request's own tokens first, then what all requests said.

    Args:
        own: looks up in the request itself; this drafter's alone, since it keeps its slots.
        entries: see `NgramTable`.
        order: likewise.
    """

    name = "ngram_cache"

    def __init__(self, own: NgramDrafter, *, entries: int, order: int = ORDER) -> None:
        self.table = NgramTable(entries, order=order)
        self._own = own
        self._taught: dict[int, int] = {}  # slot: how many of its tokens the table has seen

    def look_up(self, slot: int, tokens: Sequence[int], count: int) -> Draft:
        """Look the last tokens up; see `Drafter.look_up`. Teaches the table what is new."""
        self.table.learn(tokens, self._taught.get(slot, 0))
        self._taught[slot] = len(tokens)
        draft = self._own.look_up(slot, tokens, count)
        if draft.tokens:
            return Draft(draft.tokens, origin=self._own.name, match_length=draft.match_length)
        shared = self.table.follow(tokens, count)
        return Draft(shared, match_length=self.table.order) if shared else NO_DRAFT

    def release(self, slot: int) -> None:
        """Forget a slot; what it taught stays."""
        self._own.release(slot)
        self._taught.pop(slot, None)

    def clear(self) -> None:
        """Forget what the requests so far taught."""
        self.table.clear()
