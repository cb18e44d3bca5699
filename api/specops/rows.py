"""Which sequence is in which row of the cache, and what finished ones have left there.

Rows that decode are kept compact from row 0 on, since one pass takes adjacent rows; prompts are
read in any other row. A finished sequence's keys and values stay until its row is needed: a
request that begins alike takes that row, or a copy of the common beginning, and only the rest of
its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from specops.kv_cache import KvCache, common_prefix
from specops.sequence import Sequence

_LEAST = 8  # tokens in common from which on they are worth a copy
_CONTINUED = 0.5  # share of what a row holds from which on a request is taken to go on with it


class PrefixCache(StrEnum):
    """Whose prompts may begin with what another request has computed."""

    OFF = "off"  # nobody's
    CLIENT = "client"  # those of the same client: how fast an answer comes tells nobody else
    ALL = "all"


class Slot:
    """A place for one sequence. Its row changes, its number does not: drafters go by that.

    Attributes:
        number: from 0 on.
        row: of the target's cache.
        sequence: who has the place; None: it is free.
        tokens: what a free slot's row holds.
        client: whose tokens they are.
        exact: leading tokens of the row whose keys and values are, to the bit, what a request with
            `exact` would compute; beyond, passes of other widths have written.
        used: when it was last of use, in such uses until then.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.row = number
        self.sequence: Sequence | None = None
        self.tokens: list[int] = []
        self.client = ""
        self.exact = 0
        self.used = 0

    @property
    def taken(self) -> Sequence:
        """The sequence of a slot that is in use.

        Raises:
            ValueError: it is free.
        """
        if self.sequence is None:
            raise ValueError(f"nobody has slot {self.number}")
        return self.sequence


class Rows:
    """Gives sequences their rows. Used by the engine's thread.

    Args:
        cache: the target's.
        reuse: whose tokens may be used again.
        one_graph: prompts are computed by the graph that decodes.
    """

    def __init__(self, cache: KvCache, *, reuse: PrefixCache, one_graph: bool = True) -> None:
        self.reuse = reuse
        self.prefilling: list[Slot] = []  # in the order of their coming
        self.decoding: list[Slot] = []  # by row: the first is in row 0
        self._cache = cache
        self._one_graph = one_graph
        self._slots = [Slot(number) for number in range(cache.rows)]
        self._uses = 0

    def __len__(self) -> int:
        """Rows in use."""
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Slot]:
        """The slots in use."""
        yield from self.decoding
        yield from self.prefilling

    @property
    def full(self) -> bool:
        """No row is free."""
        return len(self) == len(self._slots)

    @property
    def tokens(self) -> int:
        """Tokens of running requests in the cache."""
        return sum(self._cache.lengths[slot.row] for slot in self)

    @property
    def kept_tokens(self) -> int:
        """Tokens that finished requests have left in the cache."""
        return self._cache.tokens - self.tokens

    def take(self, sequence: Sequence) -> Slot:
        """Give a sequence the free slot that suits it best; see `share` for what it then holds."""
        free = [slot for slot in self._slots if slot.sequence is None]
        slot = min(free, key=lambda item: (len(item.tokens) > 0, item.used))
        usable = {item: self._usable(item, sequence) for item in free}
        best = max(free, key=usable.__getitem__)
        if usable[best] >= max(_LEAST, _CONTINUED * len(best.tokens)):
            slot = best
        same = usable[slot]
        self._begin(slot, sequence, same if same >= _LEAST else 0, slot.exact)
        slot.sequence, slot.client, slot.tokens = sequence, sequence.request.client, []
        sequence.slot = slot.number
        self.prefilling.append(slot)
        return slot

    def share(self, slot: Slot) -> Slot:
        """Copy the beginning of a prompt from another row that holds more of it than its own.

        Of use as long as no pass was made for the prompt: who came at the same time with the same
        beginning may have it computed meanwhile.

        Returns:
            The slot whose tokens the prompt begins with; the slot itself where none has more.
        """
        sequence = slot.taken
        usable = {item: self._usable(item, sequence) for item in self._slots}
        best = max(self._slots, key=usable.__getitem__)
        same = usable[best]
        if best is slot or same < self._cache.lengths[slot.row] + _LEAST:
            return slot
        self._cache.copy(best.row, slot.row, same)
        self._begin(slot, sequence, same, best.exact)
        self._used(best)
        return best

    def prompt_read(self, slot: Slot) -> None:
        """The slot's prompt is in the cache: its row joins those that decode."""
        self.prefilling.remove(slot)
        self._change_places(slot, self._in_row(len(self.decoding)))
        self.decoding.append(slot)

    def give_back(self, slot: Slot) -> None:
        """The slot's sequence has ended."""
        sequence = slot.taken
        # The cache may hold guesses behind the end, the sequence a last token that is in no cache.
        held = min(len(sequence.tokens), self._cache.lengths[slot.row])
        if self.reuse is PrefixCache.OFF:
            held = 0
        self._cache.truncate(slot.row, held)
        slot.sequence, slot.tokens = None, sequence.tokens[:held]
        self._used(slot)
        if slot in self.prefilling:
            self.prefilling.remove(slot)
            return
        last = self.decoding.pop()
        if last is not slot:
            self.decoding[slot.row] = last
            self._change_places(slot, last)

    def _begin(self, slot: Slot, sequence: Sequence, same: int, exact: int) -> None:
        """The row holds the first `same` tokens of the prompt, `exact` of them like exact ones."""
        self._cache.truncate(slot.row, same)
        sequence.prefilled = sequence.cached = same
        if exact < same:
            slot.exact = exact
        elif sequence.request.exact and self._one_graph:
            slot.exact = self._cache.capacity
        else:
            slot.exact = len(sequence.request.prompt_tokens)

    def _usable(self, slot: Slot, sequence: Sequence) -> int:
        """Tokens of a row that the sequence can begin with; its prompt's last is always computed.

        Whoever asks for exact output gets nothing that was computed in another way.
        """
        request = sequence.request
        if self.reuse is PrefixCache.OFF:
            return 0
        if self.reuse is PrefixCache.CLIENT and slot.client != request.client:
            return 0
        tokens = slot.tokens if slot.sequence is None else slot.sequence.tokens
        most = min(self._cache.lengths[slot.row], len(request.prompt_tokens) - 1)
        if request.exact:
            most = min(most, slot.exact)
        return common_prefix(tokens[:most], request.prompt_tokens)

    def _used(self, slot: Slot) -> None:
        self._uses += 1
        slot.used = self._uses

    def _in_row(self, row: int) -> Slot:
        return next(slot for slot in self._slots if slot.row == row)

    def _change_places(self, slot: Slot, other: Slot) -> None:
        if slot is not other:
            self._cache.swap(slot.row, other.row)
            slot.row, other.row = other.row, slot.row
