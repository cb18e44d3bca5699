"""Blockwise weight quantization in numpy, laid out as onnxruntime's MatMulNBits reads it.

A matrix [N, K] is cut along K into blocks that share one scale and one zero point. A weight is
stored as `round(w / scale) + zero_point`. The zero point of 8-bit blocks is 128, the default of
MatMulNBits and GatherBlockQuantized; each 4-bit block has its own.

`specops.models.convert.calibration` rounds to 4 bits by the inputs of the products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Codes = NDArray[np.uint8]

# Candidates for the number of steps from a 4-bit block's smallest to its largest weight.
# 15 stores both exactly; fewer and more steps trade their error for that of the others.
_SPANS = (13.0, 13.75, 14.5, 15.25, 16.0, 16.75, 17.5, 18.25, 19.0)
_LAST = np.float32(15)  # of the 4-bit codes
_SMALLEST_EXTREME = 1e-30  # below it 1 / scale overflows: such a block is stored as zeros
# float16 holds scales in this range with an error of at most 1/32: kernels then read half as many
# bytes of them. A matrix with a smaller or a larger scale keeps all its scales in float32.
_LEAST_HALF, _MOST_HALF = np.float32(2**-20), np.float32(65504)


class QuantizedWeight(NamedTuple):
    """packed [N, K/block, block*bits/8] uint8, scales [N, K/block] float32, zero points.

    K is rounded up to whole blocks. `zero_points` is [N, K/block/2] uint8, rounded up, with two
    blocks in each byte; or fractions, [N, K/block] float32; or None if all are the middle of the
    range.
    """

    packed: Codes
    scales: Float
    zero_points: Codes | Float | None


def quantize_blockwise(weight: Float, bits: int, block: int) -> QuantizedWeight:
    """Quantizes `weight` [N, K] to 4 or 8 bits from its own values.

    8 bits: the scale is the block's largest magnitude over 127. 4 bits: see `block_grids`. Scales
    are numbers that float16 holds. Raises ValueError on NaN or infinite weights.
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
    """Raises ValueError if a number is NaN or infinite."""
    if not np.isfinite(weights).all():
        raise ValueError("weights contain NaN or infinity")


def inverses(scales: Float) -> Float:
    """1 / scale, or 0 for empty blocks."""
    found: Float = np.divide(1, scales, where=scales != 0, out=np.zeros_like(scales))
    return found


def nearest_halves(scales: Float) -> Float:
    """The nearest float16 numbers; scales outside of float16's range stay as they are."""
    magnitudes = np.abs(scales)
    fit = (magnitudes >= _LEAST_HALF) & (magnitudes <= _MOST_HALF)
    found: Float = np.where(fit, scales, 0).astype(np.float16).astype(np.float32)
    return np.where(fit, found, scales)


def in_blocks(weight: Float, block: int) -> Float:
    """[N, K] as [N, ceil(K/block), block]; zeros fill the last block."""
    rows, columns = weight.shape
    padding = -columns % block
    if padding:
        weight = np.pad(weight, ((0, 0), (0, padding)))
    return np.ascontiguousarray(weight, dtype=np.float32).reshape(rows, -1, block)


def block_grids(blocks: Float, importance: Float | None = None) -> tuple[Float, Float]:
    """Finds the scale and the 4-bit zero point with the least error for every block.

    The candidates lay the range from the smallest to the largest weight over the range of codes,
    middle on middle, stretched by several factors. For fixed codes q, counted from the zero point,
    the best scale is x.q / q.q and removes (x.q)^2 / q.q of the block's energy, so the candidate
    with the greatest quotient wins (as in llama.cpp's `make_qx_quants`).

    Args:
        blocks: [..., block], finite.
        importance: [block], factors of the squared errors; 1 by default.

    Returns:
        Scales and zero points, [...] each; a block of zeros has the scale 0.
    """
    magnitudes = np.abs(blocks).max(-1)
    empty = magnitudes < _SMALLEST_EXTREME
    magnitudes[empty] = 1
    relative = blocks / magnitudes[..., None]  # within [-1, 1], so that no square overflows
    counted = relative if importance is None else relative * importance
    # The range includes 0, because its code, the zero point, must be one of the 16.
    low = np.minimum(relative.min(-1), 0)
    high = np.maximum(relative.max(-1), 0)
    middle = (low + high) / 2
    span = np.maximum(high - low, 1)  # only empty blocks have less
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
    """Packs 4-bit codes [N, blocks, block] with [N, blocks] scales and zero points."""
    points = zero_points.astype(np.uint8)
    points = np.pad(points, ((0, 0), (0, points.shape[1] % 2)))  # a zero beside an odd last one
    return QuantizedWeight(packed_codes(codes, 4), scales, packed_codes(points, 4))


def packed_codes(codes: Codes, bits: int) -> Codes:
    """Packs codes [..., n], one byte each, into [..., n * bits / 8].

    A byte holds two 4-bit codes, the earlier one in the low half.
    """
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _rounded(blocks: Float, scales: Float, zero_points: Float) -> Codes:
    codes: Float = np.rint(blocks * inverses(scales)[..., None])
    codes += zero_points[..., None]
    return np.clip(codes, 0, _LAST, out=codes).astype(np.uint8)
