"""Blockwise weight quantization in numpy, laid out as onnxruntime's MatMulNBits reads it.

A weight [N, K] is cut along K into blocks that share one scale and one zero point; a weight is
stored as `round(w / scale) + zero_point`. The zero point is `2**(bits - 1)`, which MatMulNBits and
GatherBlockQuantized assume when none is given, unless the method looks for a better one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]

# Ranges tried for a 4-bit block, in steps: of the largest weight, and of the smallest to the
# largest. 8 and 15 are the plain conventions, which store the extreme weights exactly; shorter
# and longer ranges trade them for the others.
_INT4_RANGES = (6.8, 7.1, 7.4, 7.7, 8.0, 8.3, 8.6, 8.9, 9.2)
_INT4_SPANS = (13.0, 13.75, 14.5, 15.25, 16.0, 16.75, 17.5, 18.25, 19.0)
_SMALLEST_EXTREME = 1e-30  # below it 1 / scale overflows: such a block is stored as zeros


class Method(StrEnum):
    """How the scale of a 4-bit block is found; its values are how a quantization's name ends.

    8 bits are always rounded to nearest: their error is far below what text can show.
    """

    ROUND = "rtn"  # the largest weight is stored exactly, the others rounded to nearest
    SEARCH = "search"  # of several scales the one with the least squared error
    ZERO_POINT = "zp"  # likewise, and every block has a zero point of its own


class QuantizedWeight(NamedTuple):
    """packed [N, K/block, block*bits/8] uint8, scales [N, K/block] float32, zero points.

    K is rounded up to whole blocks. `zero_points` [N, K/block/2] uint8, rounded up, hold two
    blocks to a byte; or are fractions, [N, K/block] float32; None where all are the middle of the
    range.
    """

    packed: NDArray[np.uint8]
    scales: Float
    zero_points: NDArray[np.uint8] | Float | None


def quantize_blockwise(
    weight: Float, bits: int, block: int, method: Method = Method.SEARCH
) -> QuantizedWeight:
    """Quantizes `weight` [N, K] to 4 or 8 bits.

    8 bits: the scale is the block's largest magnitude over 127. 4 bits: see `Method`; scales that
    are searched for are refitted to the rounded values by least squares (as in llama.cpp's
    `make_qx_quants`). Raises ValueError on NaN or infinite weights.
    """
    blocks = _in_blocks(weight, block)
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), axis=-1)
    if not np.isfinite(extremes).all():
        raise ValueError("weights contain NaN or infinity")
    empty = np.abs(extremes) < _SMALLEST_EXTREME
    extremes[empty] = 1
    levels = np.float32(2 ** (bits - 1))
    zero_points: Float = np.full_like(extremes, levels)
    if bits == 8:
        scales: Float = np.divide(np.abs(extremes), levels - 1, dtype=np.float32)
    elif method is Method.ROUND:
        scales = extremes / -levels
    elif method is Method.SEARCH:
        scales = _least_squares_scales(blocks, extremes, levels)
    else:
        scales, zero_points = _least_squares_grids(blocks, np.abs(extremes), levels)
    scales[empty] = 1
    codes = np.rint(blocks / scales)
    codes += zero_points
    np.clip(codes, 0, 2 * levels - 1, out=codes)
    scales[empty] = 0
    stored = None
    if bits == 4 and method is Method.ZERO_POINT:
        stored = _pack_zero_points(zero_points[..., 0].astype(np.uint8))
    return QuantizedWeight(packed_codes(codes.astype(np.uint8), bits), scales[..., 0], stored)


def dequantize_blockwise(quantized: QuantizedWeight, bits: int, columns: int) -> Float:
    """The weight [N, columns] that MatMulNBits computes with; `columns` is the unpadded K."""
    codes = _unpack(quantized.packed, bits).astype(np.float32)
    zero_points: Float = np.full_like(quantized.scales, 2 ** (bits - 1))
    stored = quantized.zero_points
    if stored is not None and stored.dtype == np.float32:
        zero_points = stored.astype(np.float32, copy=False)
    elif stored is not None:
        unpacked = _unpack(stored.astype(np.uint8, copy=False), bits).astype(np.float32)
        zero_points = unpacked[:, : zero_points.shape[1]]  # without the filling of an odd number
    values = (codes - zero_points[..., None]) * quantized.scales[..., None]
    return values.reshape(len(codes), -1)[:, :columns]


def _in_blocks(weight: Float, block: int) -> Float:
    """[N, K] as [N, ceil(K/block), block], the last block filled up with zeros."""
    rows, columns = weight.shape
    padding = -columns % block
    if padding:
        weight = np.pad(weight, ((0, 0), (0, padding)))
    return np.ascontiguousarray(weight, dtype=np.float32).reshape(rows, -1, block)


def _least_squares_scales(blocks: Float, extremes: Float, levels: np.float32) -> Float:
    """For every block the scale, of those tried, that leaves the least squared error.

    For fixed codes q the best scale is x.q / q.q and removes (x.q)^2 / q.q of the block's
    energy, so the greatest of these quotients wins. The extreme weight goes to the negative end,
    which has one level more than the positive one.
    """
    relative = blocks / extremes  # within [-1, 1], so that no square overflows
    best_gain = np.full(extremes.shape[:-1], -1, np.float32)
    best_scale = np.zeros_like(best_gain)
    codes = np.empty_like(blocks)
    for steps in _INT4_RANGES:
        np.multiply(relative, np.float32(-steps), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -levels, levels - 1, out=codes)
        projection = np.einsum("nkb,nkb->nk", relative, codes)
        energy = np.einsum("nkb,nkb->nk", codes, codes)
        np.maximum(energy, 1, out=energy)  # 0 only where all codes, and the projection, are 0
        gain = projection * projection / energy
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, projection / energy, where=better)
    return best_scale[..., None] * extremes


def _least_squares_grids(
    blocks: Float, magnitudes: Float, levels: np.float32
) -> tuple[Float, Float]:
    """For every block the scale and the zero point, of those tried, with least squared error.

    The range from the smallest to the largest weight is laid over the codes' range, middle on
    middle, and stretched by several factors; the rest is as in `_least_squares_scales`.
    """
    relative = blocks / magnitudes  # within [-1, 1], so that no square overflows
    # 0 belongs to the range: its code, the zero point, must be one of the 16.
    low = np.minimum(relative.min(-1, keepdims=True), 0)
    high = np.maximum(relative.max(-1, keepdims=True), 0)
    middle = (low + high) / 2
    span = np.maximum(high - low, 1)  # below it only where a block is empty
    best_gain = np.full(magnitudes.shape, -1, np.float32)
    best_scale = np.ones_like(best_gain)
    best_zero_point = np.full_like(best_gain, levels)
    codes = np.empty_like(blocks)
    for steps in _INT4_SPANS:
        per_step = np.float32(steps) / span
        zero_points = np.rint((levels - np.float32(0.5)) - middle * per_step)
        np.clip(zero_points, 0, 2 * levels - 1, out=zero_points)
        np.multiply(relative, per_step, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -zero_points, 2 * levels - 1 - zero_points, out=codes)
        projection = np.einsum("nkb,nkb->nk", relative, codes)[..., None]
        energy = np.einsum("nkb,nkb->nk", codes, codes)[..., None]
        np.maximum(energy, 1, out=energy)  # 0 only where all codes, and the projection, are 0
        gain = projection * projection / energy
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, projection / energy, where=better)
        np.copyto(best_zero_point, zero_points, where=better)
    return best_scale * magnitudes, best_zero_point


def _pack_zero_points(zero_points: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, blocks] as 4-bit codes, two to a byte; an odd last one beside a zero."""
    return packed_codes(np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2))), 4)


def packed_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [..., n], a byte each, as they are stored: [..., n * bits / 8].

    Two 4-bit codes to a byte, the earlier one in the low half.
    """
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    return np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
