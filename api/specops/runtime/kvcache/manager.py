"""The KV cache: allocates blocks for each slot, and shares blocks between requests by prefix.

A slot's keys and values are in blocks of 64 tokens, which the operator finds through the slot's row
of `block_tables`. A pass may write only positions that `reserve` has made room for. `commit`
declares tokens final: rejected draft tokens are never committed, and the next pass overwrites
them. Full blocks of final tokens go into the prefix cache, where they never change again, so that
requests with the same prefix hold the same blocks. In a model with recurrent layers
(`recurrent_state`), a request can reuse a prefix only up to where a snapshot is valid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from specops.runtime import kernels
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.block_pool import ROLLBACK, BlockPool, CacheShape
from specops.runtime.kvcache.prefix_cache import (
    Node,
    PrefixCache,
    PrefixSharing,
    Snapshot,
    common_prefix,
    longest_usable,
)
from specops.runtime.kvcache.recurrent_state import INTERVAL, RecurrentStateCache

MIN_COMMON = 8  # a block with fewer common tokens is not worth a copy
WORTH_A_PASS = 16
"""Computing fewer tokens costs less than an extra pass, to cut a prompt or to wait for another."""


class SequenceBlocks:
    """One request's blocks: first the registered ones, which other slots may share, then its own.

    Args:
        pool: the pool to which the slot returns blocks.
        table: the slot's row of the block tables, written in place.
        root: the client's root in the prefix cache; None: the slot shares nothing.
        tokens: tokens of the request.

    Attributes:
        tokens: the request's tokens, as last passed in.
        length: number of computed and final tokens, counted from the start.
        blocks: numbers of all blocks, those of `nodes` first.
        nodes: the registered blocks, all full.
        registered: number of tokens in the registered blocks.
        end: number of positions in all blocks.
        seen_version: version of the prefix cache at the slot's last lookup.
        prompt: number of tokens at the start of the request.
        snapshot_point: where a cached prefix ended that had no snapshot; the slot takes one there.
        message_ends: ends of those messages of the prompt after which the slot takes a snapshot.
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
        self.snapshot_point = 0
        self.message_ends: Sequence[int] = ()

    @property
    def path(self) -> list[Node]:
        """The root and the registered blocks; empty if the slot shares nothing."""
        return [] if self.root is None else [self.root, *self.nodes]

    @property
    def last(self) -> Node | None:
        """The last registered block, else the root."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def tail(self) -> int:
        """Number of final tokens after the registered blocks."""
        return self.length - self.registered

    def put(self, index: int, block: int) -> None:
        """Put a block of the slot's own at an index; free the block that it replaces."""
        if index < len(self.blocks) and self.blocks[index] != block:
            self._pool.free(self.blocks[index])
        self.blocks[index : index + 1] = [block]
        self.end = len(self.blocks) * BLOCK_TOKENS
        self._table[index] = block

    def share(self, node: Node) -> None:
        """Append a registered block, on which the caller has a reference."""
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
        snapshot_bytes: maximum memory of the snapshots; None: as many as are useful.
        end_tokens: tokens that end messages; a chat's next prompt may differ from there on.

    Attributes:
        recurrent: states of the recurrent layers; None: the model has none.
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
        reuse: PrefixSharing = PrefixSharing.CLIENT,
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
        self._prefixes = PrefixCache(self._remove)
        self._slots: list[SequenceBlocks | None] = [None] * num_slots
        self.recurrent: RecurrentStateCache | None = None
        if shape.slot_bytes:
            self.recurrent = RecurrentStateCache(shape, num_slots, snapshot_bytes)
        tables = num_slots, _blocks_for(context)
        self.block_tables: npt.NDArray[np.int64] = np.zeros(tables, np.int64)
        address, dtype = self._pool.memory.ctypes.data, kernels.KV_DTYPES[shape.dtype]
        numbers = address, num_blocks, shape.block_bytes, dtype
        self.descriptor: npt.NDArray[np.int64] = np.array(numbers, np.int64)

    @property
    def available_blocks(self) -> int:
        """Blocks that `reserve` can still use: free blocks and cached blocks."""
        return self._pool.num_free + self._prefixes.cached

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.available_blocks

    @property
    def shared_blocks(self) -> int:
        """Blocks that several requests hold, each counted once."""
        return self._prefixes.shared

    @property
    def cached_blocks(self) -> int:
        """Blocks of finished requests that no running request holds."""
        return self._prefixes.cached

    @property
    def cached_tokens(self) -> int:
        """Tokens in cached blocks."""
        return self._prefixes.cached_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all slots; a shared token counts once per slot."""
        return sum([slot.length for slot in self._slots if slot is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, including pages that were never written."""
        return self.num_blocks * self.shape.block_bytes

    def length(self, slot: int) -> int:
        """Number of a slot's final tokens."""
        return self._held(slot).length

    def writable(self, slot: int) -> tuple[int, int]:
        """Positions that a pass may write, as a half-open range."""
        held = self._held(slot)
        return held.registered, held.end

    def allocate(
        self,
        slot: int,
        tokens: Sequence[int],
        client: str = "",
        *,
        share: bool = True,
        most: int | None = None,
    ) -> int:
        """Start a request in a free slot, with the longest cached prefix of its tokens.

        The slot shares whole blocks, and copies a block that matches in part. The last token never
        comes from the cache: a pass has to compute it.

        Args:
            slot: a free slot.
            tokens: the prompt, and the generated tokens if the request was preempted.
            client: name of the client.
            share: whether the request shares blocks with others.
            most: maximum number of tokens to reuse.

        Returns:
            Number of reused tokens.

        Raises:
            ValueError: the slot is in use.
        """
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} is in use")
        root = self._root(client) if share and self.reuse is not PrefixSharing.OFF else None
        held = SequenceBlocks(self._pool, self.block_tables[slot], root, tokens)
        self._slots[slot] = held
        if self.recurrent is not None:
            self.recurrent.clear(slot)
        count = self.match_prefix(slot, tokens, most)
        if self.recurrent is not None and root is not None:
            held.message_ends = self._message_ends(tokens, count)
        return count

    def cached(self, tokens: Sequence[int], client: str = "") -> int:
        """Number of leading prompt tokens, in whole blocks, that `allocate` would reuse now."""
        root = self._root(client)
        path = [root, *root.walk(tokens, len(tokens) - 1)]
        return self._usable(path, tokens, path[-1].end)[0]

    def match_prefix(self, slot: int, tokens: Sequence[int], most: int | None = None) -> int:
        """Look again for a longer cached prefix: other requests may have computed it meanwhile.

        Args:
            slot: a slot whose tokens are a prefix of `tokens`.
            tokens: see `allocate`.
            most: see `allocate`.

        Returns:
            Number of tokens that the slot holds now.
        """
        held = self._held(slot)
        if held.last is None or held.seen_version == self._prefixes.version:
            return held.length
        held.tokens, held.seen_version = tokens, self._prefixes.version
        limit = min(len(tokens) - 1, self.context)
        limit = limit if most is None else min(limit, most)
        found = held.last.walk(tokens, limit)
        node = found[-1] if found else held.last
        source, common = self._closest(node, tokens, limit)
        covered = max(held.length, node.end + common)
        path = [*held.path, *found]
        end, snapshot = self._usable(path, tokens, covered)
        if self.recurrent is not None:
            held.snapshot_point = covered if covered - max(end, held.length) >= WORTH_A_PASS else 0
            whole = path[end // BLOCK_TOKENS + 1 :]
            source = whole[0].block if whole else source
        taken = end > held.length and self._take(held, path, source, end)
        if taken and snapshot is not None and self.recurrent is not None:
            self.recurrent.restore(slot, snapshot, path, tokens[:end])
        return held.length

    def matchable_len(self, slot: int, most: int) -> int:
        """Number of a slot's first tokens, at most `most`, from which it could start over."""
        held = self._held(slot)
        return self._usable(held.path, held.tokens, most)[0] if held.root is not None else most

    def reserve(self, slot: int, length: int) -> bool:
        """Make the positions from the slot's length up to `length` writable.

        Returns:
            False if there are too few blocks; nothing has changed then.

        Raises:
            ValueError: the length exceeds the context.
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

        A block that is now full is registered, or replaced by an equal registered block.

        Args:
            slot: the slot's number.
            tokens: tokens of the request, beginning with those already final. They are not copied:
                the caller must not change the first `length` before the next commit or release.
            length: number of final tokens; it never shrinks.

        Raises:
            ValueError: there are fewer tokens, more were final before, or their positions were
                never reserved.
        """
        held = self._held(slot)
        if not held.length <= length <= held.end or length > len(tokens):
            raise ValueError(
                f"slot {slot} has {held.length} final tokens of {len(tokens)} and room for "
                f"{held.end}: it cannot have {length}"
            )
        held.length = length
        held.tokens = tokens
        while length - held.registered >= BLOCK_TOKENS and held.last is not None:
            block = tuple(tokens[held.registered : held.registered + BLOCK_TOKENS])
            node = self._prefixes.insert(held.last, block, held.blocks[len(held.nodes)])
            self._prefixes.hold(node)
            held.share(node)
        if self.recurrent is not None:
            lasts = length == held.snapshot_point or length in held.message_ends
            if lasts or (length % INTERVAL == 0 and length <= held.prompt):
                self.take_snapshot(slot, lasts=lasts)

    def take_snapshot(self, slot: int, *, lasts: bool = True) -> None:
        """Let later requests with the slot's final tokens as their prefix continue from there.

        Without recurrent layers there is nothing to copy. Snapshots that do not last are dropped
        first.
        """
        held = self._held(slot)
        self._prefixes.version += 1
        if self.recurrent is not None and held.root is not None:
            self.recurrent.save(slot, held.path, held.tokens[: held.length], lasts=lasts)

    def shares_prefix(self, slot: int, other: int, end: int) -> bool:
        """Whether slot `other` can reuse the first `end` tokens of `slot`, once these are computed.

        Equal prefixes are the same registered blocks, so only the tokens after those are compared.
        """
        ahead, held = self._held(slot), self._held(other)
        if held.root is None or held.root is not ahead.root:
            return False
        if self.recurrent is not None and self.recurrent.snapshot_bytes < self.shape.slot_bytes:
            return False
        new = slice(held.registered, end)
        same = held.nodes == ahead.nodes[: len(held.nodes)]
        return same and list(held.tokens[new]) == list(ahead.tokens[new])

    def next_snapshot(self, slot: int) -> int | None:
        """The next position at which a chunk of the prompt should end; None: anywhere."""
        held = self._held(slot)
        if self.recurrent is None or held.root is None:
            return None
        places = ((held.length // INTERVAL + 1) * INTERVAL, held.snapshot_point, *held.message_ends)
        return min(place for place in places if place > held.length)

    def zero(self, slot: int) -> None:
        """Zero all positions that the slot may write, so that they take memory."""
        held = self._held(slot)
        self._pool.memory[held.blocks[len(held.nodes) :]] = 0
        if self.recurrent is not None:
            self.recurrent.zero(slot)

    def release(self, slot: int) -> None:
        """Free a slot. If it shares blocks, its final tokens stay cached for later requests."""
        held = self._held(slot)
        self.take_snapshot(slot)
        own = held.blocks[len(held.nodes) :]
        if held.last is not None and held.tail >= self._least_common:
            part = tuple(held.tokens[held.registered : held.length])
            if self._prefixes.insert(held.last, part, own[0]).block == own[0]:
                own.pop(0)
        for node in reversed(held.nodes):
            self._prefixes.release(node)
        for block in own:
            self._pool.free(block)
        self._slots[slot] = None

    @property
    def _least_common(self) -> int:
        """Minimum number of tokens in a cached block; a snapshot needs the exact position."""
        return MIN_COMMON if self.recurrent is None else 1

    def _held(self, slot: int) -> SequenceBlocks:
        held = self._slots[slot]
        if held is None:
            raise ValueError(f"slot {slot} is free")
        return held

    def _root(self, client: str) -> Node:
        return self._prefixes.root(client if self.reuse is PrefixSharing.CLIENT else "")

    def _new_block(self) -> int:
        """Allocate a block; the caller has checked `available_blocks`."""
        if not self._pool.num_free:
            self._prefixes.evict()
        return self._pool.take()

    def _remove(self, node: Node) -> None:
        """Free the block and the snapshots of an evicted node."""
        self._pool.free(node.block)
        if self.recurrent is not None:
            for snapshot in list(node.snapshots):
                self.recurrent.drop(snapshot)

    def _message_ends(self, tokens: Sequence[int], start: int) -> list[int]:
        """Ends of the last two messages of a prompt, after its first `start` tokens.

        Positions close to another snapshot are left out; the snapshot at the prompt's end is valid
        for its last tokens, too.
        """
        places = range(len(tokens) - 1, start, -1)
        latest = islice((at for at in places if tokens[at - 1] in self._end_tokens), 2)
        ends: list[int] = []
        for place in reversed(list(latest)):
            near = place - (ends[-1] if ends else start) < WORTH_A_PASS
            if not near and len(tokens) - place > ROLLBACK:
                ends.append(place)
        return ends

    def _usable(
        self, path: Sequence[Node], tokens: Sequence[int], most: int
    ) -> tuple[int, Snapshot | None]:
        """How many of the first `most` tokens, all with cached keys, a slot can start from."""
        return (most, None) if self.recurrent is None else longest_usable(path, tokens, most)

    def _closest(self, parent: Node, tokens: Sequence[int], limit: int) -> tuple[int, int]:
        """Find the block after `parent` that shares most tokens with `tokens[:limit]`.

        Returns:
            Its number, and the number of shared tokens.
        """
        start = parent.end
        wanted = tuple(tokens[start : min(start + BLOCK_TOKENS, limit)])
        source, common = parent.closest(wanted)
        for other in self._slots:  # running requests' last blocks are not in the prefix cache
            if other is not None and other.last is parent and other.tail > common:
                same = common_prefix(other.tokens[start : other.length], wanted)
                if same > common:
                    source, common = other.blocks[len(other.nodes)], same
        return source, common

    def _take(self, held: SequenceBlocks, path: Sequence[Node], source: int, end: int) -> bool:
        """Share the whole blocks on a path up to `end`, and copy the part of `source` after them.

        If there is no block for the copy, or too few tokens to be worth one, a model without
        recurrent layers shares the whole blocks alone, and another model nothing.

        Returns:
            Whether the slot gained tokens; in a model with recurrent layers, all up to `end`.
        """
        whole = end // BLOCK_TOKENS
        new, start = path[len(held.nodes) + 1 : whole + 1], whole * BLOCK_TOKENS
        if end > start:
            room = self.available_blocks - sum([not node.ref_count for node in new])
            worth = end - max(start, held.length) >= self._least_common
            if not worth or not (room or whole < len(held.blocks)):
                end = start if self.recurrent is None else 0
        if end <= held.length:
            return False
        for node in new:
            self._prefixes.hold(node)
            held.share(node)
        if end > start:
            if whole == len(held.blocks):  # the new block may be `source`, evicted
                held.put(whole, self._new_block())
            if held.blocks[whole] != source:
                self._pool.copy(source, held.blocks[whole])
        held.length = end
        return True


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
