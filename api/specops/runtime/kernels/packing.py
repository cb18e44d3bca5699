"""Weights in the order in which the kernels read them; `matmul.h` describes it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE, _LINE = 16, 64
_WORD = 4  # codes of a column that are multiplied at once

Bytes = NDArray[np.uint8]


def pack(
    codes: Bytes,
    scales: NDArray[np.float32],
    zero_points: Bytes | NDArray[np.float32] | None,
    *,
    bits: int,
    block: int,
) -> Bytes:
    """Put weights as MatMulNBits has them into tiles.

    Args:
        codes: [N, blocks, block * bits / 8].
        scales: [N, blocks].
        zero_points: as bytes of two 4-bit ones, [N, blocks / 2 rounded up], or of one of 8,
            [N, blocks]; as fractions, float32 [N, blocks]; None if all are the middle of the range.
        bits: of a code, 4 or 8.
        block: weights with one scale.

    Returns:
        [bytes].
    """
    columns, blocks = scales.shape
    tiles = -(-columns // TILE)
    values = _filled(unpacked(codes, bits), tiles)  # [N, blocks, block]
    words = values.reshape(tiles, TILE, blocks, block // _WORD, _WORD)
    words = words.transpose(0, 2, 3, 1, 4)  # [tiles, blocks, words, columns, 4]
    if bits == 4:
        words = words[:, :, 0::2] | (words[:, :, 1::2] << np.uint8(4))
    lines = words.reshape(tiles, blocks, -1)
    in_blocks = [lines, _lines_of_floats(scales, tiles)]
    behind = []
    if zero_points is not None and zero_points.dtype == np.float32:
        in_blocks.append(_lines_of_floats(zero_points, tiles))
    elif zero_points is not None:
        points = unpacked(zero_points.astype(np.uint8, copy=False), bits)[:, :blocks]
        filled = _filled(points, tiles).reshape(tiles, TILE, blocks)
        flat = filled.transpose(0, 2, 1).reshape(tiles, -1)
        behind.append(np.pad(flat, ((0, 0), (0, -flat.shape[1] % _LINE))))
    parts = [np.concatenate(in_blocks, axis=2).reshape(tiles, -1), *behind]
    return np.concatenate(parts, axis=1).reshape(-1)


def unpacked(packed: Bytes, bits: int) -> Bytes:
    """[..., bytes] as [..., codes], a byte each; of two 4-bit ones the low half comes first."""
    if bits == 8:
        return packed
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(
        *packed.shape[:-1], -1
    )


def _lines_of_floats(values: NDArray[Any], tiles: int) -> Bytes:
    """[N, blocks] as the bytes of 16 float32 for each tile and block: [tiles, blocks, 64]."""
    blocks = values.shape[1]
    filled = _filled(values.astype(np.float32, copy=False), tiles).reshape(tiles, TILE, blocks)
    return np.ascontiguousarray(filled.transpose(0, 2, 1)).view(np.uint8)


def _filled(array: NDArray[Any], tiles: int) -> NDArray[Any]:
    """[N, …] with zeros behind, up to whole tiles."""
    missing = tiles * TILE - len(array)
    return np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1))) if missing else array
