"""Blockwise weight quantization in numpy, laid out as onnxruntime's MatMulNBits reads it.

A weight [N, K] is cut along K into blocks that share one scale; a weight is stored as
`round(w / scale) + 2**(bits - 1)`, the zero point that MatMulNBits and GatherBlockQuantized
assume when none is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]

# Ranges tried for a 4-bit block, in steps, that its largest weight is mapped to. 8 is the plain
# convention (the extreme weight is exact); shorter and longer ranges trade it for the others.
_INT4_RANGES = (6.8, 7.1, 7.4, 7.7, 8.0, 8.3, 8.6, 8.9, 9.2)
_SMALLEST_EXTREME = 1e-30  # below it 1 / scale overflows: such a block is stored as zeros


class QuantizedWeight(NamedTuple):
    """packed [N, K/block, block*bits/8] uint8, scales [N, K/block] float32, zero points.

    K is rounded up to whole blocks. `zero_points` is None for a symmetric quantization.
    """

    packed: NDArray[np.uint8]
    scales: Float
    zero_points: NDArray[np.uint8] | None


def quantize_blockwise(weight: Float, bits: int, block: int) -> QuantizedWeight:
    """Quantizes `weight` [N, K] symmetrically, rounding to nearest.

    8 bits: the scale is the block's largest magnitude over 127. 4 bits: of several scales the
    one with the least squared error, refitted to the rounded values by least squares (the search
    of llama.cpp's `make_qx_quants`). Raises ValueError on NaN or infinite weights.
    """
    blocks = _in_blocks(weight, block)
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), axis=-1)
    if not np.isfinite(extremes).all():
        raise ValueError("weights contain NaN or infinity")
    empty = np.abs(extremes) < _SMALLEST_EXTREME
    extremes[empty] = 1
    levels = np.float32(2 ** (bits - 1))
    if bits == 8:
        scales: Float = np.divide(np.abs(extremes), levels - 1, dtype=np.float32)
    else:
        scales = _least_squares_scales(blocks, extremes, levels)
    scales[empty] = 1
    codes = np.rint(blocks / scales)
    np.clip(codes, -levels, levels - 1, out=codes)
    scales[empty] = 0
    return QuantizedWeight(_pack((codes + levels).astype(np.uint8), bits), scales[..., 0], None)


def dequantize_blockwise(quantized: QuantizedWeight, bits: int, columns: int) -> Float:
    """The weight [N, columns] that MatMulNBits computes with; `columns` is the unpadded K."""
    codes = _unpack(quantized.packed, bits).astype(np.float32)
    zero_point = np.float32(2 ** (bits - 1))
    if quantized.zero_points is not None:
        raise ValueError("asymmetric blocks are not written by this exporter")
    values = (codes - zero_point) * quantized.scales[..., None]
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


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Two 4-bit codes to a byte, the earlier one in the low half."""
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    return np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
