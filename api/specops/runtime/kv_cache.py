"""The KV cache: which blocks each slot has, shared where requests begin alike.

A slot's keys and values lie in blocks of 64 tokens, found through its row of `block_tables`. Full
blocks of final tokens are registered in a trie, so that requests with the same beginning hold the
same blocks. No slot writes to a registered block: a slot that goes on inside of one gets a copy
first. A rollback is a smaller length: what lies beyond is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from specops.runtime import kernels
from specops.runtime.block_pool import BlockPool
from specops.runtime.cache_slot import CacheSlot
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.prefix_trie import Node, PrefixTrie, common_prefix

LEAST_COMMON = 8  # tokens of a partly equal block from which on it is worth a copy


class PrefixCache(StrEnum):
    """Whose prompts may begin with what another request has computed."""

    OFF = "off"  # of no request
    CLIENT = "client"  # those of the same client: how fast an answer comes tells no other client
    ALL = "all"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model's cache is like; `dtype` is one of `kernels.KV_DTYPES`."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Keys and values of 64 tokens in all layers, in bytes."""
        return kernels.block_bytes(self.layers, self.kv_heads, self.head_size, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Its share of a block, in bytes."""
        return self.block_bytes // BLOCK_TOKENS


class KvCache:
    """Keys and values of up to `num_slots` requests in a pool of blocks. Used by one thread.

    Args:
        shape: what the model fixes.
        num_blocks: blocks of the pool, all requests together.
        num_slots: requests at the same time.
        context: most tokens of one request.
        reuse: whose blocks may be shared.

    Attributes:
        block_tables: [num_slots, blocks of a context] int64, written in place.
        descriptor: [4] int64, the operator's input `cache`: address of the pool, number of
            blocks, bytes of a block, element type.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_blocks: int,
        num_slots: int,
        context: int,
        reuse: PrefixCache = PrefixCache.CLIENT,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.context = context
        self.reuse = reuse
        self._pool = BlockPool(num_blocks, shape.block_bytes)
        self._trie = PrefixTrie(self._pool.give)
        self._slots: list[CacheSlot | None] = [None] * num_slots
        self.block_tables: npt.NDArray[np.int64] = np.zeros(
            (num_slots, _blocks_for(context)), np.int64
        )
        element = kernels.KV_DTYPES[shape.dtype]
        self.descriptor: npt.NDArray[np.int64] = np.array(
            [self._pool.address, num_blocks, shape.block_bytes, element], np.int64
        )

    @property
    def available_blocks(self) -> int:
        """Blocks that `reserve` can still get: free ones and kept ones."""
        return self._pool.num_free + self._trie.kept

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.available_blocks

    @property
    def shared_blocks(self) -> int:
        """Blocks that more than one request holds, each counted once."""
        return self._trie.shared

    @property
    def kept_blocks(self) -> int:
        """Blocks that finished requests have left."""
        return self._trie.kept

    @property
    def kept_tokens(self) -> int:
        """Tokens in kept blocks."""
        return self._trie.kept_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the slots in use, shared ones counted for each."""
        return sum([slot.length for slot in self._slots if slot is not None])

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes, touched or not."""
        return self.num_blocks * self.shape.block_bytes

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._held(slot).length

    def writable(self, slot: int) -> tuple[int, int]:
        """The positions, from the first up to but without the second, that a pass may write."""
        held = self._held(slot)
        return len(held.nodes) * BLOCK_TOKENS, held.end

    def begin(
        self, slot: int, tokens: Sequence[int], client: str = "", *, share: bool = True
    ) -> int:
        """Take a free slot, with the longest beginning of a request's tokens that is there.

        Whole blocks are shared; one that is equal in part is copied, or taken over where it
        holds nothing else. The last token is always left to be computed.

        Args:
            slot: a free one.
            tokens: the request's prompt, and what it has generated if it was preempted.
            client: whose it is.
            share: take what is there, and leave its own to others.

        Returns:
            How many tokens the slot holds.

        Raises:
            ValueError: the slot is in use.
        """
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} is in use")
        root = None
        if share and self.reuse is not PrefixCache.OFF:
            root = self._trie.hold_root(client if self.reuse is PrefixCache.CLIENT else "")
        self._slots[slot] = CacheSlot(self._pool, self.block_tables[slot], root, tokens)
        return self.extend_prefix(slot, tokens)

    def extend_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        """Take more of the beginning, which others may have computed meanwhile.

        Args:
            slot: one whose tokens are all a beginning of `tokens`.
            tokens: see `begin`.

        Returns:
            How many tokens the slot holds now.
        """
        held = self._held(slot)
        if held.seen == self._trie.version or held.root is None or held.tail < 0:
            return held.length
        most = min(len(tokens) - 1, self.context)
        parent = held.last
        while (end := (len(held.nodes) + 1) * BLOCK_TOKENS) <= most and parent is not None:
            node = parent.children.get(tuple(tokens[end - BLOCK_TOKENS : end]))
            if node is None:
                break
            self._trie.hold(node)
            held.share(node)
            held.length = end
            parent = node
        self._take_part(held, tokens, most)
        held.tokens = tokens
        held.seen = self._trie.version
        return held.length

    def reserve(self, slot: int, length: int) -> bool:
        """Make the positions from the slot's length up to `length` writable.

        Returns:
            False: there is no block to be had, and nothing has changed.

        Raises:
            ValueError: it is more than the context.
        """
        held = self._held(slot)
        if length <= held.end and held.tail >= 0:
            return True
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit into a context of {self.context}")
        wanted = _blocks_for(length) - len(held.blocks)
        copied = held.tail < 0 and not held.nodes[-1].alone
        if max(0, wanted) + copied > self.available_blocks:
            return False
        if held.tail < 0:
            self._own_last(held)
        for _ in range(wanted):
            held.append(self._new_block())
        return True

    def commit(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Say what a slot holds: the first `length` of `tokens` are computed and final.

        Blocks that became full are registered, or exchanged for an equal one that is. A smaller
        length than before is a rollback.

        Args:
            slot: the slot.
            tokens: not copied: the first `length` must stay as they are until the next commit or
                release.
            length: how many.

        Raises:
            ValueError: there are not so many tokens, or their positions were never reserved.
        """
        held = self._held(slot)
        if not 0 <= length <= len(tokens):
            raise ValueError(f"{length} of {len(tokens)} tokens cannot be computed")
        if length < held.length:
            self._roll_back(held, length)
        elif length > held.length and (held.tail < 0 or length > held.end):
            raise ValueError(f"slot {slot} has no place for {length} tokens")
        held.length = length
        held.tokens = tokens
        if length >= held.register_at:
            self._register(held)

    def release(self, slot: int) -> None:
        """Free a slot. What was committed is kept, unless nothing is shared."""
        held = self._held(slot)
        if held.root is not None and held.last is not None:
            if held.tail >= LEAST_COMMON:
                held.give_back(_blocks_for(held.length))
                part = tuple(held.tokens[len(held.nodes) * BLOCK_TOKENS : held.length])
                self._trie.keep(held.last, part, held.blocks.pop())
            for node in held.drop_nodes(0):
                self._trie.release(node)
            self._trie.release_root(held.root)
        held.give_back(0)
        self._slots[slot] = None

    def _held(self, slot: int) -> CacheSlot:
        held = self._slots[slot]
        if held is None:
            raise ValueError(f"slot {slot} is free")
        return held

    def _new_block(self) -> int:
        """A block of the pool; the caller has made sure that there is one."""
        block = self._pool.take()
        if block is None and self._trie.evict():
            block = self._pool.take()
        if block is None:
            raise RuntimeError("the KV cache has lost count of its blocks")
        return block

    def _own_last(self, held: CacheSlot) -> None:
        """Make the block that a rolled-back slot ends in its own, so that it can be written."""
        node = held.nodes[-1]
        if node.alone:
            self._trie.detach(node)
            held.own_last(node.block)
        else:
            block = self._new_block()
            self._pool.copy(node.block, block)
            self._trie.release(held.own_last(block))

    def _roll_back(self, held: CacheSlot, length: int) -> None:
        needed = _blocks_for(length)
        if len(held.nodes) > needed:
            for node in held.drop_nodes(needed):
                self._trie.release(node)
        else:
            held.give_back(needed)

    def _register(self, held: CacheSlot) -> None:
        """Make blocks that are full findable."""
        while (end := held.register_at) <= held.length and held.last is not None:
            parent, block = held.last, held.blocks[len(held.nodes)]
            tokens = tuple(held.tokens[end - BLOCK_TOKENS : end])
            node = parent.children.get(tokens)
            if node is None:
                node = self._trie.insert(parent, tokens, block)
            else:  # another request has computed the same
                self._trie.hold(node)
            held.share(node)

    def _take_part(self, held: CacheSlot, tokens: Sequence[int], most: int) -> None:
        """Begin the slot's next block with what another one has in common with it."""
        parent, index = held.last, len(held.nodes)
        start = index * BLOCK_TOKENS
        wanted = tuple(tokens[start : start + BLOCK_TOKENS])
        least = held.tail + LEAST_COMMON
        if parent is None or min(len(wanted), most - start) < least:
            return
        node, common = self._trie.closest(parent, wanted)
        source = -1 if node is None else node.block
        for other in self._slots:  # what is not full yet is in no trie
            if other is not None and other.last is parent and other.tail > common:
                same = common_prefix(other.tokens[start : other.length], wanted)
                if same > common:
                    node, source, common = None, other.blocks[index], same
        common = min(common, most - start)
        if common < least:
            return
        if node is not None and node.only_begins(wanted):
            self._trie.detach(node)
            held.put(index, source)
        elif not self._copy(held, node, source):
            return
        held.length = start + common

    def _copy(self, held: CacheSlot, node: Node | None, source: int) -> bool:
        """Copy a block, a node's if it has one, into the slot's own next; False: there is none."""
        index = len(held.nodes)
        if node is not None:
            self._trie.hold(node)  # so that it is not what is evicted for its copy
        room = index < len(held.blocks) or self.available_blocks > 0
        if index == len(held.blocks) and room:
            held.append(self._new_block())
        if node is not None:
            self._trie.release(node)
        if room:
            self._pool.copy(source, held.blocks[index])
        return room


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
