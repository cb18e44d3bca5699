"""Finds the blocks of the KV cache by their tokens: an exact trie with one root for each client.

A node is a block. Its path from the root is the sequence of tokens from which its keys and values
were computed, so two requests with equal beginnings hold the same nodes. A node that no request
holds is kept until its block is needed; the least recently used one goes first. A slot that holds a
node also holds its ancestors, and releases them after the node. So the oldest kept node never has a
child, and eviction never cuts a part of the trie off.

Published ideas: RadixAttention (SGLang, arXiv 2312.07104) for the tree, PagedAttention (vLLM, arXiv
2309.06180) for the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

Tokens = tuple[int, ...]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


class Node:
    """A block of the cache and its tokens.

    Attributes:
        parent: node of the block before; None for a root, which has no block.
        tokens: 64 tokens, or fewer in a kept block that is not full. Requests hold full blocks
            only.
        block: number of the block in the pool.
        holders: number of requests that hold the node; 0: it is kept.
        children: nodes of the blocks that follow, by their tokens.
        order: the keys of `children`, sorted: the child with the longest common beginning is a
            neighbour of the place where a sequence would be inserted.
    """

    __slots__ = ("block", "children", "holders", "order", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.holders = 1
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] = []

    def only_begins(self, tokens: Tokens) -> bool:
        """Whether the node is kept, has no children, and `tokens` begin with its tokens."""
        return not self.holders and not self.children and self.tokens == tokens[: len(self.tokens)]


class PrefixTrie:
    """The nodes of all clients.

    Args:
        free: called with the block of each node that goes.

    Attributes:
        kept_tokens: number of tokens in kept nodes.
        shared: number of nodes that several requests hold.
        version: changes with each new node.
    """

    def __init__(self, free: Callable[[int], None]) -> None:
        self._free = free
        self._roots: dict[str, Node] = {}
        self._names: dict[Node, str] = {}
        self._kept: OrderedDict[Node, None] = OrderedDict()  # descendants before ancestors
        self.kept_tokens = 0
        self.shared = 0
        self.version = 0

    @property
    def kept(self) -> int:
        """Number of kept nodes: `evict` can free their blocks."""
        return len(self._kept)

    def root(self, name: str) -> Node | None:
        """A client's root; None where it has neither a running request nor a kept block."""
        return self._roots.get(name)

    def hold_root(self, name: str) -> Node:
        """Hold a client's root; create it if there is none."""
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, (), -1)
            self._names[root] = name
        else:
            root.holders += 1
        return root

    def release_root(self, root: Node) -> None:
        """Release a root that one request held."""
        root.holders -= 1
        self._drop_root(root)

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """Add a full block below a node; the slot that computed it holds the new node."""
        self._supersede(parent, tokens)
        return self._link(parent, tokens, block)

    def keep(self, parent: Node, tokens: Tokens, block: int) -> None:
        """Keep a block that is not full below a node.

        If another block begins with the same tokens, that block stays and the new one is freed.
        """
        index = bisect_left(parent.order, tokens)
        following = parent.order[index : index + 1]
        if following and following[0][: len(tokens)] == tokens:
            longer = parent.children[following[0]]
            if not longer.holders:
                self._kept.move_to_end(longer)
            self._free(block)
            return
        self._supersede(parent, tokens)
        node = self._link(parent, tokens, block)
        node.holders = 0
        self._keep(node)

    def closest(self, parent: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """Find the child with the longest common beginning; return it and the number of tokens."""
        index = bisect_left(parent.order, tokens)
        best, most = None, 0
        for neighbour in parent.order[max(0, index - 1) : index + 1]:
            if (common := common_prefix(neighbour, tokens)) > most:
                best, most = parent.children[neighbour], common
        return best, most

    def hold(self, node: Node) -> None:
        """Hold a node for one more request, which holds the parent already."""
        if not node.holders:
            self._take_from_kept(node)
        node.holders += 1
        self.shared += node.holders == 2

    def release(self, node: Node) -> None:
        """Release a node that one request held; the request releases the parent afterwards."""
        self.shared -= node.holders == 2
        node.holders -= 1
        if not node.holders:
            self._keep(node)

    def detach(self, node: Node) -> None:
        """Take a kept node without children out of the trie; the caller gets its block."""
        parent = node.parent
        if parent is None or node.holders or node.children:
            raise ValueError("only a kept block that nothing follows can be taken out")
        self._take_from_kept(node)
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        self._drop_root(parent)

    def evict(self) -> bool:
        """Free the block of the least recently used kept node; False if no node is kept."""
        node = next(iter(self._kept), None)
        if node is not None:
            self._drop(node)
        return node is not None

    def _drop(self, node: Node) -> None:
        self.detach(node)
        self._free(node.block)

    def _supersede(self, parent: Node, tokens: Tokens) -> None:
        """Free the kept block that only has the beginning of a new one.

        There is at most one, and it is the new one's neighbour, because no other one begins so.
        """
        index = bisect_left(parent.order, tokens) - 1
        if index >= 0 and (before := parent.order[index]) == tokens[: len(before)]:
            self._drop(parent.children[before])

    def _link(self, parent: Node, tokens: Tokens, block: int) -> Node:
        node = Node(parent, tokens, block)
        parent.children[tokens] = node
        parent.order.insert(bisect_left(parent.order, tokens), tokens)
        self.version += 1
        return node

    def _keep(self, node: Node) -> None:
        self._kept[node] = None
        self.kept_tokens += len(node.tokens)

    def _take_from_kept(self, node: Node) -> None:
        del self._kept[node]
        self.kept_tokens -= len(node.tokens)

    def _drop_root(self, root: Node) -> None:
        """Drop a client's root once the client has no running request and no kept block."""
        if root.parent is None and not root.holders and not root.children:
            del self._roots[self._names.pop(root)]
