"""The blocks of one request in the KV cache: the shared ones first, its own behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specops.runtime.block_pool import BlockPool
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.prefix_trie import Node

_NEVER = 1 << 62  # a length that no slot reaches


class CacheSlot:
    """What a request has in the cache.

    Args:
        pool: where blocks come from and go to.
        table: the slot's row of the block tables, written in place.
        root: the client's in the trie; None: nothing is shared.
        tokens: the request's.

    Attributes:
        root: see above.
        tokens: as they were given last; the first `length` are in the cache.
        length: tokens that are computed and final.
        blocks: numbers of all its blocks, those of `nodes` first.
        nodes: its registered blocks: the full ones, and behind a rollback the one it ends in.
        register_at: length from which on there is a full block to register.
        seen: version of the trie that was looked through for it.
    """

    __slots__ = (
        "_pool",
        "_table",
        "blocks",
        "length",
        "nodes",
        "register_at",
        "root",
        "seen",
        "tokens",
    )

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
        self.register_at = 0
        self.seen = -1
        self.expect_full()

    @property
    def last(self) -> Node | None:
        """The last registered block; the root where there is none."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def tail(self) -> int:
        """Tokens behind the registered blocks; negative: it ends inside of the last of them."""
        return self.length - len(self.nodes) * BLOCK_TOKENS

    @property
    def end(self) -> int:
        """Positions that its blocks have."""
        return len(self.blocks) * BLOCK_TOKENS

    def expect_full(self) -> None:
        """Registered blocks have come or gone: the one behind them is the next to be full."""
        registered = len(self.nodes)
        self.register_at = _NEVER if self.root is None else (registered + 1) * BLOCK_TOKENS

    def put(self, index: int, block: int) -> None:
        """Make a block its own at an index; one that it had there is given back."""
        if index < len(self.blocks) and self.blocks[index] != block:
            self._pool.give(self.blocks[index])
        self.blocks[index : index + 1] = [block]
        self._table[index] = block

    def append(self, block: int) -> None:
        """Make a block its own behind all others."""
        self._table[len(self.blocks)] = block
        self.blocks.append(block)

    def share(self, node: Node) -> None:
        """Make a registered block, already held, the next one, in place of its own."""
        self.put(len(self.nodes), node.block)
        self.nodes.append(node)
        self.expect_full()

    def own_last(self, block: int) -> Node:
        """Have a block of its own in place of the last registered one.

        Args:
            block: its own from now on; the registered one itself where no other slot has it.

        Returns:
            What was registered.
        """
        node = self.nodes.pop()
        self.blocks[len(self.nodes)] = block
        self._table[len(self.nodes)] = block
        self.expect_full()
        return node

    def drop_nodes(self, count: int) -> list[Node]:
        """Have no more than `count` registered blocks, and nothing behind them.

        Returns:
            Those that it had, the last first, for the caller to release.
        """
        self.give_back(len(self.nodes))
        dropped = self.nodes[: count - 1 if count else None : -1]
        del self.nodes[count:], self.blocks[count:]
        self.expect_full()
        return dropped

    def give_back(self, first: int) -> None:
        """Give blocks back from an index on, none of them registered."""
        for block in self.blocks[first:]:
            self._pool.give(block)
        del self.blocks[first:]
