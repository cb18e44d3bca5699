"""The types of blocks in GGUF files, and how to read their bytes.

Products read blocks of 32 weights `scale * code + offset`, so such blocks stay as they are; other
types become numbers. Layouts follow ggml's `ggml-common.h`. Scales and offsets are float16; a
product of one with a sub-block's 6 bits is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specops.models.convert.quantize import check_finite

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 32  # weights per scale in products
_SUPER = 256  # weights in a block of a K type
_NON_LINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)
_LOW = np.uint8(15)


class Codes(NamedTuple):
    """Weights [N, K] in blocks: codes [N, blocks, block], one byte each, scales [N, blocks].

    A weight is `scale * (code - zero)`, or, with offsets [N, blocks], `scale * code + offset`.
    """

    codes: Bytes
    scales: Float
    offsets: Float | None
    zero: int


class BlockType(NamedTuple):
    """A type of blocks: `bytes` and `weights` are the size of one block.

    `codes` and `values` read whole rows from bytes [N, bytes of a row]; `codes` raises ValueError
    if a scale or an offset is NaN or infinite. A type with `bits` has codes of that many bits in
    blocks of 32, as products read them. A type without `codes` and `values` cannot be read.
    """

    name: str
    bytes: int
    weights: int
    bits: int = 0
    has_offsets: bool = False
    codes: Callable[[Bytes], Codes] | None = None
    values: Callable[[Bytes], Float] | None = None

    @property
    def readable(self) -> bool:
        """Whether the weights can be read."""
        return self.codes is not None or self.values is not None


# -- blocks of 32 ----------------------------------------------------------------------------------


def _blocks(raw: Bytes, size: int) -> Bytes:
    """The bytes of rows as [N, blocks, size]."""
    return raw.reshape(len(raw), -1, size)


def _half(blocks: Bytes, at: int) -> Float:
    """The float16 at byte `at` of each block: [N, blocks]; ValueError if one is not finite."""
    found = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
    check_finite(found)
    return found.astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] as [..., 2n]: all low halves, then all high halves."""
    return np.concatenate([packed & _LOW, packed >> np.uint8(4)], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """The 32 bits of 4 bytes, lowest first, as the fifth bits of codes: [..., 32] of 0 and 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 18)
    return Codes(_nibbles(blocks[..., 2:]), _half(blocks, 0), None, 8)


def _q4_1(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 20)
    return Codes(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 0)


def _q5_0(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 22)
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Codes(codes, _half(blocks, 0), None, 16)


def _q5_1(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 24)
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Codes(codes, _half(blocks, 0), _half(blocks, 2), 0)


def _q8_0(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 34)
    return Codes(blocks[..., 2:] ^ np.uint8(128), _half(blocks, 0), None, 128)


def _non_linear(packed: Bytes) -> Bytes:
    return (_NON_LINEAR + 128).astype(np.uint8)[_nibbles(packed)]


def _iq4_nl(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 18)
    return Codes(_non_linear(blocks[..., 2:]), _half(blocks, 0), None, 128)


def _iq4_xs(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 136)  # d, 16 high bits of scales, 8 low halves, codes
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2").astype(np.int32)
    high = high >> (2 * np.arange(8, dtype=np.int32)) & 3
    low = np.stack([blocks[..., 4:8] & _LOW, blocks[..., 4:8] >> np.uint8(4)], axis=-1)
    scales = (low.reshape(*high.shape) | high << 4) - 32
    scaled = _half(blocks, 0)[..., None] * scales.astype(np.float32)
    packed = blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)
    return Codes(*_in_rows(_non_linear(packed), scaled), None, 128)


def _in_rows(codes: Bytes, scales: Float) -> tuple[Bytes, Float]:
    """[N, blocks, 8, 32] and [N, blocks, 8] as [N, 8 * blocks, 32] and [N, 8 * blocks]."""
    return codes.reshape(len(codes), -1, BLOCK), scales.reshape(len(scales), -1)


def _sub_blocks(blocks: Bytes) -> tuple[Float, Float]:
    """Scales and offsets [N, blocks, 8] of the eight sub-blocks of a K type."""
    d, m, x = (blocks[..., start : start + 4] for start in (4, 8, 12))
    six, two, four = np.uint8(63), np.uint8(48), np.uint8(4)
    scales = np.concatenate([d & six, x & _LOW | d >> np.uint8(2) & two], axis=-1)
    mins = np.concatenate([m & six, x >> four | m >> np.uint8(2) & two], axis=-1)
    return (
        _half(blocks, 0)[..., None] * scales.astype(np.float32),
        -_half(blocks, 2)[..., None] * mins.astype(np.float32),
    )


def _q4_k(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 144)
    scales, offsets = _sub_blocks(blocks)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, BLOCK))
    return Codes(*_in_rows(codes, scales), offsets.reshape(len(raw), -1), 0)


def _q5_k(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 176)
    scales, offsets = _sub_blocks(blocks)
    codes = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, BLOCK))
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = codes.reshape(*fifth.shape) | fifth << np.uint8(4)
    return Codes(*_in_rows(codes, scales), offsets.reshape(len(raw), -1), 0)


# -- numbers ---------------------------------------------------------------------------------------


def _float32(raw: Bytes) -> Float:
    return np.ascontiguousarray(raw).view("<f4")


def _float16(raw: Bytes) -> Float:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _bfloat16(raw: Bytes) -> Float:
    values: Float = np.ascontiguousarray(raw).view(ml_dtypes.bfloat16).astype(np.float32)
    return values


def _q6_k(raw: Bytes) -> Codes:
    blocks = _blocks(raw, 210)  # 128 bytes of low halves, 64 of two high bits, scales of 16, d
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    low = low.reshape(*blocks.shape[:2], 2, 4, BLOCK)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, BLOCK)
    high = high >> (2 * np.arange(4, dtype=np.uint8))[:, None] & np.uint8(3)
    codes = (low | high << np.uint8(4)).reshape(len(raw), -1, 16)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scaled = _half(blocks, 208)[..., None] * scales
    return Codes(codes, scaled.reshape(len(raw), -1), None, 32)


TYPES: dict[int, BlockType] = {  # by their numbers in a file
    0: BlockType("F32", 4, 1, values=_float32),
    1: BlockType("F16", 2, 1, values=_float16),
    2: BlockType("Q4_0", 18, BLOCK, 4, codes=_q4_0),
    3: BlockType("Q4_1", 20, BLOCK, 4, has_offsets=True, codes=_q4_1),
    6: BlockType("Q5_0", 22, BLOCK, 8, codes=_q5_0),
    7: BlockType("Q5_1", 24, BLOCK, 8, has_offsets=True, codes=_q5_1),
    8: BlockType("Q8_0", 34, BLOCK, 8, codes=_q8_0),
    9: BlockType("Q8_1", 40, BLOCK),
    10: BlockType("Q2_K", 84, _SUPER),
    11: BlockType("Q3_K", 110, _SUPER),
    12: BlockType("Q4_K", 144, _SUPER, 4, has_offsets=True, codes=_q4_k),
    13: BlockType("Q5_K", 176, _SUPER, 8, has_offsets=True, codes=_q5_k),
    14: BlockType("Q6_K", 210, _SUPER, codes=_q6_k),  # blocks of 16
    15: BlockType("Q8_K", 292, _SUPER),
    16: BlockType("IQ2_XXS", 66, _SUPER),
    17: BlockType("IQ2_XS", 74, _SUPER),
    18: BlockType("IQ3_XXS", 98, _SUPER),
    19: BlockType("IQ1_S", 50, _SUPER),
    20: BlockType("IQ4_NL", 18, BLOCK, 8, codes=_iq4_nl),
    21: BlockType("IQ3_S", 110, _SUPER),
    22: BlockType("IQ2_S", 82, _SUPER),
    23: BlockType("IQ4_XS", 136, _SUPER, 8, codes=_iq4_xs),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 2, 1),
    26: BlockType("I32", 4, 1),
    27: BlockType("I64", 8, 1),
    28: BlockType("F64", 8, 1),
    29: BlockType("IQ1_M", 56, _SUPER),
    30: BlockType("BF16", 2, 1, values=_bfloat16),
    34: BlockType("TQ1_0", 54, _SUPER),
    35: BlockType("TQ2_0", 66, _SUPER),
    39: BlockType("MXFP4", 17, BLOCK),
    40: BlockType("NVFP4", 36, 64),
    41: BlockType("Q1_0", 18, 128),
    42: BlockType("Q2_0", 18, 64),
}
REMOVED = {  # types that llama.cpp no longer reads
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
INSTEAD = "download the model as Q4_K_M, Q5_K_M, Q8_0 or F16 instead"


def values_of(kind: BlockType, raw: Bytes) -> Any:
    """Rows [N, K] of any readable type in float32."""
    if kind.values is not None:
        return kind.values(raw)
    if kind.codes is None:
        raise ValueError(f"{kind.name} cannot be read")
    codes, scales, offsets, zero = kind.codes(raw)
    values = (codes.astype(np.float32) - np.float32(zero)) * scales[..., None]
    if offsets is not None:
        values += offsets[..., None]
    return values.reshape(len(raw), -1)
