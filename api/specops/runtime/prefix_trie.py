"""Which blocks of the KV cache hold which tokens: a trie, exact, one root per client.

A node is a block; its path from the root is the sequence of tokens that its keys and values were
computed from, so that two requests with equal beginnings hold the same nodes. A node that no
request holds any more is kept until its block is needed, the least recently used first. A slot
that holds a node holds its ancestors, and ancestors are let go of after their descendants: hence
the oldest kept node never has a child, and what is evicted leaves no part of the trie out of reach.

Published ideas: RadixAttention (SGLang, arXiv 2312.07104) for the tree, PagedAttention (vLLM,
arXiv 2309.06180) for the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

Tokens = tuple[int, ...]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the first on."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


class Node:
    """A block of the cache and the tokens in it.

    Attributes:
        parent: the block before it; None: a root, which is no block.
        tokens: a full block's, or the beginning of one. A block that is not full is never held.
        block: its number in the pool.
        holders: requests that hold it; 0: it is kept.
        children: the blocks that follow it, by their tokens.
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

    @property
    def alone(self) -> bool:
        """Its one holder can have the block for itself: nothing that is there would miss it."""
        return self.holders == 1 and not self.children

    def only_begins(self, tokens: Tokens) -> bool:
        """It is kept for nothing but what these tokens begin with."""
        return not self.holders and not self.children and self.tokens == tokens[: len(self.tokens)]


class PrefixTrie:
    """Blocks by the tokens in them, held by requests or kept after them.

    Args:
        free: told the block of a node that is gone.

    Attributes:
        kept_tokens: in nodes that no slot holds.
        shared: nodes that several requests hold.
        version: changes when there is something new to be found.
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
        """Nodes that no slot holds: blocks that `evict` can free."""
        return len(self._kept)

    def hold_root(self, name: str) -> Node:
        """The root of that name, made where there is none."""
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, (), -1)
            self._names[root] = name
        else:
            root.holders += 1
        return root

    def release_root(self, root: Node) -> None:
        """A request lets go of its root."""
        root.holders -= 1
        self._drop_root(root)

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """Add a full block below a node, held by the slot that computed it."""
        self._supersede(parent, tokens)
        return self._link(parent, tokens, block)

    def keep(self, parent: Node, tokens: Tokens, block: int) -> None:
        """Add a block that is not full below a node; no slot holds it.

        Where another block begins with the same tokens, that one is used from now on.
        """
        index = bisect_left(parent.order, tokens)
        following = parent.order[index : index + 1]
        if following and following[0][: len(tokens)] == tokens:
            self.touch(parent.children[following[0]])
            self._free(block)
            return
        self._supersede(parent, tokens)
        node = self._link(parent, tokens, block)
        node.holders = 0
        self._keep(node)

    def closest(self, parent: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """The child that has most tokens in common with a sequence, and how many."""
        index = bisect_left(parent.order, tokens)
        best, most = None, 0
        for neighbour in parent.order[max(0, index - 1) : index + 1]:
            if (common := common_prefix(neighbour, tokens)) > most:
                best, most = parent.children[neighbour], common
        return best, most

    def hold(self, node: Node) -> None:
        """One more request holds a node; it holds the parent already."""
        if not node.holders:
            del self._kept[node]
            self.kept_tokens -= len(node.tokens)
        node.holders += 1
        self.shared += node.holders == 2

    def release(self, node: Node) -> None:
        """A request lets go of a node, before it lets go of the parent."""
        self.shared -= node.holders == 2
        node.holders -= 1
        if not node.holders:
            self._keep(node)

    def touch(self, node: Node) -> None:
        """A node was of use, if only to be copied. The caller holds its parent."""
        if not node.holders:
            self._kept.move_to_end(node)

    def detach(self, node: Node) -> None:
        """Take a node without children out; its block is now the caller's alone.

        The node is kept, or the caller alone holds it.
        """
        if not node.holders:
            del self._kept[node]
            self.kept_tokens -= len(node.tokens)
        self._unlink(node)

    def evict(self) -> bool:
        """Free the block of the least recently used kept node; False: there is none."""
        if not self._kept:
            return False
        node, _ = self._kept.popitem(last=False)
        self.kept_tokens -= len(node.tokens)
        self._unlink(node)
        self._free(node.block)
        return True

    def _supersede(self, parent: Node, tokens: Tokens) -> None:
        """Drop a kept block that holds nothing but the beginning of a new one.

        There is one at most, and it is the new one's neighbour, because nothing begins with it.
        """
        index = bisect_left(parent.order, tokens) - 1
        if index < 0:
            return
        before = parent.order[index]
        if before == tokens[: len(before)]:
            node = parent.children[before]
            self.detach(node)
            self._free(node.block)

    def _link(self, parent: Node, tokens: Tokens, block: int) -> Node:
        node = Node(parent, tokens, block)
        parent.children[tokens] = node
        parent.order.insert(bisect_left(parent.order, tokens), tokens)
        self.version += 1
        return node

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.children:
            raise ValueError("only a block that nothing follows can be taken out")
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        self._drop_root(parent)

    def _keep(self, node: Node) -> None:
        self._kept[node] = None
        self.kept_tokens += len(node.tokens)

    def _drop_root(self, root: Node) -> None:
        """Forget a client without running requests and kept blocks."""
        if root.parent is None and not root.holders and not root.children:
            del self._roots[self._names.pop(root)]
