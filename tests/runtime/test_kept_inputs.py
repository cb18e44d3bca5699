"""States and kept inputs of slots: what passes are told, and what snapshots give back."""

from __future__ import annotations

import numpy as np
import pytest

from specops.runtime.block_pool import ROLLBACK, CacheShape
from specops.runtime.kept_inputs import KeptInputs
from specops.runtime.layer_shapes import Attention, GatedDelta, LayerShape, ShortConv, StateSpace
from specops.runtime.prefix_trie import Node, PrefixTrie

DELTA = GatedDelta(key_heads=1, value_heads=2, key_size=16, value_size=32)
LAYERS: list[LayerShape] = [ShortConv(96, 4), DELTA, Attention(2, 8)]
SHAPE = CacheShape.of(LAYERS, "fp32")
RING = 3 + ROLLBACK + 1


@pytest.fixture
def kept() -> KeptInputs:
    return KeptInputs(SHAPE, 2)


@pytest.fixture
def root() -> Node:
    return PrefixTrie(lambda block: None).hold_root("")


def memory(kept: KeptInputs) -> np.ndarray:
    """The operators' view of all slots: [slots, states and ring]."""
    return kept._memory


def rows(kept: KeptInputs, slot: int) -> np.ndarray:
    return memory(kept)[slot, SHAPE.state_floats :].reshape(RING, SHAPE.kept_floats)


def test_a_cache_has_the_sizes_of_all_its_layers() -> None:
    mamba = StateSpace(heads=3, groups=1, size=32, state_size=16)
    shape = CacheShape.of([*LAYERS, mamba], "fp32")
    assert (len(shape.attention), shape.positions_before, shape.ring) == (1, 3, RING)
    assert shape.kept_floats == 96 + (16 + 64 + 16) + (96 + 16 + 16)
    assert shape.state_floats == 2 * 32 * 16 + 3 * 32 * 16
    assert shape.slot_bytes == 4 * (shape.state_floats + RING * shape.kept_floats)


def test_a_pass_replays_what_was_accepted_and_settles_what_stays(kept: KeptInputs) -> None:
    assert kept.write(0, 0, 100, 84) == [0, 84]  # the end of a prompt
    assert kept.write(0, 100, 9, 101) == [84, 101]  # a token and eight draft tokens
    assert kept.write(0, 104, 5, 105) == [101, 105]  # three were accepted
    assert kept.write(0, 105, 1, 106) == [105, 106]  # none was
    assert kept.write(1, 0, 7) == [0, 7]
    assert kept.write(1, 7, 1, 3) == [7, 7]  # what is settled stays so
    kept.clear(0)
    assert kept.write(0, 0, 3, -13) == [0, 0]  # a prompt that is shorter than what may go back


@pytest.mark.parametrize("start", [100, 106, 50])
def test_a_slot_goes_on_only_where_it_has_state_and_inputs(kept: KeptInputs, start: int) -> None:
    kept.write(0, 0, 100, 84)
    kept.write(0, 100, 5, 101)
    with pytest.raises(ValueError, match=f"cannot continue at position {start}"):
        kept.write(0, start, 1)


def test_passes_of_measurements_begin_anywhere(kept: KeptInputs) -> None:
    memory(kept)[0] = 1
    kept.zero(0)
    assert not memory(kept)[0].any()
    for start in (64, 0, 1024):
        assert kept.write(0, start, 8) == [start, start + 8]


def test_a_snapshot_gives_back_the_state_and_the_inputs_behind_it(
    kept: KeptInputs, root: Node
) -> None:
    text = list(range(100))
    kept.write(0, 0, 100, 84)
    for position in range(100):
        rows(kept, 0)[position % RING] = position
    memory(kept)[0, : SHAPE.state_floats] = 84
    kept.save(0, root, text, 100)
    other = [*text[:90], 7, 8, 9]
    assert kept.longest(root, other, len(other) - 1) == 90
    assert kept.longest(root, text[:83] + [0] * 9, 90) == 0  # the state has too many tokens
    assert kept.longest(root, text, 84) == 84
    memory(kept)[1] = -1
    kept.restore(1, root, other, 90)
    assert (memory(kept)[1, : SHAPE.state_floats] == 84).all()
    for position in range(84 - 3, 90):
        assert (rows(kept, 1)[position % RING] == position).all()
    assert kept.write(1, 90, 4, 91) == [84, 91]


def test_snapshots_take_no_more_than_their_bound(root: Node) -> None:
    exact = 4 * (SHAPE.state_floats + 3 * SHAPE.kept_floats) + 8 * 40  # numbers, and tokens
    kept = KeptInputs(SHAPE, 1, 3 * exact)
    for number in range(5):
        kept.clear(0)
        kept.write(0, 0, 40)
        kept.save(0, root, [number] * 40, 40)
        kept.longest(root, [2] * 41, 40)
    assert (kept.snapshots, kept.used_bytes) == (3, 3 * exact)
    assert [kept.longest(root, [number] * 41, 40) for number in range(5)] == [0, 0, 40, 40, 40]
    kept.restore(0, root, [2] * 41, 40)  # it is used again, so 3 goes first
    kept.clear(0)
    kept.write(0, 0, 40)
    kept.save(0, root, [9] * 40, 40)
    assert [kept.longest(root, [number] * 41, 40) for number in (2, 3, 4, 9)] == [40, 0, 40, 40]
    none = KeptInputs(SHAPE, 1, exact - 1)
    none.write(0, 0, 40)
    none.save(0, root, [1] * 40, 40)
    assert none.snapshots == 0


def test_a_snapshot_counts_as_used_when_a_pass_goes_on_from_it(
    kept: KeptInputs, root: Node
) -> None:
    """A request that lacks KV blocks may begin, and leave, many times."""
    text = list(range(100))
    kept.write(0, 0, 100, 84)
    kept.save(0, root, text, 100)
    for _ in range(5):
        kept.clear(1)
        kept.restore(1, root, text, 90)
        kept.save(1, root, text, 90)  # as at each end of a request
    assert kept.events == {"taken": 1}
    kept.write(1, 90, 4, 91)
    kept.write(1, 91, 4, 92)
    kept.save(1, root, text, 92)
    assert kept.events == {"taken": 2, "used": 1}
