"""The blocks of one request in the KV cache: registered blocks first, the slot's own behind them.

Other slots may hold a registered block as well, so no slot writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specops.runtime.block_pool import BlockPool
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.prefix_trie import Node

_NEVER = 1 << 62  # a length that no slot reaches


class CacheSlot:
    """One request's blocks.

    Args:
        pool: where the slot gives blocks back.
        table: the slot's row of the block tables; the slot writes it in place.
        root: the client's root in the trie; None: the slot shares nothing.
        tokens: tokens of the request.

    Attributes:
        root: see above.
        tokens: the request's tokens, as given last; the first `length` are in the cache.
        length: number of tokens that are computed and final.
        blocks: numbers of all blocks, those of `nodes` first.
        nodes: the registered blocks. All are full; after a rollback the slot may end inside the
            last one.
        register_at: the length from which on there is another full block to register.
        seen_version: version of the trie in which the slot last looked for its prefix.
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
        self.seen_version = -1
        self._nodes_changed()

    @property
    def last(self) -> Node | None:
        """The last registered block, else the root."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def tail(self) -> int:
        """Tokens behind the registered blocks; negative: the slot ends inside the last of them."""
        return self.length - len(self.nodes) * BLOCK_TOKENS

    @property
    def end(self) -> int:
        """Number of positions in all its blocks."""
        return len(self.blocks) * BLOCK_TOKENS

    def put(self, index: int, block: int) -> None:
        """Make a block the slot's own at an index; give back the block that was there."""
        if index < len(self.blocks) and self.blocks[index] != block:
            self._pool.give(self.blocks[index])
        self.blocks[index : index + 1] = [block]
        self._table[index] = block

    def share(self, node: Node) -> None:
        """Make a registered block, which the caller holds, the next one."""
        self.put(len(self.nodes), node.block)
        self.nodes.append(node)
        self._nodes_changed()

    def own_last(self, block: int) -> Node:
        """Replace the last registered block by one of the slot's own.

        Args:
            block: the new block; the registered one itself if no other slot holds it.

        Returns:
            The node of the registered block.
        """
        node = self.nodes.pop()
        self.blocks[len(self.nodes)] = block
        self._table[len(self.nodes)] = block
        self._nodes_changed()
        return node

    def drop_nodes(self, count: int) -> list[Node]:
        """Keep the first `count` registered blocks and nothing behind them.

        Returns:
            The dropped nodes, the last one first, for the caller to release.
        """
        self.give_back(len(self.nodes))
        dropped = self.nodes[: count - 1 if count else None : -1]
        del self.nodes[count:], self.blocks[count:]
        self._nodes_changed()
        return dropped

    def give_back(self, first: int) -> None:
        """Give the blocks from an index on back to the pool; none of them is registered."""
        for block in self.blocks[first:]:
            self._pool.give(block)
        del self.blocks[first:]

    def _nodes_changed(self) -> None:
        registered = len(self.nodes)
        self.register_at = _NEVER if self.root is None else (registered + 1) * BLOCK_TOKENS
