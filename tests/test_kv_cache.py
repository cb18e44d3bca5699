"""Rows of the cache keep what they hold when lengths change and rows change places."""

import numpy as np
import pytest

from specops.kv_cache import CacheShape, KvCache

SHAPE = CacheShape(layers=2, kv_heads=3, head_dim=4, dtype=np.dtype(np.float32))


@pytest.fixture
def cache() -> KvCache:
    cache = KvCache(SHAPE, rows=3, capacity=8)
    rng = np.random.default_rng(0)
    for keys, values in cache.buffers:
        keys[:] = rng.standard_normal(keys.shape)
        values[:] = rng.standard_normal(values.shape)
    cache.lengths[:] = [2, 5, 8]
    return cache


def test_sizes_follow_from_the_shape(cache: KvCache) -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 3 * 4 * 4
    assert cache.nbytes == sum(keys.nbytes + values.nbytes for keys, values in cache.buffers)
    assert cache.tokens == 15


def test_truncate_changes_only_the_length(cache: KvCache) -> None:
    before = cache.buffers[0][0].copy()
    cache.truncate(1, 3)
    assert cache.lengths == [2, 3, 8]
    assert np.array_equal(cache.buffers[0][0], before)


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_refuses_what_the_row_does_not_hold(cache: KvCache, length: int) -> None:
    with pytest.raises(ValueError, match="row 1 holds 5 tokens"):
        cache.truncate(1, length)


def test_a_copied_beginning_replaces_what_the_row_held(cache: KvCache) -> None:
    expected = [(keys[2, :, :4].copy(), values[2, :, :4].copy()) for keys, values in cache.buffers]
    cache.copy(2, 1, 4)
    assert cache.lengths == [2, 4, 8]
    for (keys, values), (old_keys, old_values) in zip(cache.buffers, expected, strict=True):
        for row in (1, 2):
            assert np.array_equal(keys[row, :, :4], old_keys)
            assert np.array_equal(values[row, :, :4], old_values)


def test_no_more_can_be_copied_than_there_is(cache: KvCache) -> None:
    with pytest.raises(ValueError, match="row 1 holds 5 tokens, cannot give 6"):
        cache.copy(1, 0, 6)


@pytest.mark.parametrize("lengths", [[2, 5, 8], [0, 5, 8], [8, 5, 0], [0, 5, 0]])
def test_rows_that_change_places_keep_what_they_hold(cache: KvCache, lengths: list[int]) -> None:
    cache.lengths[:] = lengths
    first, _, last = lengths
    before = [[part.copy() for part in buffers] for buffers in cache.buffers]
    cache.swap(0, 2)
    assert cache.lengths == [last, lengths[1], first]
    for buffers, old in zip(cache.buffers, before, strict=True):
        for part, expected in zip(buffers, old, strict=True):
            assert np.array_equal(part[2, :, :first], expected[0, :, :first])
            assert np.array_equal(part[0, :, :last], expected[2, :, :last])
            assert np.array_equal(part[1], expected[1])
