"""Blockwise weight quantization, laid out as onnxruntime's MatMulNBits reads it.

A matrix [N, K] is cut along K into blocks that share one scale and one zero point. A weight is
stored as `round(w / scale) + zero_point`. The zero point of 8-bit blocks is 128, the default of
MatMulNBits and GatherBlockQuantized; each 4-bit block has its own.

The kernels do the arithmetic (`runtime/kernels/quantize.h`).
`specops.models.convert.calibration` rounds to 4 bits by the inputs of the products.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specops.runtime.kernels import library

Float = NDArray[np.float32]
Codes = NDArray[np.uint8]

_MAX_8 = np.float32(127)  # of the 8-bit codes, counted from their zero point
_MIN_EXTREME = 1e-30  # below it 1 / scale overflows: such a block is stored as zeros
# float16 holds scales in this range with an error of at most 1/32: kernels then read half as many
# bytes of them. A matrix with a smaller or a larger scale keeps all its scales in float32.
_MIN_HALF, _MAX_HALF = np.float32(2**-20), np.float32(65504)


class QuantizedWeight(NamedTuple):
    """packed [N, K/block, block*bits/8] uint8, scales [N, K/block] float32, zero points.

    K is rounded up to whole blocks. `zero_points` is [N, K/block/2] uint8, rounded up, with two
    blocks in each byte; or None if all are the middle of the range.
    """

    packed: Codes
    scales: Float
    zero_points: Codes | None


def quantize_blockwise(weight: Float, bits: int, block: int) -> QuantizedWeight:
    """Quantizes `weight` [N, K] to 4 or 8 bits from its own values.

    8 bits: the scale is the block's largest magnitude over 127. 4 bits: see `block_grids`. Scales
    are numbers that float16 holds. Raises ValueError on NaN or infinite weights.

    Args:
        weight: [N, K], finite.
        bits: 4 or 8.
        block: weights with one scale; it divides K.
    """
    check_finite(weight)
    blocks = in_blocks(weight, block)
    if bits == 4:
        scales, zero_points = block_grids(blocks)
        codes = _codes(blocks, bits, scales, zero_points)
        return QuantizedWeight(codes, scales, packed_points(zero_points))
    extremes = np.abs(blocks).max(-1)
    scales = nearest_halves(np.where(extremes < _MIN_EXTREME, 0, extremes / _MAX_8))
    return QuantizedWeight(_codes(blocks, bits, scales, None), scales, None)


def check_finite(weights: NDArray[Any]) -> None:
    """Raises ValueError if a number is NaN or infinite."""
    if not np.isfinite(weights).all():
        raise ValueError("weights contain NaN or infinity")


def nearest_halves(scales: Float) -> Float:
    """The nearest float16 numbers; scales outside of float16's range stay as they are."""
    magnitudes = np.abs(scales)
    fit = (magnitudes >= _MIN_HALF) & (magnitudes <= _MAX_HALF)
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

    Args:
        blocks: [..., block], finite and contiguous.
        importance: [block], factors of the squared errors; 1 by default.

    Returns:
        Scales and zero points, [...] each; a block of zeros has the scale 0.
    """
    scales, zero_points = np.empty((2, *blocks.shape[:-1]), np.float32)
    weighing = None if importance is None else importance.ctypes.data
    library.specops_grids(
        *(blocks.ctypes.data, scales.size, blocks.shape[-1], weighing),
        *(scales.ctypes.data, zero_points.ctypes.data),
    )
    return nearest_halves(scales), zero_points


def packed_points(zero_points: Float) -> Codes:
    """4-bit zero points [N, blocks] as bytes, two in each; an odd last one is padded with 0."""
    points = zero_points.astype(np.uint8)
    return packed_codes(np.pad(points, ((0, 0), (0, points.shape[1] % 2))), 4)


def packed_codes(codes: Codes, bits: int) -> Codes:
    """Packs codes [..., n], one byte each, into [..., n * bits / 8].

    A byte holds two 4-bit codes, the earlier one in the low half.
    """
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _codes(blocks: Float, bits: int, scales: Float, zero_points: Float | None) -> Codes:
    """Rounds blocks [N, blocks, block] by their scales and zero points, [N, blocks] each."""
    codes = np.empty((*scales.shape, blocks.shape[-1] * bits // 8), np.uint8)
    points = None if zero_points is None else zero_points.ctypes.data
    library.specops_codes(
        *(blocks.ctypes.data, scales.size, blocks.shape[-1], bits),
        *(scales.ctypes.data, points, codes.ctypes.data),
    )
    return codes
