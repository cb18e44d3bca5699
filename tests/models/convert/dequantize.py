"""The inverse of quantization, as MatMulNBits computes it."""

import numpy as np

from specops.models.convert.quantize import Codes, Float, QuantizedWeight


def dequantize_blockwise(quantized: QuantizedWeight, bits: int, columns: int) -> Float:
    """The weight [N, columns] that MatMulNBits computes with; `columns` is the unpadded K."""
    codes = unpacked(quantized.packed, bits).astype(np.float32)
    zero_points: Float = np.full_like(quantized.scales, 2 ** (bits - 1))
    stored = quantized.zero_points
    if stored is not None:
        points = unpacked(stored, bits).astype(np.float32)
        zero_points = points[:, : zero_points.shape[1]]  # without the padding of an odd number
    values = (codes - zero_points[..., None]) * quantized.scales[..., None]
    return values.reshape(len(codes), -1)[:, :columns]


def unpacked(packed: Codes, bits: int) -> Codes:
    """[..., bytes] as [..., codes], a byte each; of two 4-bit codes the low half comes first."""
    if bits == 8:
        return packed
    return np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
