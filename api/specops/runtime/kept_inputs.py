"""What layers with a short convolution keep of each slot's last tokens, beside the KV cache.

A slot keeps the inputs of its last positions in a ring, by position, as the cache keeps keys: a
rejected token's are overwritten by the next pass, so nothing has to be undone. Unlike keys, those
of older positions are gone. A request that begins like an earlier one therefore needs a snapshot:
a copy of the ring at some position up to which the cache still has the blocks. Snapshots are few;
the least recently used one goes first.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specops.runtime.block_pool import CacheShape
from specops.runtime.prefix_trie import Node, common_prefix

SNAPSHOTS_PER_SLOT = 4
INTERVAL = 512  # a prompt's snapshots are at multiples of so many tokens, and at its end


@dataclass(eq=False, slots=True)
class _Snapshot:
    """A copy of a ring after `tokens`; valid for their first `least` and more, too."""

    root: Node
    tokens: list[int]
    least: int
    number: int


class KeptInputs:
    """The rings of all slots, and snapshots of them. For one thread.

    Args:
        shape: sizes of the model's cache; some layer keeps inputs.
        num_slots: number of slots.

    Attributes:
        descriptor: [4] int64, the operator's input `kept_inputs`: address, slots, positions of a
            ring, floats of a position.
    """

    def __init__(self, shape: CacheShape, num_slots: int) -> None:
        self._before = shape.positions_before
        ring = shape.ring
        copies = SNAPSHOTS_PER_SLOT * num_slots
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, (num_slots + copies) * shape.slot_bytes, flags=flags)
        memory = np.frombuffer(mapped, np.float32).reshape(-1, ring, shape.kept_floats)
        self._rings: npt.NDArray[np.float32] = memory[:num_slots]
        self._copies: npt.NDArray[np.float32] = memory[num_slots:]
        self._ring = ring
        # The positions of each slot whose inputs are in its ring, from the first up to the second;
        # None: any, of measurements.
        self._held: list[tuple[int, int] | None] = [(0, 0)] * num_slots
        self._free = list(range(copies))
        self._snapshots: list[_Snapshot] = []  # the least recently used one first
        numbers = memory.ctypes.data, num_slots, ring, shape.kept_floats
        self.descriptor: npt.NDArray[np.int64] = np.array(numbers, np.int64)

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._snapshots)

    def clear(self, slot: int) -> None:
        """Begin a sequence in a slot."""
        self._held[slot] = 0, 0

    def zero(self, slot: int) -> None:
        """Let a pass compute tokens of a slot at any position, as behind zeros."""
        self._rings[slot] = 0
        self._held[slot] = None

    def write(self, slot: int, start: int, count: int) -> None:
        """Note that a pass computes `count` tokens of a slot from position `start` on.

        Raises:
            ValueError: the inputs before them are gone, or were never computed.
        """
        if not self.holds(slot, start):
            raise ValueError(
                f"slot {slot} cannot go on at position {start}: it holds the inputs of "
                f"{self._held[slot]}"
            )
        if (held := self._held[slot]) is not None:
            end = start + count
            self._held[slot] = max(min(held[0], start), end - self._ring), end

    def holds(self, slot: int, length: int) -> bool:
        """Whether a slot can continue after its first `length` tokens."""
        held = self._held[slot]
        if not length or held is None:
            return True
        return length <= held[1] and max(0, length - self._before) >= held[0]

    def save(self, slot: int, root: Node, tokens: Sequence[int], length: int) -> None:
        """Take a snapshot after the first `length` tokens of a slot, where it holds them."""
        held = self._held[slot]
        if not length or held is None or not self.holds(slot, length):
            return
        known = list(tokens[:length])
        for old in self._snapshots:
            if old.root is root and old.tokens == known:
                self._use(old)
                return
        if not self._free:
            self._free.append(self._snapshots.pop(0).number)
        least = held[0] + self._before if held[0] else 0
        made = _Snapshot(root, known, least, self._free.pop())
        self._copies[made.number] = self._rings[slot]
        self._snapshots.append(made)

    def longest(self, root: Node, tokens: Sequence[int], most: int) -> int:
        """The largest number of `tokens`, at most `most`, after which a slot can continue."""
        return max((_usable(item, root, tokens, most) for item in self._snapshots), default=0)

    def restore(self, slot: int, root: Node, tokens: Sequence[int], length: int) -> None:
        """Let a slot continue after the first `length` tokens, as `longest` returned them.

        Raises:
            ValueError: there is no such snapshot.
        """
        for item in reversed(self._snapshots):
            if _usable(item, root, tokens, length) == length:
                self._rings[slot] = self._copies[item.number]
                self._held[slot] = max(0, item.least - self._before), length
                self._use(item)
                return
        raise ValueError(f"there is no snapshot to continue from after {length} tokens")

    def _use(self, item: _Snapshot) -> None:
        self._snapshots.remove(item)
        self._snapshots.append(item)


def _usable(item: _Snapshot, root: Node, tokens: Sequence[int], most: int) -> int:
    """The number of `tokens` after which a slot can continue from a snapshot; 0: none."""
    least, end = item.least, min(len(item.tokens), most)
    if item.root is not root or end < least or list(tokens[:least]) != item.tokens[:least]:
        return 0
    return least + common_prefix(item.tokens[least:end], tokens[least:end])
