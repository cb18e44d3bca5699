"""Rows of the cache keep what they hold when lengths change and rows move."""

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


def test_a_moved_row_holds_the_same_tokens(cache: KvCache) -> None:
    expected = [(keys[2].copy(), values[2].copy()) for keys, values in cache.buffers]
    cache.move(2, 0)
    assert cache.lengths == [8, 5, 0]
    for (keys, values), (old_keys, old_values) in zip(cache.buffers, expected, strict=True):
        assert np.array_equal(keys[0], old_keys)
        assert np.array_equal(values[0], old_values)
