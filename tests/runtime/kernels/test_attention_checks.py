"""Attention refuses wrong inputs and says what is wrong, so it never reads beyond memory."""

from typing import Any

import numpy as np
import pytest

from specops.runtime import kernels
from tests.runtime.kernels.attention import Attention, Cache, Layer, Tokens

LAYER = Layer(heads=4, kv_heads=2, size=16, rotated=16, norm=True, value_norm=True)
MOST = np.iinfo(np.int64).max
CACHE = Cache(LAYER, "fp16", max_blocks=8)  # alive throughout: the operator has its address only
POSITIONS = 300  # of the rotary table; the block tables have 512


def good() -> tuple[Attention, dict[str, Any]]:
    """A pass of two spans, 3 and 2 tokens, that computes."""
    attention, tokens = Attention(LAYER, POSITIONS), Tokens.random(LAYER, 5)
    return attention, attention.feeds(CACHE, (1, 0, tokens.part(0, 3)), (0, 62, tokens.part(3, 5)))


def test_right_inputs_are_computed() -> None:
    attention, feeds = good()
    assert np.isfinite(attention.run(feeds)[:3]).all()


def spans(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, np.int64)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


WRONG: list[tuple[str, np.ndarray, str]] = [
    ("query", zeros(1, 5, 63), "query's last dimension"),
    ("query", zeros(1, 4, 64), "another number of tokens than the query"),
    ("query", zeros(1, 5, 128), "query's last dimension"),
    ("key", zeros(1, 5, 31), "last dimension of key or value"),
    ("key", zeros(1, 4, 32), "another number of tokens than the query"),
    ("value", zeros(1, 5, 64), "last dimension of key or value"),
    ("value", zeros(2, 5, 32), "another number of tokens than the query"),
    ("query", np.array(1, np.float32), "no dimensions"),
    ("query", zeros(*[1] * 7, 5, 64), "no dimensions or too many"),
    ("spans", spans((1, 0, 3)), "another number of tokens"),
    ("spans", spans((1, 0, 3), (0, 62, 3)), "another number of tokens"),
    ("spans", spans((1, 0, 6), (0, 62, -1)), "another number of tokens"),
    ("spans", spans((1, 0, MOST), (0, 62, 2)), "another number of tokens"),
    ("spans", spans((1, 0, 3), (1, 62, 2)), "two spans"),
    ("spans", spans((3, 0, 3), (0, 62, 2)), "no such slot"),
    ("spans", spans((-1, 0, 3), (0, 62, 2)), "no such slot"),
    ("spans", spans((MOST, 0, 3), (0, 62, 2)), "no such slot"),
    ("spans", spans((1, -1, 3), (0, 62, 2)), "below 0"),
    ("spans", spans((1, MOST, 3), (0, 62, 2)), "below 0 or too large"),
    ("spans", spans((1, 510, 3), (0, 62, 2)), "beyond the block tables"),
    ("spans", spans((1, 298, 3), (0, 62, 2)), "beyond the rotary table"),
    ("spans", np.zeros((2, 2), np.int64), r"spans is \[S, 3\]"),
    ("spans", np.zeros(3, np.int64), r"spans is \[S, 3\]"),
    ("block_tables", np.full((3, 8), 24, np.int64), "not in the cache"),
    ("block_tables", np.full((3, 8), -1, np.int64), "not in the cache"),
    ("block_tables", np.full((3, 8), MOST, np.int64), "not in the cache"),
    ("block_tables", np.zeros(8, np.int64), r"\[slots, max_blocks\]"),
    ("block_tables", np.zeros((3, 0), np.int64), "beyond the block tables"),
    ("block_tables", np.zeros((2000, 1), np.int64), "1024 slots"),
    ("cache", np.zeros(3, np.int64), "four numbers"),
    ("cos", zeros(POSITIONS, 9), "head_size rotated"),
    ("cos", zeros(POSITIONS, 0), "head_size rotated"),
    ("cos", zeros(8), "another shape than cos"),
    ("cos", zeros(POSITIONS - 1, 8), "another shape than cos"),
    ("sin", zeros(POSITIONS, 7), "another shape than cos"),
    ("q_norm", zeros(15), "head_size numbers"),
    ("k_norm", zeros(1, 16), "head_size numbers"),
    ("v_norm", zeros(17), "head_size numbers"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_inputs_are_refused(name: str, value: np.ndarray, message: str) -> None:
    attention, feeds = good()
    with pytest.raises(Exception, match=message):
        attention.run(feeds | {name: value})


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (0, 0, "address"),
        (0, 4097, "address"),
        (1, -1, "number of blocks is impossible"),
        (1, MOST, "number of blocks is impossible"),
        (1, 1, "not in the cache"),
        (2, 64, "another size than the model's"),
        (3, 0, "another size than the model's"),
        (3, 3, "type is 0, 1 or 2"),
        (3, -1, "type is 0, 1 or 2"),
    ],
)
def test_an_impossible_cache_is_refused(number: int, value: int, message: str) -> None:
    attention, feeds = good()
    descriptor = CACHE.descriptor
    descriptor[number] = value
    with pytest.raises(Exception, match=message):
        attention.run(feeds | {"cache": descriptor})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"layer": 3}, "layer is not one of the cache's"),
        ({"layer": -1}, "layer is not one of the cache's"),
        ({"num_heads": 5}, "not a multiple of kv_num_heads"),
        ({"num_heads": 0}, "1 to 1024 heads"),
        ({"num_heads": 1 << 40}, "1 to 1024 heads"),
        ({"kv_num_heads": [1, 2]}, "as many numbers"),
        ({"kv_num_heads": [1] * 1025, "head_size": [8] * 1025}, "at most 1024"),
        ({"kv_num_heads": [1, 0, 1]}, "1 to 1024 heads"),
        ({"kv_num_heads": [1, 2, -2]}, "1 to 1024 heads"),
        ({"kv_num_heads": [1 << 40, 2, 1]}, "1 to 1024 heads"),
        ({"kv_num_heads": [1, 8, 1]}, "not a multiple of kv_num_heads"),
        ({"head_size": [8, 12, 8]}, "multiple of 8"),
        ({"head_size": [0, 16, 8]}, "multiple of 8"),
        ({"head_size": [8, 16, 520]}, "multiple of 8"),
        ({"rotary_interleaved": 2}, "0 or 1"),
        ({"rotary_within": -1}, "rotary_within"),
        ({"rotary_factor": float("inf")}, "rotary_factor"),
        ({"window": -1}, "window"),
        ({"window": 1 << 40}, "window"),
        ({"scale": float("nan")}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("inf")}, "softcap"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_an_impossible_layer_is_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Attention(LAYER, **attributes)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("key", "key and value"),
        ("value", "key and value"),
        ("cos", "cos and sin"),
        ("sin", "cos and sin"),
    ],
)
def test_one_of_two_inputs_that_belong_together_is_refused(missing: str, message: str) -> None:
    attention = Attention(LAYER, POSITIONS, without=missing)
    _, feeds = good()
    with pytest.raises(Exception, match=message):
        attention.run({name: feed for name, feed in feeds.items() if name != missing})


def test_bytes_of_a_block() -> None:
    assert kernels.block_bytes([(4, 64)] * 22, "fp32") == 22 * 4 * 2 * 64 * 64 * 4
    assert kernels.block_bytes([(4, 64)] * 22, "fp16") == 22 * 4 * 2 * 64 * 64 * 2
    of_40 = 2 * (64 * 40 + 64 * 48 + 2 * 64 * 4)
    assert kernels.block_bytes([(2, 40)], "int8") == of_40
    assert kernels.block_bytes([(2, 40), (1, 512)], "int8") == of_40 + 2 * 64 * (512 + 4)
    with pytest.raises(ValueError, match="fp64"):
        kernels.block_bytes([(1, 64)], "fp64")
