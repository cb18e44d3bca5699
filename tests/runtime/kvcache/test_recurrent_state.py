"""States and rings of slots: what passes are told, and which snapshots stay.

`test_manager` shows what snapshots give back.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from specops.runtime.kvcache.block_pool import ROLLBACK, CacheShape
from specops.runtime.kvcache.prefix_cache import Node, PrefixCache, longest_usable
from specops.runtime.kvcache.recurrent_state import RecurrentStateCache
from specops.runtime.layer_shapes import Attention, GatedDelta, LayerShape, ShortConv, StateSpace

DELTA = GatedDelta(key_heads=1, value_heads=2, key_size=16, value_size=32)
LAYERS: list[LayerShape] = [ShortConv(96, 4), DELTA, Attention(2, 8)]
SHAPE = CacheShape.of(LAYERS, "fp32")
RING = 3 + ROLLBACK + 1
TEXT = list(range(100))


@pytest.fixture
def kept() -> RecurrentStateCache:
    return RecurrentStateCache(SHAPE, 2)


@pytest.fixture
def path() -> list[Node]:
    """Of a text of 100 tokens: the root and its full block."""
    prefixes = PrefixCache(lambda node: None)
    return [root := prefixes.root(""), prefixes.insert(root, tuple(TEXT[:64]), 0)]


def taken(kept: RecurrentStateCache, root: Node, number: int) -> None:
    """Take a snapshot behind 40 equal tokens, all of which are in its state."""
    kept.clear(0)
    kept.write(0, 0, 40)
    kept.save(0, [root], [number] * 40, lasts=True)


def known(root: Node, numbers: Sequence[int]) -> list[int]:
    """After how many of 41 equal tokens a slot could continue."""
    return [longest_usable([root], [number] * 41, 40)[0] for number in numbers]


def memory(kept: RecurrentStateCache) -> np.ndarray:
    """The operators' view of all slots: [slots, states and ring]."""
    return kept._memory


def test_a_cache_has_the_sizes_of_all_its_layers() -> None:
    mamba = StateSpace(heads=3, groups=1, size=32, state_size=16)
    shape = CacheShape.of([*LAYERS, mamba], "fp32")
    assert (len(shape.attention), shape.positions_before, shape.ring) == (1, 3, RING)
    assert shape.ring_floats_per_token == 96 + (16 + 64 + 16) + (96 + 16 + 16)
    assert shape.state_floats == 2 * 32 * 16 + 3 * 32 * 16
    assert shape.slot_bytes == 4 * (shape.state_floats + RING * shape.ring_floats_per_token)


def test_a_pass_replays_what_was_accepted_and_settles_what_stays(kept: RecurrentStateCache) -> None:
    assert kept.write(0, 0, 100, 84) == [0, 84]  # the end of a prompt
    assert kept.write(0, 100, 9, 101) == [84, 101]  # a token and eight draft tokens
    assert kept.write(0, 104, 5, 105) == [101, 105]  # three were accepted
    assert kept.write(0, 105, 1, 106) == [105, 106]  # none was
    assert kept.write(1, 0, 7) == [0, 7]
    assert kept.write(1, 7, 1, 3) == [7, 7]  # what is settled stays so
    kept.clear(0)
    assert kept.write(0, 0, 3, -13) == [0, 0]  # a prompt that is shorter than what may go back


@pytest.mark.parametrize("start", [100, 106, 50])
def test_a_slot_goes_on_only_where_it_has_state_and_inputs(
    kept: RecurrentStateCache, start: int
) -> None:
    kept.write(0, 0, 100, 84)
    kept.write(0, 100, 5, 101)
    with pytest.raises(ValueError, match=f"cannot continue at position {start}"):
        kept.write(0, start, 1)


def test_passes_of_measurements_begin_anywhere(kept: RecurrentStateCache) -> None:
    memory(kept)[0] = 1
    kept.zero(0)
    assert not memory(kept)[0].any()
    for start in (64, 0, 1024):
        assert kept.write(0, start, 8) == [start, start + 8]


def test_snapshots_take_no_more_than_their_bound(path: list[Node]) -> None:
    exact, root = 4 * (SHAPE.state_floats + 3 * SHAPE.ring_floats_per_token), path[0]
    kept = RecurrentStateCache(SHAPE, 1, 3 * exact)
    for number in range(5):
        taken(kept, root, number)
    assert (kept.snapshots, kept.used_bytes) == (3, 3 * exact)
    assert known(root, range(5)) == [0, 0, 40, 40, 40]
    _, snapshot = longest_usable([root], [2] * 41, 40)
    assert snapshot is not None
    kept.restore(0, snapshot, [root], [2] * 40)  # it is used again, so 3 goes first
    taken(kept, root, 9)
    assert known(root, [2, 3, 4, 9]) == [40, 0, 40, 40]
    none = RecurrentStateCache(SHAPE, 1, exact - 1)
    taken(none, root, 1)
    assert none.snapshots == 0


def test_a_snapshot_counts_as_used_when_a_pass_goes_on_from_it(
    kept: RecurrentStateCache, path: list[Node]
) -> None:
    """A request that lacks KV blocks may begin, and leave, many times."""
    kept.write(0, 0, 100, 84)
    kept.save(0, path, TEXT, lasts=True)
    _, snapshot = longest_usable(path, TEXT, 90)
    assert snapshot is not None
    for _ in range(5):
        kept.clear(1)
        kept.restore(1, snapshot, path, TEXT[:90])
        kept.save(1, path, TEXT[:90], lasts=True)  # as at each end of a request
    assert kept.events == {"taken": 1}
    kept.write(1, 90, 4, 91)
    kept.write(1, 91, 4, 92)
    kept.save(1, path, TEXT[:92], lasts=True)
    assert kept.events == {"taken": 2, "used": 1}
