"""The KV cache's promises kept in lists of whole texts: an oracle without trie, nodes and counts.

A cached block is the text up to its end. Nothing here is fast, and nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import Node, common_prefix

Tokens = tuple[int, ...]


class Block(NamedTuple):
    """A block that requests may share, by whose it is and all tokens up to its end."""

    owner: str
    text: Tokens

    def continues(self, other: Block) -> bool:
        """Whether both follow the same blocks, and this one begins with the other's tokens."""
        blocks = {-(-len(item.text) // BLOCK_TOKENS) for item in (self, other)}
        same = self.owner == other.owner and len(blocks) == 1
        return same and self.text[: len(other.text)] == other.text


@dataclass
class Slot:
    """A request: its tokens, how many are final, and how many blocks nobody else may hold."""

    owner: str | None
    tokens: Tokens
    length: int = 0
    own: int = 0

    @property
    def shared(self) -> list[Block]:
        """The full blocks of final tokens, which others may hold as well."""
        if self.owner is None:
            return []
        ends = range(BLOCK_TOKENS, self.length + 1, BLOCK_TOKENS)
        return [Block(self.owner, self.tokens[:end]) for end in ends]


class NaiveCache:
    """Blocks that finished requests left, the least recently used one first, and the slots."""

    def __init__(self, num_blocks: int, *, recurrent: bool = False) -> None:
        self.num_blocks = num_blocks
        self.least_common = 1 if recurrent else 8  # as docs/serving.md says
        self.recurrent = recurrent
        self.cached: list[Block] = []
        self.slots: dict[int, Slot] = {}

    @property
    def held(self) -> list[Block]:
        """The shared blocks of all slots, each as often as it is held."""
        return [block for slot in self.slots.values() for block in slot.shared]

    @property
    def used(self) -> int:
        """Number of blocks that requests hold."""
        return len({*self.held}) + sum(slot.own for slot in self.slots.values())

    def allocate(self, slot: int, tokens: Tokens, owner: str | None) -> None:
        self.slots[slot] = Slot(owner, tokens)

    def match(self, slot: int, tokens: Tokens, snapshots: Sequence[Snapshot] = ()) -> int:
        """Take over the longest beginning that is known; returns the number of tokens held."""
        held = self.slots[slot]
        held.tokens = tokens
        if held.owner is None:
            return held.length
        texts = [block.text for block in (*self.cached, *self.held) if block.owner == held.owner]
        running = [item for item in self.slots.values() if item.owner == held.owner]
        texts += [item.tokens[: item.length] for item in running]
        end = max(common_prefix(text, tokens[:-1]) for text in texts)
        if self.recurrent:
            matchable_len = (item.matchable_len(held.owner, tokens, end) for item in snapshots)
            end = max(matchable_len, default=0)
        start = end - end % BLOCK_TOKENS
        new = Slot(held.owner, tokens, start).shared[len(held.shared) :]
        own = max(0, held.own - len(new))
        if end > start:
            worth = end - max(start, held.length) >= self.least_common
            available = self.num_blocks - len({*self.held, *new})
            available -= sum(item.own for item in self.slots.values())
            if not worth or not (held.own > len(new) or available):
                end = 0 if self.recurrent else start
        if end > held.length:
            self.cached = [block for block in self.cached if block not in new]
            held.length, held.own = end, own
            if end > start and not own:
                self.take(slot)
        return held.length

    def take(self, slot: int) -> None:
        """Give a slot a block of its own."""
        self.slots[slot].own += 1
        if self.used + len(self.cached) > self.num_blocks:
            del self.cached[0]

    def reserve(self, slot: int, length: int) -> bool:
        held = self.slots[slot]
        missing = -(-length // BLOCK_TOKENS) - len(held.shared) - held.own
        if missing > self.num_blocks - self.used:
            return False
        for _ in range(missing):
            self.take(slot)
        return True

    def commit(self, slot: int, tokens: Tokens, length: int) -> None:
        held = self.slots[slot]
        before = len(held.shared)
        held.tokens, held.length = tokens, length
        for block in held.shared[before:]:
            held.own -= 1
            self.cached = [item for item in self.cached if not block.continues(item)]

    def release(self, slot: int) -> None:
        left = self.slots.pop(slot)
        part = left.length % BLOCK_TOKENS
        if left.owner is not None and part >= self.least_common:
            self.cache(Block(left.owner, left.tokens[: left.length]))
        for block in reversed(left.shared):
            if block not in self.held:
                self.cached.append(block)

    def cache(self, new: Block) -> None:
        """Cache a block that is not full, if no other one begins with its tokens."""
        if longer := [block for block in (*self.cached, *self.held) if block.continues(new)]:
            new = min(longer)
            if new not in self.cached:
                return
        self.cached = [block for block in self.cached if not new.continues(block)]
        self.cached.append(new)


class Snapshot(NamedTuple):
    """A snapshot by all its tokens."""

    owner: str
    text: Tokens
    least: int

    def matchable_len(self, owner: str, tokens: Tokens, most: int) -> int:
        length = min(common_prefix(self.text, tokens), most)
        return length if owner == self.owner and length >= self.least else 0


def check_integrity(cache: KvCache) -> list[Snapshot]:
    """Assert that each block and each snapshot is in one place, as it is counted; see fuzzers.

    Returns:
        The snapshots.
    """
    slots = [slot for slot in cache._slots if slot is not None]
    nodes: list[tuple[str, Tokens, Node]] = []
    waiting = [(name, (), root) for name, root in cache._prefixes._roots.items()]
    for name, text, parent in waiting:
        order = [node.tokens for node in parent.children]
        assert order == sorted(order)
        assert not any(one == other[: len(one)] for one, other in pairwise(order))
        for node in parent.children:
            assert node.parent is parent
            assert node.end == parent.end + len(node.tokens)
            nodes.append((name, text + node.tokens, node))
            waiting.append(nodes[-1])
    for row, slot in enumerate(cache._slots):
        if slot is not None:
            assert cache.block_tables[row, : len(slot.blocks)].tolist() == slot.blocks
            assert [node.block for node in slot.nodes] == slot.blocks[: len(slot.nodes)]
            assert slot.length <= slot.end
    own = [block for slot in slots for block in slot.blocks[len(slot.nodes) :]]
    blocks = [*own, *(node.block for _, _, node in nodes), *cache._pool._free]
    assert sorted(blocks) == list(range(cache.num_blocks))
    assert {*cache._prefixes._cached} == {node for _, _, node in nodes if not node.ref_count}
    for _, _, node in nodes:
        assert node.ref_count == sum(node in slot.nodes for slot in slots)
        assert node.ref_count or not any(child.ref_count for child in node.children)
        assert len(node.tokens) == BLOCK_TOKENS or not (node.ref_count or node.children)
    assert cache.shared_blocks == sum(node.ref_count > 1 for _, _, node in nodes)
    assert cache.cached_tokens == sum(len(node.tokens) for node in cache._prefixes._cached)
    if cache.recurrent is None:
        return []
    kept = [(*place, item) for *place, node in waiting for item in node.snapshots]
    assert {item for *_, item in kept} == {*cache.recurrent._snapshots}
    assert all(item.node.end <= item.least <= item.end for *_, item in kept)
    assert cache.recurrent.used_bytes == sum(item.nbytes for *_, item in kept)
    assert cache.recurrent.used_bytes <= cache.recurrent.snapshot_bytes
    return [Snapshot(name, text + item.tail, item.least) for name, text, item in kept]
