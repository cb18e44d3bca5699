"""Puts weights into the order in which the kernels read them; `matmul.h` describes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specops.runtime.kernels import library

TILE, _LINE = 16, 64

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class HalfScales(NamedTuple):
    """Scales in float16 [N, blocks]; if zero points are fractions, likewise offsets."""

    scales: Halves
    offsets: Halves | None


def as_halves(scales: Floats, zero_points: Bytes | Floats | None) -> HalfScales | None:
    """Scales and fractions in float16; None unless float16 holds each of them exactly.

    Args:
        scales: [N, blocks].
        zero_points: as `pack` takes them; this function ignores zero points that are codes.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        halves = scales.astype(np.float16)
        if not _same(halves.astype(np.float32), scales) or not np.isfinite(halves).all():
            return None
        if zero_points is None or zero_points.dtype != np.float32:
            return HalfScales(halves, None)
        # If a float16 offset gives this fraction at all, it is the one that the product rounds to.
        offsets = (-zero_points * scales).astype(np.float16)
    if not np.isfinite(offsets).all() or not _same(zero_points_of(halves, offsets), zero_points):
        return None
    return HalfScales(halves, offsets)


def zero_points_of(scales: Halves, offsets: Halves) -> Floats:
    """The fractions that the kernels compute from scales and offsets."""
    flat = scales == 0
    divisors = np.where(flat, np.float32(1), scales.astype(np.float32))
    points: Floats = np.where(flat, np.float32(0), -offsets.astype(np.float32) / divisors)
    return points


def _same(one: Floats, other: NDArray[Any]) -> bool:
    """Whether two arrays have the same bits."""
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


def pack(
    codes: Bytes,
    scales: Floats | Halves,
    zero_points: Bytes | Floats | Halves | None,
    *,
    bits: int,
    block: int,
) -> Bytes:
    """Put the weights of a MatMulNBits into tiles.

    Args:
        codes: [N, blocks, block * bits / 8].
        scales: [N, blocks], float32, or float16 from `as_halves`.
        zero_points: None if all are the middle of the range. Else codes, two 4-bit ones a byte
            [N, blocks / 2 rounded up] or one of 8 bits a byte [N, blocks]; or fractions, float32
            [N, blocks], in whose place float16 scales have float16 offsets.
        bits: of a code, 4 or 8.
        block: number of weights with one scale.

    Returns:
        [bytes].

    Raises:
        ValueError: the shapes do not fit each other.
    """
    columns, blocks = scales.shape
    if codes.shape != (columns, blocks, block * bits // 8):
        raise ValueError(f"codes are {codes.shape} for scales {scales.shape}, blocks of {block}")
    tiles = -(-columns // TILE)
    size = block * bits // 8 * TILE  # of a block's codes in a tile
    lines, behind, blocks_of_line = _lines_of(scales, tiles), None, 1
    if zero_points is not None and zero_points.dtype == scales.dtype:
        lines = np.concatenate([lines, _lines_of(zero_points, tiles)], axis=2)
    else:
        if zero_points is not None:
            behind = _points_of(zero_points.astype(np.uint8, copy=False), bits, tiles, blocks)
        if scales.dtype == np.float16:  # two blocks share a line
            blocks_of_line = 2
            lines = np.pad(lines, ((0, 0), (0, blocks % 2), (0, 0))).reshape(tiles, -1, _LINE)
    width = lines.shape[2]
    in_blocks = blocks * size + lines.shape[1] * width
    packed = np.zeros((tiles, in_blocks + (0 if behind is None else behind.shape[1])), np.uint8)
    step = blocks_of_line * size + width
    for number in range(lines.shape[1]):
        place = number * step + size
        packed[:, place : place + width] = lines[:, number]
    if behind is not None:
        packed[:, in_blocks:] = behind
    numbers = np.arange(blocks)
    places = numbers // blocks_of_line * step + numbers % blocks_of_line * (size + width)
    codes = np.ascontiguousarray(codes)
    library.specops_fill_tiles(
        *(codes.ctypes.data, *codes.shape, bits, places.ctypes.data),
        *(packed.ctypes.data, packed.shape[1]),
    )
    return packed.reshape(-1)


def _points_of(zero_points: Bytes, bits: int, tiles: int, blocks: int) -> Bytes:
    """Zero points that are codes as [tiles, bytes], filled up to whole lines."""
    points = unpacked(zero_points, bits)[:, :blocks]
    filled = _filled(points, tiles).reshape(tiles, TILE, blocks)
    flat = filled.transpose(0, 2, 1).reshape(tiles, -1)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % _LINE)))


def unpacked(packed: Bytes, bits: int) -> Bytes:
    """[..., bytes] as [..., codes], a byte each; of two 4-bit codes the low half comes first."""
    if bits == 8:
        return packed
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(
        *packed.shape[:-1], -1
    )


def _lines_of(values: NDArray[Any], tiles: int) -> Bytes:
    """[N, blocks] as [tiles, blocks, bytes]: the bytes of a tile's 16 numbers for each block."""
    blocks = values.shape[1]
    filled = _filled(values, tiles).reshape(tiles, TILE, blocks)
    return np.ascontiguousarray(filled.transpose(0, 2, 1)).view(np.uint8)


def _filled(array: NDArray[Any], tiles: int) -> NDArray[Any]:
    """[N, …] with zeros appended up to whole tiles."""
    missing = tiles * TILE - len(array)
    return np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1))) if missing else array
