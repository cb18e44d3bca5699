"""Puts weights into tiles, the order in which the kernels read them; `tiles.h` describes it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.runtime.kernels import library

TILE = 16
"""Columns of a tile."""
BLOCK = 32
"""Weights in a block of every GGUF type."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class WeightType(IntEnum):
    """Types of weights: GGUF's, with their GGUF numbers, and our own."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    MXFP4 = 39
    INT4 = 256
    INT8 = 257
    INT4_ZERO = 258
    INT8_ZERO = 259
    INT4_FLOAT = 260
    INT8_FLOAT = 261
    INT4_ZERO_FLOAT = 262
    INT8_ZERO_FLOAT = 263


def tile_bytes(type: WeightType, columns: int, depth: int, block: int = BLOCK) -> int:
    """Bytes of the tiles of a matrix [columns, depth] with blocks of `block` weights.

    Raises:
        ValueError: the type has no such blocks.
    """
    size: int = library.specops_tile_bytes(type, columns, depth, block)
    if size <= 0:
        raise ValueError(f"{type.name} has no blocks of {block}")
    return size


def row_bytes(type: WeightType, depth: int) -> int:
    """Bytes of a row of `depth` weights in a GGUF file.

    Raises:
        ValueError: GGUF files have no such type, or the row is not a whole number of blocks.
    """
    size: int = library.specops_row_bytes(type, depth)
    if size <= 0:
        raise ValueError(f"there are no rows of {depth} weights of {type.name}")
    return size


def weight_type(scales: Floats, zero_points: Bytes | None, bits: int) -> WeightType:
    """The type of the weights of a MatMulNBits: float32 scales only if float16 would round one.

    Args:
        scales: [N, blocks].
        zero_points: codes, or None if all are the middle of the range.
        bits: bits of a code, 4 or 8.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        halves = scales.astype(np.float16)
        exact = np.array_equal(halves.astype(np.float32).view(np.uint32), scales.view(np.uint32))
    name = f"INT{bits}{'' if zero_points is None else '_ZERO'}"
    return WeightType[name if exact and np.isfinite(halves).all() else f"{name}_FLOAT"]


def pack(
    codes: Bytes,
    scales: Floats,
    zero_points: Bytes | None,
    *,
    bits: int,
    block: int,
    type: WeightType | None = None,
) -> tuple[WeightType, Bytes]:
    """Put the weights of a MatMulNBits into tiles.

    Args:
        codes: [N, blocks, block * bits / 8].
        scales: [N, blocks].
        zero_points: codes, two of 4 bits a byte [N, blocks / 2 rounded up], or one of 8 bits a byte
            [N, blocks]; None if all are the middle of the range.
        bits: bits of a code, 4 or 8.
        block: number of weights per scale, a multiple of 32.
        type: type of the whole matrix, if these are some of its columns; None: see `weight_type`.

    Returns:
        The type, and the tiles [bytes].

    Raises:
        ValueError: the shapes do not match.
    """
    columns, blocks = scales.shape
    if codes.shape != (columns, blocks, block * bits // 8):
        raise ValueError(f"codes are {codes.shape} for scales {scales.shape}, blocks of {block}")
    if zero_points is not None and zero_points.shape != (columns, -(-blocks * bits // 8)):
        raise ValueError(f"zero points are {zero_points.shape} for scales {scales.shape}")
    type = weight_type(scales, zero_points, bits) if type is None else type
    tiles = np.empty(tile_bytes(type, columns, blocks * block, block), np.uint8)
    stored: NDArray[Any] = scales if type.name.endswith("FLOAT") else scales.astype(np.float16)
    given = [
        None if array is None else np.ascontiguousarray(array)
        for array in (codes, stored, zero_points)
    ]
    library.specops_pack_codes(
        type,
        *(None if array is None else array.ctypes.data for array in given),
        *(columns, blocks, block, tiles.ctypes.data),
    )
    return type, tiles


def pack_rows(raw: Bytes, type: WeightType, depth: int) -> Bytes:
    """Put rows of a matrix in a GGUF file into tiles.

    Args:
        raw: [N, bytes of a row], as stored in the file.
        type: a GGUF type.
        depth: number of weights in a row.

    Returns:
        The tiles [bytes].

    Raises:
        ValueError: the rows have another size, or a scale is NaN or infinite.
    """
    if raw.shape != (len(raw), row_bytes(type, depth)):
        raise ValueError(f"rows are {raw.shape} for {depth} weights of {type.name}")
    raw = np.ascontiguousarray(raw)
    tiles = np.empty(tile_bytes(type, len(raw), depth), np.uint8)
    arguments = (raw.ctypes.data, len(raw), depth, tiles.ctypes.data)
    if not library.specops_pack_rows(type, *arguments):
        raise ValueError("weights contain NaN or infinity")
    return tiles
