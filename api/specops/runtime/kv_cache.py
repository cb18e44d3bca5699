"""The KV cache: gives each slot its blocks, and shares blocks between requests with one beginning.

A slot's keys and values lie in blocks of 64 tokens; the operator finds them through the slot's row
of `block_tables`. A pass writes positions that `reserve` has made room for. `commit` declares
tokens final, for good: rejected draft tokens are never committed, and the next pass overwrites
them. Full blocks of final tokens are registered in a trie, so requests with the same beginning hold
the same blocks; nobody writes to a registered block again. Where layers keep inputs beside keys and
values (`kept_inputs`), a request takes over a beginning only up to a place with a snapshot of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from specops.runtime import kernels
from specops.runtime.block_pool import ROLLBACK, BlockPool, CacheShape
from specops.runtime.kept_inputs import INTERVAL, KeptInputs
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.prefix_trie import Node, PrefixTrie, common_prefix

MIN_COMMON = 8  # fewer common tokens in a block are not worth a copy
WORTH_A_PASS = 16
"""Fewer tokens take no longer than one more pass: to cut a prompt, or to wait for another one's."""


class PrefixCache(StrEnum):
    """Which requests share blocks."""

    OFF = "off"  # none
    CLIENT = "client"  # those of one client: no client learns from times what another one asked
    ALL = "all"


class _Slot:
    """One request's blocks: the registered ones, which other slots may hold as well, then its own.

    Args:
        pool: where the slot gives blocks back.
        table: the slot's row of the block tables; the slot writes it in place.
        root: the client's root in the trie; None: the slot shares nothing.
        tokens: tokens of the request.

    Attributes:
        tokens: the request's tokens, as last passed in.
        length: number of tokens that are computed and final; they come first.
        blocks: numbers of all blocks, those of `nodes` first.
        nodes: the registered blocks; all are full.
        registered: number of tokens in them.
        end: number of positions in all its blocks.
        seen_version: the cache's version in which the slot last looked for its prefix.
        prompt: number of tokens with which the request began.
        branch: where a cached beginning without a snapshot ended: one is taken there.
        borders: where messages of the prompt end, if a snapshot is to be taken there.
    """

    def __init__(
        self,
        pool: BlockPool,
        table: npt.NDArray[np.int64],
        root: Node | None,
        tokens: Sequence[int],
    ) -> None:
        self._pool = pool
        self._table = table
        self.root = root
        self.tokens = tokens
        self.length = 0
        self.blocks: list[int] = []
        self.nodes: list[Node] = []
        self.registered = self.end = 0
        self.seen_version = -1
        self.prompt = len(tokens)
        self.branch = 0
        self.borders: Sequence[int] = ()

    @property
    def last(self) -> Node | None:
        """The last registered block, else the root."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def tail(self) -> int:
        """Number of final tokens behind the registered blocks."""
        return self.length - self.registered

    def put(self, index: int, block: int) -> None:
        """Make a block the slot's own at an index; give back the block that was there."""
        if index < len(self.blocks) and self.blocks[index] != block:
            self._pool.give(self.blocks[index])
        self.blocks[index : index + 1] = [block]
        self.end = len(self.blocks) * BLOCK_TOKENS
        self._table[index] = block

    def share(self, node: Node) -> None:
        """Make a registered block, which the caller holds, the next one."""
        self.put(len(self.nodes), node.block)
        self.nodes.append(node)
        self.registered += BLOCK_TOKENS


class KvCache:
    """Keys and values of up to `num_slots` requests in a pool of blocks. For one thread.

    Args:
        shape: sizes of the model's cache.
        num_blocks: number of blocks in the pool, for all requests together.
        num_slots: maximum number of concurrent requests.
        context: maximum number of tokens per request.
        reuse: which requests share blocks.
        snapshot_bytes: bound of the snapshots of what layers keep beside keys and values; None: as
            many as are of use.
        end_tokens: tokens that end messages; a chat's next prompt may differ from there on.

    Attributes:
        kept_inputs: what layers keep beside keys and values; None: nothing.
        block_tables: [num_slots, blocks of a context] int64; the cache writes them in place.
        descriptor: [4] int64, the operator's input `cache`: the pool's address, number of blocks,
            bytes of a block, element type.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_blocks: int,
        num_slots: int,
        context: int,
        reuse: PrefixCache = PrefixCache.CLIENT,
        snapshot_bytes: int | None = None,
        end_tokens: Collection[int] = (),
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.context = context
        self.reuse = reuse
        self._end_tokens = end_tokens
        self._pool = BlockPool(num_blocks, shape.block_bytes)
        self._trie = PrefixTrie(self._pool.give)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._places = 0  # how often `take_snapshot` was called
        self.kept_inputs = (
            KeptInputs(shape, num_slots, snapshot_bytes) if shape.kept_floats else None
        )
        tables = num_slots, _blocks_for(context)
        self.block_tables: npt.NDArray[np.int64] = np.zeros(tables, np.int64)
        numbers = self._pool.address, num_blocks, shape.block_bytes, kernels.KV_DTYPES[shape.dtype]
        self.descriptor: npt.NDArray[np.int64] = np.array(numbers, np.int64)

    @property
    def available_blocks(self) -> int:
        """Blocks that `reserve` can still take: free blocks and kept blocks."""
        return self._pool.num_free + self._trie.kept

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.available_blocks

    @property
    def shared_blocks(self) -> int:
        """Blocks that several requests hold, each counted once."""
        return self._trie.shared

    @property
    def kept_blocks(self) -> int:
        """Blocks that finished requests left and no request holds."""
        return self._trie.kept

    @property
    def kept_tokens(self) -> int:
        """Tokens in kept blocks."""
        return self._trie.kept_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all slots; a shared token counts once for each slot."""
        return sum([slot.length for slot in self._slots if slot is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, written or not."""
        return self.num_blocks * self.shape.block_bytes

    def length(self, slot: int) -> int:
        """Number of final tokens in a slot."""
        return self._held(slot).length

    def writable(self, slot: int) -> tuple[int, int]:
        """Positions that a pass may write: from the first number up to before the second."""
        held = self._held(slot)
        return held.registered, held.end

    def begin(
        self,
        slot: int,
        tokens: Sequence[int],
        client: str = "",
        *,
        share: bool = True,
        most: int | None = None,
    ) -> int:
        """Start a request in a free slot, with the longest cached beginning of its tokens.

        The slot shares whole blocks. It copies a block that agrees in part, or takes the block
        over if nothing else needs it. The last token is never taken from the cache: a pass has to
        compute it.

        Args:
            slot: a free slot.
            tokens: the prompt, and the generated tokens if the request was preempted.
            client: name of the client.
            share: whether the request uses others' blocks and leaves its own to them.
            most: largest number of tokens to take from the cache.

        Returns:
            Number of tokens that the slot holds.

        Raises:
            ValueError: the slot is in use.
        """
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} is in use")
        root = None
        if share and self.reuse is not PrefixCache.OFF:
            root = self._trie.hold_root(client if self.reuse is PrefixCache.CLIENT else "")
        self._slots[slot] = _Slot(self._pool, self.block_tables[slot], root, tokens)
        if self.kept_inputs is not None:
            self.kept_inputs.clear(slot)
        count = self.extend_prefix(slot, tokens, most)
        if self.kept_inputs is not None:
            self._held(slot).borders = self._borders(tokens, count)
        return count

    def cached(self, tokens: Sequence[int], client: str = "") -> int:
        """Number of a prompt's first tokens that `begin` would find now, in whole blocks."""
        root = self._trie.root(client if self.reuse is PrefixCache.CLIENT else "")
        if root is None:
            return 0
        _, end = _walk(root, tokens, 0, len(tokens) - 1)
        return end if self.kept_inputs is None else self.kept_inputs.longest(root, tokens, end)

    def extend_prefix(self, slot: int, tokens: Sequence[int], most: int | None = None) -> int:
        """Look again for a longer cached beginning: other requests may have computed it.

        Args:
            slot: a slot whose tokens are all a beginning of `tokens`.
            tokens: see `begin`.
            most: see `begin`.

        Returns:
            Number of tokens that the slot holds now.
        """
        held = self._held(slot)
        if held.seen_version == self._version or held.root is None:
            return held.length
        limit = min(len(tokens) - 1, self.context)
        most = limit if most is None else min(limit, most)
        if self.kept_inputs is not None:
            covered = self._covered(held, tokens, most)
            most = self.kept_inputs.longest(held.root, tokens, covered)
            held.branch = covered if covered - max(most, held.length) >= WORTH_A_PASS else 0
            if most <= held.length:
                held.seen_version = self._version
                return held.length
        while (end := held.registered + BLOCK_TOKENS) <= most and held.last is not None:
            node = held.last.children.get(tuple(tokens[end - BLOCK_TOKENS : end]))
            if node is None:
                break
            self._trie.hold(node)
            held.share(node)
            held.length = end
        self._take_part(held, tokens, most)
        if self.kept_inputs is not None:
            if held.length == most:
                self.kept_inputs.restore(slot, held.root, tokens, most)
            else:  # there was no block for the last part of it
                self._give_up(slot, held)
        held.tokens = tokens
        held.seen_version = self._version
        return held.length

    def usable(self, slot: int, most: int) -> int:
        """Number of a slot's first tokens, at most `most`, with which it could begin instead."""
        held = self._held(slot)
        if self.kept_inputs is None or held.root is None:
            return most
        return self.kept_inputs.longest(held.root, held.tokens, most)

    def reserve(self, slot: int, length: int) -> bool:
        """Make the positions from the slot's length up to `length` writable.

        Returns:
            False if there are too few blocks; then nothing has changed.

        Raises:
            ValueError: the length is above the context.
        """
        held = self._held(slot)
        if length <= held.end:
            return True
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit into a context of {self.context}")
        missing = _blocks_for(length) - len(held.blocks)
        if missing > self.available_blocks:
            return False
        for _ in range(missing):
            held.put(len(held.blocks), self._new_block())
        return True

    def commit(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Declare the first `length` of `tokens` computed and final.

        A block that became full is registered, or replaced by an equal registered one.

        Args:
            slot: number of the slot.
            tokens: they begin with the tokens that are final already. Not copied: the caller must
                not change the first `length` of them before the next commit or release.
            length: number of final tokens; it never shrinks.

        Raises:
            ValueError: there are fewer tokens, more were final before, or their positions were
                never reserved.
        """
        held = self._held(slot)
        if not held.length <= length <= len(tokens):
            raise ValueError(
                f"slot {slot} has {held.length} final tokens of {len(tokens)}: it cannot have "
                f"{length}"
            )
        if length > held.end:
            raise ValueError(f"slot {slot} has room for {held.end} tokens, not for {length}")
        held.length = length
        held.tokens = tokens
        if self.kept_inputs is not None:
            lasts = length == held.branch or length in held.borders
            if lasts or (length % INTERVAL == 0 and length <= held.prompt):
                self.take_snapshot(slot, lasts=lasts)
        if held.tail >= BLOCK_TOKENS and held.root is not None:
            self._register(held)

    def take_snapshot(self, slot: int, *, lasts: bool = True) -> None:
        """Let later requests that begin with the slot's final tokens continue from there.

        A cache without `kept_inputs` needs no snapshots. One that does not last is dropped first.
        """
        held = self._held(slot)
        self._places += 1
        if self.kept_inputs is not None and held.root is not None:
            self.kept_inputs.save(slot, held.root, held.tokens, held.length, lasts=lasts)

    def serves(self, slot: int, other: int, end: int) -> bool:
        """Whether another slot can take over a slot's first `end` tokens, once they are computed.

        Equal beginnings are the same registered blocks; only the tokens behind those are compared.
        """
        ahead, held, kept = self._held(slot), self._held(other), self.kept_inputs
        if held.root is None or held.root is not ahead.root:
            return False
        if kept is not None and kept.snapshot_bytes < self.shape.slot_bytes:
            return False
        new = slice(held.registered, end)
        same = held.nodes == ahead.nodes[: len(held.nodes)]
        return same and list(held.tokens[new]) == list(ahead.tokens[new])

    def next_snapshot(self, slot: int) -> int | None:
        """The position behind the slot's final tokens at which a prompt's piece should end.

        None: anywhere.
        """
        held = self._held(slot)
        if self.kept_inputs is None or held.root is None:
            return None
        places = ((held.length // INTERVAL + 1) * INTERVAL, held.branch, *held.borders)
        return min(place for place in places if place > held.length)

    def zero(self, slot: int) -> None:
        """Write zeros to all positions that the slot may write, so that they take memory."""
        held = self._held(slot)
        self._pool.memory[held.blocks[len(held.nodes) :]] = 0
        if self.kept_inputs is not None:
            self.kept_inputs.zero(slot)

    def release(self, slot: int) -> None:
        """Free a slot. Its committed blocks are kept for later requests, if it shares blocks."""
        held = self._held(slot)
        self.take_snapshot(slot)
        own = held.blocks[len(held.nodes) :]
        if held.root is not None and held.last is not None:
            if held.tail >= self._least_common:
                part = tuple(held.tokens[held.registered : held.length])
                self._trie.keep(held.last, part, own.pop(0))
            for node in reversed(held.nodes):
                self._trie.release(node)
            self._trie.release_root(held.root)
        for block in own:
            self._pool.give(block)
        self._slots[slot] = None

    @property
    def _version(self) -> int:
        """Changes with what a slot may take over."""
        return self._trie.version + self._places

    @property
    def _least_common(self) -> int:
        """Fewest common tokens in a block that are kept: snapshots are of use there alone."""
        return MIN_COMMON if self.kept_inputs is None else 1

    def _held(self, slot: int) -> _Slot:
        held = self._slots[slot]
        if held is None:
            raise ValueError(f"slot {slot} is free")
        return held

    def _new_block(self) -> int:
        """Take a block; the caller has checked `available_blocks`."""
        block = self._pool.take()
        if block is None and self._trie.evict():
            block = self._pool.take()
        if block is None:
            raise RuntimeError("the KV cache's block counts are wrong")
        return block

    def _register(self, held: _Slot) -> None:
        """Register the blocks that became full."""
        while held.tail >= BLOCK_TOKENS and held.last is not None:
            parent, block = held.last, held.blocks[len(held.nodes)]
            tokens = tuple(held.tokens[held.registered : held.registered + BLOCK_TOKENS])
            node = parent.children.get(tokens)
            if node is None:
                node = self._trie.insert(parent, tokens, block)
            else:  # another request has computed the same block
                self._trie.hold(node)
            held.share(node)

    def _borders(self, tokens: Sequence[int], start: int) -> list[int]:
        """Where the last two messages of a prompt end, behind its first `start` tokens.

        Left out are places that another snapshot is near: the one at the prompt's end is usable for
        its last tokens, too.
        """
        places = range(len(tokens) - 1, start, -1)
        latest = islice((at for at in places if tokens[at - 1] in self._end_tokens), 2)
        borders: list[int] = []
        for place in reversed(list(latest)):
            near = place - (borders[-1] if borders else start) < WORTH_A_PASS
            if not near and len(tokens) - place > ROLLBACK:
                borders.append(place)
        return borders

    def _covered(self, held: _Slot, tokens: Sequence[int], most: int) -> int:
        """Number of `tokens`, at most `most`, whose keys and values requests have computed."""
        if held.last is None:
            return held.length
        node, end = _walk(held.last, tokens, held.registered, most)
        _, _, common = self._closest(node, end, tuple(tokens[end : end + BLOCK_TOKENS]))
        return max(held.length, min(end + common, most))

    def _closest(
        self, parent: Node, start: int, tokens: tuple[int, ...]
    ) -> tuple[Node | None, int, int]:
        """Find the block behind `parent` that begins with most of `tokens`.

        Returns:
            Its node, None where it is a running request's last block; its number; and how many
            tokens agree.
        """
        node, common = self._trie.closest(parent, tokens)
        source = -1 if node is None else node.block
        index = start // BLOCK_TOKENS
        for other in self._slots:  # the trie does not know running requests' last blocks
            if other is not None and other.last is parent and other.tail > common:
                same = common_prefix(other.tokens[start : other.length], tokens)
                if same > common:
                    node, source, common = None, other.blocks[index], same
        return node, source, common

    def _take_part(self, held: _Slot, tokens: Sequence[int], most: int) -> None:
        """Begin the slot's next block with the tokens that another block shares with it."""
        parent, index, start = held.last, len(held.nodes), held.registered
        block_tokens = tuple(tokens[start : start + BLOCK_TOKENS])
        least = held.tail + self._least_common
        if parent is None or min(len(block_tokens), most - start) < least:
            return
        node, source, common = self._closest(parent, start, block_tokens)
        common = min(common, most - start)
        if common < least:
            return
        if node is not None and node.only_begins(block_tokens):
            self._trie.detach(node)
            held.put(index, source)
        else:
            if node is not None:
                self._trie.hold(node)  # or making room for the copy might evict it
            if index == len(held.blocks) and self.available_blocks:
                held.put(index, self._new_block())
            if node is not None:
                self._trie.release(node)
            if index == len(held.blocks):
                return
            self._pool.copy(source, held.blocks[index])
        held.length = start + common

    def _give_up(self, slot: int, held: _Slot) -> None:
        """Restart a slot's sequence: it holds keys from which it cannot continue."""
        for block in held.blocks[len(held.nodes) :]:
            self._pool.give(block)
        for node in reversed(held.nodes):
            self._trie.release(node)
        held.blocks, held.nodes = [], []
        held.length = held.registered = held.end = held.branch = 0
        if self.kept_inputs is not None:
            self.kept_inputs.clear(slot)


def _walk(node: Node, tokens: Sequence[int], end: int, most: int) -> tuple[Node, int]:
    """Follow registered blocks from a node whose block ends at `end`, up to `most` tokens."""
    while end + BLOCK_TOKENS <= most:
        child = node.children.get(tuple(tokens[end : end + BLOCK_TOKENS]))
        if child is None:
            break
        node, end = child, end + BLOCK_TOKENS
    return node, end


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
