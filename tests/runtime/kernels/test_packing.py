"""Weights packed into tiles, and rows looked up in them, are the file's own numbers to the bit."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest

from specops.runtime import kernels
from specops.runtime.kernels.packing import (
    WeightType,
    pack,
    pack_rows,
    row_bytes,
    tile_bytes,
    weight_type,
)
from tests.runtime.kernels.operators import operator

f = np.float32
FILES = [type for type in WeightType if type in set(gguf.GGMLQuantizationType)]
OWN = [type for type in WeightType if type not in FILES]
SUPER_BLOCK = 256
HALVES = {  # where the float16 of a block lie
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()},
}


def random_rows(type: WeightType, rows: int, depth: int) -> np.ndarray:
    """Any bytes, with finite scales: rows as a file has them."""
    random = np.random.default_rng(type)
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)]
    raw = random.integers(0, 256, (rows, depth // weights, size), np.uint8)
    for place in HALVES[type.name]:
        raw[..., place + 1] &= 0xBF  # exponents of float16 up to 15: denormal numbers, too
    if type == WeightType.MXFP4:
        raw[..., 0] = random.integers(0, 253, raw.shape[:2])
    return raw.reshape(rows, -1)


def gather(type: WeightType, table: np.ndarray, **attributes: Any) -> Callable[..., Any]:
    return operator(
        kernels.GATHER,
        ("ids", "table"),
        ("rows",),
        {"table": table},
        type=int(type),
        **{"block_size": 32} | attributes,
    )


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    assert found.shape == expected.shape
    return bool(np.array_equal(found.view(np.uint32), expected.view(np.uint32)))


@pytest.mark.parametrize("type", FILES, ids=lambda type: type.name)
@pytest.mark.parametrize("columns", [35, 16])
def test_rows_of_a_file_are_ggufs_numbers_raw_and_tiled(type: WeightType, columns: int) -> None:
    whole = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)][0] == SUPER_BLOCK
    depth = 3 * SUPER_BLOCK if whole else SUPER_BLOCK + 96  # a last group of 3 blocks
    raw = random_rows(type, columns, depth)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type))
    ids = np.arange(columns).reshape(1, -1)[:, ::-1].copy()
    sizes = {"N": columns, "K": depth}
    (rows,) = gather(type, raw, tiled=0, **sizes)(ids=ids)
    (tiled,) = gather(type, pack_rows(raw, type, depth), tiled=1, **sizes)(ids=ids)
    assert same(rows, expected[None, ::-1])
    assert same(tiled, expected[None, ::-1])


@pytest.mark.parametrize("type", FILES, ids=lambda type: type.name)
def test_tiles_are_hardly_larger_than_the_file(type: WeightType) -> None:
    most = 1.06 if type.name in ("Q2_K", "Q3_K") else 1.03
    for depth in (SUPER_BLOCK, 2048, 5632):
        assert tile_bytes(type, 64, depth) <= most * 64 * row_bytes(type, depth)


@pytest.mark.parametrize("type", OWN, ids=lambda type: type.name)
@pytest.mark.parametrize(("block", "blocks"), [(32, 11), (128, 9), (256, 1)])
def test_weights_of_matmulnbits_are_its_numbers(type: WeightType, block: int, blocks: int) -> None:
    random, columns, bits = np.random.default_rng(block), 21, 4 if "4" in type.name else 8
    codes = random.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8)
    scales = random.normal(0, 0.01, (columns, blocks)).astype(f)
    if not type.name.endswith("FLOAT"):
        scales = scales.astype(np.float16).astype(f)
    points = random.integers(0, 256, (columns, -(-blocks * bits // 8)), np.uint8)
    zero_points = points if "ZERO" in type.name else None
    found, tiles = pack(codes, scales, zero_points, bits=bits, block=block)
    assert found == type
    assert len(tiles) == tile_bytes(type, columns, blocks * block, block)
    zeros = np.full((columns, blocks), 1 << (bits - 1), np.int32)
    if zero_points is not None:
        zeros = bytes_of(points, bits)[:, :blocks].astype(np.int32)
    shifted = bytes_of(codes, bits).astype(np.int32) - zeros[..., None]
    depth = blocks * block - 7  # the last block is not whole
    expected = (shifted.astype(f) * scales[..., None]).reshape(columns, -1)[:, :depth]
    attributes = {"N": columns, "K": depth, "block_size": block, "tiled": 1}
    (rows,) = gather(type, tiles, **attributes)(ids=np.arange(columns))
    assert same(rows, expected)


def bytes_of(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize(
    ("scale", "type"),
    [
        (0.0, WeightType.INT4),
        (-0.5, WeightType.INT4),
        (2.0**-24, WeightType.INT4),
        (65504.0, WeightType.INT4),
        (2.0**-25, WeightType.INT4_FLOAT),
        (65536.0, WeightType.INT4_FLOAT),
        (0.1, WeightType.INT4_FLOAT),
        (np.inf, WeightType.INT4_FLOAT),
        (np.nan, WeightType.INT4_FLOAT),
    ],
)
def test_scales_are_float16_only_if_it_holds_them_all(scale: float, type: WeightType) -> None:
    scales = np.ones((16, 2), f)
    scales[7, 1] = scale
    assert weight_type(scales, None, 4) == type


@pytest.mark.parametrize("type", FILES, ids=lambda type: type.name)
def test_packing_refuses_scales_that_are_not_finite(type: WeightType) -> None:
    depth, places = SUPER_BLOCK, HALVES[type.name] or (-1,)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)][1]
    for place in places:
        for row, high in ((0, 0x7C), (18, 0xFE)):
            raw = random_rows(type, 19, depth)
            raw[row, -size + place + 1] = high if type != WeightType.MXFP4 else 253
            with pytest.raises(ValueError, match="NaN or infinity"):
                pack_rows(raw, type, depth)


@pytest.mark.parametrize("shape", [(16, 2, 64), (16, 3, 32), (48, 2, 32), (16, 2, 16)])
def test_codes_that_do_not_fit_their_scales_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="codes"):
        pack(np.zeros(shape, np.uint8), np.ones((16, 2), f), None, bits=8, block=32)


def test_sizes_that_do_not_fit_a_type_are_refused() -> None:
    points = np.zeros((16, 2), np.uint8)
    with pytest.raises(ValueError, match="zero points"):
        pack(np.zeros((16, 2, 16), np.uint8), np.ones((16, 2), f), points, bits=4, block=32)
    with pytest.raises(ValueError, match="no blocks of 48"):
        tile_bytes(WeightType.INT4, 16, 96, 48)
    with pytest.raises(ValueError, match="no blocks of 64"):
        tile_bytes(WeightType.Q8_0, 16, 128, 64)
    with pytest.raises(ValueError, match="no rows of 288 weights of Q4_K"):
        row_bytes(WeightType.Q4_K, 288)
    with pytest.raises(ValueError, match="no rows of 256 weights of INT4"):
        row_bytes(WeightType.INT4, 256)
    with pytest.raises(ValueError, match="rows are"):
        pack_rows(np.zeros((16, 143), np.uint8), WeightType.Q4_K, 256)


TABLE = random_rows(WeightType.Q4_0, 20, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"N": 0}, "1 to 16777216"),
        ({"K": -1}, "1 to 16777216"),
        ({"N": (1 << 24) + 1}, "1 to 16777216"),
        ({"K": (1 << 24) + 32}, "1 to 16777216"),
        ({"type": 1}, "no such type"),
        ({"type": (1 << 32) + 2}, "no such type"),
        ({"type": -1}, "no such type"),
        ({"block_size": 0}, "multiples of 32"),
        ({"block_size": 48}, "multiples of 32"),
        ({"block_size": 512}, "multiples of 32"),
        ({"block_size": 64}, "have blocks of 32"),
        ({"K": 48}, "do not divide K"),
        ({"type": 12}, "do not divide K"),
        ({"type": 256}, "no rows of this type"),
        ({"tiled": 2}, "tiled is 0 or 1"),
        ({"tiled": -1}, "tiled is 0 or 1"),
        ({"tiled": 1}, "another size"),
        ({"N": 21}, "another size"),
        ({"K": 96}, "another size"),
        ({"ids": [20]}, "outside of the table"),
        ({"ids": [0, -21]}, "outside of the table"),
        ({"ids": [1 << 62]}, "outside of the table"),
        ({"ids": 3}, "no dimensions"),
        ({"ids": [[[[[[[[0]]]]]]]]}, "too many dimensions"),
    ],
)
def test_an_impossible_lookup_is_refused(changed: dict[str, Any], message: str) -> None:
    given = {"N": 20, "K": 64, "tiled": 0} | changed
    ids = given.pop("ids", [0])
    with pytest.raises(Exception, match=message):
        gather(given.pop("type", WeightType.Q4_0), TABLE, **given)(ids=np.array(ids))


def test_ids_of_any_shape_count_from_either_end() -> None:
    find = gather(WeightType.Q4_0, TABLE, N=20, K=64, tiled=0)
    expected = gguf.quants.dequantize(TABLE, gguf.GGMLQuantizationType.Q4_0)
    for shape in ((0,), (1,), (2, 3), (1, 1, 60)):
        ids = np.resize(np.arange(-20, 20), shape)
        assert same(find(ids=ids)[0], expected[ids])
