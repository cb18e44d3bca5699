"""The memory of recurrent layers: each slot's state and latest inputs, and snapshots of both.

The state is that after the slot's first `applied` tokens. A ring buffer holds the inputs of the
last positions. A pass replays inputs from the ring on the state, up to its own first token, and
stores the state after its `num_committed` tokens. Later tokens may be rejected, so only their
inputs are stored, and the next pass overwrites those of rejected tokens: nothing has to be undone.
A short convolution has no state and reads only the ring.

Unlike keys, older states are gone. A request that shares an earlier one's prefix therefore needs a
snapshot: a copy of the state and of the inputs after it. A text that diverges anywhere between the
two can use it, if the cache has the blocks up to there. Snapshots are about as large as a state, so
they have their own limit: those taken on the way through a long prompt are dropped first, then the
least recently used.
"""

from __future__ import annotations

import mmap
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.kvcache.prefix_cache import Floats, Node, Snapshot
from specops.system.page_cache import ask_large_pages

# The maximum, if memory allows. A request takes two to four. With few slots there are as many
# conversations, edits and lists of tools to return to as with `_MIN_SLOTS`.
_PER_SLOT, _MIN_SLOTS = 4, 8
INTERVAL = 512  # tokens between two snapshots on the way through a long prompt


def max_snapshots(slots: int) -> int:
    """The maximum number of snapshots that are useful with this many slots."""
    return _PER_SLOT * max(slots, _MIN_SLOTS)


class RecurrentStateCache:
    """States and rings of all slots, and snapshots of them. For one thread.

    Args:
        shape: sizes of the model's cache, with at least one recurrent layer.
        num_slots: number of slots.
        snapshot_bytes: maximum memory of all snapshots together; None: `max_snapshots` full ones.

    Attributes:
        descriptor: [5] int64, the operators' input `kept_inputs`: address, slots, positions of a
            ring, floats of a position, floats of a slot's states.
        snapshot_bytes: maximum memory of the snapshots.
        used_bytes: memory of the snapshots now.
        events: number of snapshots taken, used and dropped; its reader may clear it.
    """

    def __init__(
        self, shape: CacheShape, num_slots: int, snapshot_bytes: int | None = None
    ) -> None:
        self._before, self._ring = shape.positions_before, shape.ring
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, num_slots * shape.slot_bytes, flags=flags)
        if shape.state_floats:
            ask_large_pages(mapped)
        memory = np.frombuffer(mapped, np.float32).reshape(num_slots, -1)
        self._memory: Floats = memory
        self._states: Floats = memory[:, : shape.state_floats]
        self._rings: Floats = memory[:, shape.state_floats :].reshape(
            num_slots, self._ring, shape.ring_floats_per_token
        )
        # The positions whose inputs are in each slot's ring, as a half-open range; None: any, for
        # measurements.
        self._held: list[tuple[int, int] | None] = [(0, 0)] * num_slots
        self._applied = [0] * num_slots
        self._restored: set[int] = set()  # slots that no pass has continued since
        self._snapshots: OrderedDict[Snapshot, None] = OrderedDict()  # least recently used first
        whole = max_snapshots(num_slots) * shape.slot_bytes
        self.snapshot_bytes = whole if snapshot_bytes is None else snapshot_bytes
        self.used_bytes = 0
        self.events: Counter[str] = Counter()
        address, floats = memory.ctypes.data, shape.ring_floats_per_token
        sizes = address, num_slots, self._ring, floats, shape.state_floats
        self.descriptor: npt.NDArray[np.int64] = np.array(sizes, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of states and rings of all slots, without snapshots."""
        return self._memory.nbytes

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._snapshots)

    def clear(self, slot: int) -> None:
        """Start a new sequence in a slot."""
        self._held[slot] = 0, 0
        self._applied[slot] = 0
        self._restored.discard(slot)

    def zero(self, slot: int) -> None:
        """Let passes compute tokens of a slot at any position, from a state of zeros."""
        self._memory[slot] = 0
        self._held[slot] = None

    def write(
        self, slot: int, start: int, count: int, num_committed: int | None = None
    ) -> list[int]:
        """Record that a pass computes `count` tokens of a slot from position `start` on.

        Args:
            slot: the slot's number.
            start: position of the first token.
            count: number of tokens.
            num_committed: number of the slot's tokens that can no longer be rejected; None: all.

        Returns:
            The numbers of tokens in the state before and after the pass: the operators' input
            `progress`.

        Raises:
            ValueError: the state or the inputs before `start` are gone or were never computed.
        """
        if not self.holds(slot, start):
            raise ValueError(
                f"slot {slot} cannot continue at position {start}: it holds the inputs of "
                f"{self._held[slot]} and the state after {self._applied[slot]} tokens"
            )
        end, held = start + count, self._held[slot]
        if held is None:
            return [start, end]
        if slot in self._restored:
            self._restored.remove(slot)
            self.events["used"] += 1
        applied = min(self._applied[slot], start)
        num_committed = end if num_committed is None else max(applied, num_committed)
        self._held[slot] = max(min(held[0], start), end - self._ring), end
        self._applied[slot] = num_committed if self._states.size else 0
        return [applied, num_committed]

    def holds(self, slot: int, length: int) -> bool:
        """Whether a slot can continue after its first `length` tokens."""
        held = self._held[slot]
        if not length or held is None:
            return True
        applied = self._applied[slot]
        return applied <= length <= held[1] and max(0, length - self._before) >= held[0]

    def save(self, slot: int, path: Sequence[Node], tokens: Sequence[int], *, lasts: bool) -> None:
        """Take a snapshot after all final tokens of a slot, if the slot still has the inputs.

        Args:
            slot: the slot's number.
            path: the root and the nodes of the tokens' full blocks.
            tokens: the slot's final tokens.
            lasts: whether to keep it longer than snapshots that do not last.
        """
        length, held, applied = len(tokens), self._held[slot], self._applied[slot]
        if not length or held is None or not self.holds(slot, length):
            return
        if slot in self._restored:  # a request that got too few blocks: this snapshot exists
            return
        for old in _whole(path, tokens):
            if old.end == length:
                old.lasts |= lasts
                self._snapshots.move_to_end(old)
                return
        least = max(applied, held[0] + self._before if held[0] else 0)
        first = max(0, least - self._before)
        state, ring = self._states[slot] if applied else self._states[slot, :0], self._rings[slot]
        size = state.nbytes + (length - first) * ring[0].nbytes
        if size > self.snapshot_bytes:
            return
        while self.used_bytes + size > self.snapshot_bytes:
            self.drop(min(self._snapshots, key=attrgetter("lasts")))
        inputs = ring[np.arange(first, length) % self._ring]
        node = path[least // BLOCK_TOKENS]
        tail = tuple(tokens[node.end :])
        item = Snapshot(node, tail, least, first, applied, state.copy(), inputs, lasts)
        node.snapshots.append(item)
        self._snapshots[item] = None
        self.used_bytes += size
        self.events["taken"] += 1

    def restore(
        self, slot: int, snapshot: Snapshot, path: Iterable[Node], tokens: Sequence[int]
    ) -> None:
        """Let a slot continue after `tokens`, for which the snapshot is valid; see `save`."""
        places = np.arange(snapshot.first, len(tokens)) % self._ring
        self._rings[slot, places] = snapshot.inputs[: len(places)]
        self._states[slot, : snapshot.state.size] = snapshot.state
        self._held[slot] = snapshot.first, len(tokens)
        self._applied[slot] = snapshot.applied
        self._restored.add(slot)
        snapshot.lasts = True
        self._snapshots.move_to_end(snapshot)
        # The snapshots before it are in use, too. The shortest is evicted last: a text that grows
        # step by step, as an agent's does, adds new ones all the time and returns to its start.
        for item in sorted(_whole(path, tokens), key=lambda item: -item.end):
            self._snapshots.move_to_end(item)

    def drop(self, snapshot: Snapshot) -> None:
        """Free a snapshot's memory."""
        snapshot.node.snapshots.remove(snapshot)
        del self._snapshots[snapshot]
        self.used_bytes -= snapshot.nbytes
        self.events["dropped"] += 1


def _whole(path: Iterable[Node], tokens: Sequence[int]) -> list[Snapshot]:
    """The snapshots on a path whose tokens are a prefix of `tokens`."""
    found = [item for node in path for item in node.snapshots]
    return [item for item in found if item.matchable_len(tokens, len(tokens)) == item.end]
