"""Blockwise weight quantization in numpy, laid out as onnxruntime's MatMulNBits reads it.

A weight [N, K] is cut along K into blocks that share one scale and one zero point; a weight is
stored as `round(w / scale) + zero_point`. The zero point is `2**(bits - 1)`, which MatMulNBits and
GatherBlockQuantized assume when none is given; 4-bit blocks have one of their own.

What is rounded to 4 bits by what it is multiplied with: `specops.models.convert.calibration`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Codes = NDArray[np.uint8]

# Steps that the range from a 4-bit block's smallest to its largest weight is tried to take.
# 15 stores both exactly; shorter and longer ranges trade them for the others.
_SPANS = (13.0, 13.75, 14.5, 15.25, 16.0, 16.75, 17.5, 18.25, 19.0)
_LAST = np.float32(15)  # of the 4-bit codes
_SMALLEST_EXTREME = 1e-30  # below it 1 / scale overflows: such a block is stored as zeros
# Scales that float16 has with an error of at most 1/32: kernels read half as many bytes of them. A
# matrix with a smaller or a larger one keeps them all in float32.
_LEAST_HALF, _MOST_HALF = np.float32(2**-20), np.float32(65504)


class QuantizedWeight(NamedTuple):
    """packed [N, K/block, block*bits/8] uint8, scales [N, K/block] float32, zero points.

    K is rounded up to whole blocks. `zero_points` [N, K/block/2] uint8, rounded up, hold two
    blocks to a byte; or are fractions, [N, K/block] float32; None where all are the middle of the
    range.
    """

    packed: Codes
    scales: Float
    zero_points: Codes | Float | None


def quantize_blockwise(weight: Float, bits: int, block: int) -> QuantizedWeight:
    """Quantizes `weight` [N, K] to 4 or 8 bits by its own values alone.

    8 bits: the scale is the block's largest magnitude over 127. 4 bits: see `block_grids`. Scales
    are such as float16 has. Raises ValueError on NaN or infinite weights.
    """
    check_finite(weight)
    blocks = in_blocks(weight, block)
    if bits == 4:
        scales, zero_points = block_grids(blocks)
        return packed_blocks(_rounded(blocks, scales, zero_points), scales, zero_points)
    extremes = np.abs(blocks).max(-1)
    empty = extremes < _SMALLEST_EXTREME
    scales = nearest_halves(np.where(empty, 0, extremes / np.float32(127)))
    codes = np.rint(blocks * inverses(scales)[..., None])
    codes = np.clip(codes, -127, 127, out=codes) + np.float32(128)
    return QuantizedWeight(codes.astype(np.uint8), scales, None)


def check_finite(weights: NDArray[Any]) -> None:
    """ValueError where a number is NaN or infinite."""
    if not np.isfinite(weights).all():
        raise ValueError("weights contain NaN or infinity")


def inverses(scales: Float) -> Float:
    """1 over each scale; 0 over those of empty blocks."""
    found: Float = np.divide(1, scales, where=scales != 0, out=np.zeros_like(scales))
    return found


def nearest_halves(scales: Float) -> Float:
    """The nearest numbers that float16 has; others stay where that is another number."""
    magnitudes = np.abs(scales)
    fit = (magnitudes >= _LEAST_HALF) & (magnitudes <= _MOST_HALF)
    found: Float = np.where(fit, scales, 0).astype(np.float16).astype(np.float32)
    return np.where(fit, found, scales)


def in_blocks(weight: Float, block: int) -> Float:
    """[N, K] as [N, ceil(K/block), block], the last block filled up with zeros."""
    rows, columns = weight.shape
    padding = -columns % block
    if padding:
        weight = np.pad(weight, ((0, 0), (0, padding)))
    return np.ascontiguousarray(weight, dtype=np.float32).reshape(rows, -1, block)


def block_grids(blocks: Float, importance: Float | None = None) -> tuple[Float, Float]:
    """For every block the scale and the 4-bit zero point, of those tried, with the least error.

    The range from the smallest to the largest weight is laid over the codes' range, middle on
    middle, and stretched by several factors. For fixed codes q, counted from the zero point, the
    best scale is x.q / q.q and removes (x.q)^2 / q.q of the block's energy, so the greatest of
    these quotients wins (as in llama.cpp's `make_qx_quants`).

    Args:
        blocks: [..., block], finite.
        importance: [block] what a weight's squared error counts; 1 where it is not given.

    Returns:
        Scales and zero points, [...] each; a block of zeros has the scale 0.
    """
    magnitudes = np.abs(blocks).max(-1)
    empty = magnitudes < _SMALLEST_EXTREME
    magnitudes[empty] = 1
    relative = blocks / magnitudes[..., None]  # within [-1, 1], so that no square overflows
    counted = relative if importance is None else relative * importance
    # 0 belongs to the range: its code, the zero point, must be one of the 16.
    low = np.minimum(relative.min(-1), 0)
    high = np.maximum(relative.max(-1), 0)
    middle = (low + high) / 2
    span = np.maximum(high - low, 1)  # below it only where a block is empty
    best_gain = np.full(magnitudes.shape, -1, np.float32)
    best_scale, best_zero_point = np.zeros_like(best_gain), np.zeros_like(best_gain)
    codes, squares = np.empty_like(blocks), np.empty_like(blocks)
    for steps in _SPANS:
        per_step = np.float32(steps) / span
        zero_points = np.rint(_LAST / 2 - middle * per_step)
        np.clip(zero_points, 0, _LAST, out=zero_points)
        np.multiply(relative, per_step[..., None], out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -zero_points[..., None], (_LAST - zero_points)[..., None], out=codes)
        np.multiply(codes, codes if importance is None else codes * importance, out=squares)
        projection = np.einsum("...b,...b->...", counted, codes)
        energy = squares.sum(-1)
        gain = np.divide(projection * projection, energy, where=energy > 0, out=energy * 0)
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        scale = np.divide(projection, energy, where=energy > 0, out=energy * 0)
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_zero_point, zero_points, where=better)
    return nearest_halves(np.where(empty, 0, best_scale * magnitudes)), best_zero_point


def packed_blocks(codes: Codes, scales: Float, zero_points: Float) -> QuantizedWeight:
    """4-bit codes [N, blocks, block] as stored, with [N, blocks] scales and zero points."""
    points = zero_points.astype(np.uint8)
    points = np.pad(points, ((0, 0), (0, points.shape[1] % 2)))  # an odd last one beside a zero
    return QuantizedWeight(packed_codes(codes, 4), scales, packed_codes(points, 4))


def packed_codes(codes: Codes, bits: int) -> Codes:
    """Codes [..., n], a byte each, as they are stored: [..., n * bits / 8].

    Two 4-bit codes to a byte, the earlier one in the low half.
    """
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _rounded(blocks: Float, scales: Float, zero_points: Float) -> Codes:
    codes: Float = np.rint(blocks * inverses(scales)[..., None])
    codes += zero_points[..., None]
    return np.clip(codes, 0, _LAST, out=codes).astype(np.uint8)
