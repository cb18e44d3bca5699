"""What recurrent layers keep for each slot: a state and the latest inputs, and snapshots of both.

The state is the one after the slot's first `applied` tokens. The inputs of the last positions are
in a ring, by position, as the cache keeps keys. A pass replays inputs of the ring on the state up
to where its own tokens begin, and leaves the state after its `num_committed` tokens: those behind
may be rejected, and of them only the inputs stay. So nothing has to be undone: the next pass
overwrites the inputs of rejected tokens. A short convolution has no state, it reads the ring alone.

Unlike keys, what is older is gone. A request that begins like an earlier one therefore needs a
snapshot: a copy of the state and of the inputs after it. It serves texts that diverge anywhere
between the two, as long as the cache has the blocks up to there. Snapshots are about as large as a
state, so they have a separate limit: those taken on the way through a long prompt are dropped
first, then the least recently used one.
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

# At most, where memory allows. A request leaves two to four, and few slots serve no less of
# conversations to return to, edits of them and other lists of tools.
_PER_SLOT, _MIN_SLOTS = 4, 8
INTERVAL = 512  # tokens between two snapshots on the way through a long prompt


def max_snapshots(slots: int) -> int:
    """The most snapshots that are of use to the requests of this many slots."""
    return _PER_SLOT * max(slots, _MIN_SLOTS)


class RecurrentStateCache:
    """States and rings of all slots, and snapshots of them. For one thread.

    Args:
        shape: sizes of the model's cache; some layer is recurrent.
        num_slots: number of slots.
        snapshot_bytes: bound of all snapshots together; None: `max_snapshots` whole ones.

    Attributes:
        descriptor: [5] int64, the operators' input `kept_inputs`: address, slots, positions of a
            ring, floats of a position, floats of a slot's states.
        snapshot_bytes: the bound.
        used_bytes: memory of the snapshots.
        events: how many snapshots were taken, used and dropped; who reads it may clear it.
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
        # The positions of each slot whose inputs are in its ring, from the first up to the second;
        # None: any, of measurements.
        self._held: list[tuple[int, int] | None] = [(0, 0)] * num_slots
        self._applied = [0] * num_slots
        self._restored: set[int] = set()  # slots of which no pass has computed anything since
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
        """Begin a sequence in a slot."""
        self._held[slot] = 0, 0
        self._applied[slot] = 0
        self._restored.discard(slot)

    def zero(self, slot: int) -> None:
        """Let a pass compute tokens of a slot at any position, as if zeros came before."""
        self._memory[slot] = 0
        self._held[slot] = None

    def write(
        self, slot: int, start: int, count: int, num_committed: int | None = None
    ) -> list[int]:
        """Note that a pass computes `count` tokens of a slot from position `start` on.

        Args:
            slot: number of the slot.
            start: position of the first token.
            count: number of tokens.
            num_committed: number of the slot's tokens that no later pass takes back; None: all.

        Returns:
            The numbers of tokens in the state before and after the pass, the operators' input
            `progress`.

        Raises:
            ValueError: the inputs or the state before them are gone, or were never computed.
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
        """Take a snapshot after `tokens`, all of a slot's, if the slot holds what that needs.

        Args:
            slot: number of the slot.
            path: the root and the nodes of the tokens' full blocks.
            tokens: the slot's final ones.
            lasts: others are dropped first.
        """
        length, held, applied = len(tokens), self._held[slot], self._applied[slot]
        if not length or held is None or not self.holds(slot, length):
            return
        if slot in self._restored:  # a request that got too few blocks: this one is there
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
        """Let a slot continue after `tokens`, for which the snapshot is usable; see `save`."""
        places = np.arange(snapshot.first, len(tokens)) % self._ring
        self._rings[slot, places] = snapshot.inputs[: len(places)]
        self._states[slot, : snapshot.state.size] = snapshot.state
        self._held[slot] = snapshot.first, len(tokens)
        self._applied[slot] = snapshot.applied
        self._restored.add(slot)
        snapshot.lasts = True
        self._snapshots.move_to_end(snapshot)
        # Those before it are in use as well. The shortest goes last: a text that grows step by
        # step, as an agent's does, leaves new ones all the time, and returns to where it began.
        for item in sorted(_whole(path, tokens), key=lambda item: -item.end):
            self._snapshots.move_to_end(item)

    def drop(self, snapshot: Snapshot) -> None:
        """Give a snapshot's memory back."""
        snapshot.node.snapshots.remove(snapshot)
        del self._snapshots[snapshot]
        self.used_bytes -= snapshot.nbytes
        self.events["dropped"] += 1


def _whole(path: Iterable[Node], tokens: Sequence[int]) -> list[Snapshot]:
    """The snapshots on a path whose tokens are all a beginning of `tokens`."""
    found = [item for node in path for item in node.snapshots]
    return [item for item in found if item.matchable_len(tokens, len(tokens)) == item.end]
