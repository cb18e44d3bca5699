"""Finds the longest cached prefix of a text: an exact trie of blocks, with one root per client.

A node is a block of the KV cache. Its path from the root is the sequence of tokens from which its
keys and values were computed, so two requests with equal prefixes hold the same nodes. Snapshots
of recurrent states belong to nodes, and are dropped with them.

A node that no request holds stays cached until its block is needed; the least recently used node
is evicted first. A request that holds a node also holds its ancestors, and releases them after the
node. So the oldest cached node never has a child, and eviction never cuts off part of the trie.

Published ideas: RadixAttention (SGLang, arXiv 2312.07104) for the tree, PagedAttention (vLLM, arXiv
2309.06180) for the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress, count
from operator import attrgetter, itemgetter, ne

import numpy as np
import numpy.typing as npt

from specops.runtime.kernels import BLOCK_TOKENS

Floats = npt.NDArray[np.float32]
Tokens = tuple[int, ...]
_TOKENS = attrgetter("tokens")


class PrefixSharing(StrEnum):
    """Which requests share blocks."""

    OFF = "off"  # none
    CLIENT = "client"  # of one client: timings tell no client what another one asked
    ALL = "all"


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    differing = compress(count(), map(ne, left, right))
    return next(differing, min(len(left), len(right)))


class Node:
    """A block of the cache and its tokens.

    Attributes:
        parent: node of the previous block; None for a root, which has no block.
        tokens: 64 tokens, or fewer in a cached partial block; requests only hold full blocks.
        block: number of the block in the pool.
        end: number of tokens from the root to the end of this block.
        ref_count: number of requests that hold the node; 0: it is cached.
        children: nodes of the next blocks, sorted by their tokens.
        snapshots: snapshots from which a text can continue after this block.
    """

    __slots__ = ("block", "children", "end", "parent", "ref_count", "snapshots", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.end: int = len(tokens) if parent is None else parent.end + len(tokens)
        self.ref_count = 0
        self.children: list[Node] = []
        self.snapshots: list[Snapshot] = []

    def walk(self, tokens: Sequence[int], most: int) -> list[Node]:
        """The full blocks below this one that match `tokens[:most]`, in order."""
        path, node = [], self
        for start in range(self.end, most - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = tuple(tokens[start : start + BLOCK_TOKENS])
            index = bisect_left(node.children, block, key=_TOKENS)
            if index == len(node.children) or node.children[index].tokens != block:
                break
            path.append(node := node.children[index])
        return path

    def closest(self, tokens: Tokens) -> tuple[int, int]:
        """Find the child with the longest common prefix: a neighbour of where `tokens` would sort.

        Returns:
            The number of its block (-1: none), and the length of the common prefix.
        """
        index = bisect_left(self.children, tokens, key=_TOKENS)
        siblings = self.children[max(0, index - 1) : index + 1]
        agreeing = ((node.block, common_prefix(node.tokens, tokens)) for node in siblings)
        return max(agreeing, key=itemgetter(1), default=(-1, 0))


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of a slot's recurrent state and of its latest inputs.

    Attributes:
        node: the last full block before `least`, to which the snapshot belongs.
        tail: the tokens after that block, up to where the snapshot was taken.
        least: the snapshot is valid from this number of tokens up to the end of the tail.
        first: position of the first saved inputs.
        applied: number of tokens in the state.
        state: the state; empty before the first token.
        inputs: the inputs of all positions from `first` on.
        lasts: False if it was taken on the way through a long prompt and never used.
    """

    node: Node
    tail: Tokens
    least: int
    first: int
    applied: int
    state: Floats
    inputs: Floats
    lasts: bool

    @property
    def end(self) -> int:
        """Number of tokens at which the snapshot was taken."""
        return self.node.end + len(self.tail)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self.state.nbytes + self.inputs.nbytes

    def matchable_len(self, tokens: Sequence[int], most: int) -> int:
        """The largest number of a text's tokens, at most `most`, at which it is valid; 0: none.

        The snapshot's node must be on the text's path.
        """
        start, end = self.node.end, min(self.end, most)
        length = start + common_prefix(self.tail, tokens[start:end])
        return length if self.least <= length <= most else 0


def longest_usable(
    path: Iterable[Node], tokens: Sequence[int], most: int
) -> tuple[int, Snapshot | None]:
    """Find the snapshot on a text's path that covers most of its first `most` tokens.

    Returns:
        The number of tokens, and the snapshot; 0 and None if there is none.
    """
    best: tuple[int, Snapshot | None] = 0, None
    for node in path:
        for item in node.snapshots:
            if (length := item.matchable_len(tokens, most)) > best[0]:
                best = length, item
    return best


class PrefixCache:
    """The nodes of all clients.

    Args:
        on_remove: called with each removed node.

    Attributes:
        cached_tokens: number of tokens in cached nodes.
        shared: number of nodes that several requests hold.
        version: increases with each new node.
    """

    def __init__(self, on_remove: Callable[[Node], None]) -> None:
        self._on_remove = on_remove
        self._roots: dict[str, Node] = {}
        self._cached: OrderedDict[Node, None] = OrderedDict()  # descendants before ancestors
        self.cached_tokens = 0
        self.shared = 0
        self.version = 0

    @property
    def cached(self) -> int:
        """Number of cached nodes: `evict` can free their blocks."""
        return len(self._cached)

    def root(self, client: str) -> Node:
        """A client's root. Roots are never removed: there are only as many as API keys."""
        return self._roots.setdefault(client, Node(None, (), -1))

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """Cache a block below a node, unless another block starts with the same tokens.

        A cached block whose tokens are a prefix of the new block's is removed.

        Returns:
            The new node, or the node of the other block.
        """
        siblings = parent.children
        index = bisect_left(siblings, tokens, key=_TOKENS)
        if index < len(siblings) and siblings[index].tokens[: len(tokens)] == tokens:
            if (node := siblings[index]) in self._cached:
                self._cached.move_to_end(node)
            return node
        if index and siblings[index - 1].tokens == tokens[: len(siblings[index - 1].tokens)]:
            index -= 1  # there is at most one, as no other block starts with its tokens
            self._remove(siblings[index])
        node = Node(parent, tokens, block)
        siblings.insert(index, node)
        self._cache(node)
        self.version += 1
        return node

    def hold(self, node: Node) -> None:
        """Hold a node for one more request, which already holds the parent."""
        if not node.ref_count:
            self._uncache(node)
        node.ref_count += 1
        self.shared += node.ref_count == 2

    def release(self, node: Node) -> None:
        """Release a request's hold on a node; the request releases the parent afterwards."""
        self.shared -= node.ref_count == 2
        node.ref_count -= 1
        if not node.ref_count:
            self._cache(node)

    def evict(self) -> None:
        """Remove the least recently used cached node, if there is one."""
        if (node := next(iter(self._cached), None)) is not None:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        self._uncache(node)
        if node.parent is not None:
            node.parent.children.remove(node)
        self._on_remove(node)

    def _cache(self, node: Node) -> None:
        self._cached[node] = None
        self.cached_tokens += len(node.tokens)

    def _uncache(self, node: Node) -> None:
        del self._cached[node]
        self.cached_tokens -= len(node.tokens)
