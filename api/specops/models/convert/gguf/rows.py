"""A tensor's rows in a GGUF, read when they are asked for: as numbers, or in the file's own blocks.

A product takes blocks of 32 weights `scale * (code - zero point)` with codes of 4 or 8 bits; where
a file has `scale * code + offset`, the zero point is the fraction `-offset / scale`. What the file
has in another form is rounded to 8 bits, in blocks of 32.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.gguf.block_types import BLOCK, Codes, values_of
from specops.models.convert.gguf.header import GgufTensor
from specops.models.convert.quantize import (
    QuantizedWeight,
    check_finite,
    packed_codes,
    quantize_blockwise,
)

Float = NDArray[np.float32]


class GgufRows:
    """A matrix [N, K], or some of its rows, in the order `order`, or in that of the file.

    `order` [N] are indices of the file's rows: llama.cpp interleaves the halves of rotated heads.
    `bits` are the fewest that hold the codes; with offsets, zero points have to be fractions.
    `has_codes`: its numbers are codes in blocks of any size, exactly.
    """

    def __init__(self, tensor: GgufTensor, order: NDArray[np.int64] | None = None) -> None:
        self._tensor = tensor
        self._order = order
        height, width = tensor.shape
        self._row_bytes = tensor.nbytes // height
        shape = (height, self._row_bytes)
        self._mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, shape)
        self._rows = range(height)
        self._width = width
        self.bits = tensor.type.bits or 8
        self.has_codes = tensor.type.codes is not None
        self.has_offsets = tensor.type.has_offsets

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self), self._width

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self) * self._row_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> GgufRows:
        """Some of the rows; nothing is read."""
        picked = copy(self)
        picked._rows = self._rows[rows]
        return picked

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The numbers: float32 [N, K] unless another type is asked for; ValueError on NaN."""
        del copy  # they are never in memory before
        found: NDArray[Any] = values_of(self._tensor.type, self._raw())
        check_finite(found)
        return found if dtype is None else found.astype(dtype, copy=False)

    def quantized(self, bits: int, *, fractions: bool) -> QuantizedWeight:
        """Blocks of 32, as MatMulNBits has them; exactly the file's, where it has such.

        Args:
            bits: of a code, 4 or 8, and no fewer than `bits` of this.
            fractions: zero points are given, as float32; else all are the middle of the range.

        Raises:
            ValueError: a scale, an offset or a number is infinite or none.
        """
        codes, scales, offsets, zero = self._codes()
        if offsets is None and not fractions:
            middle = 1 << (bits - 1)
            packed = packed_codes(codes + np.uint8(middle - zero), bits)
            return QuantizedWeight(packed, scales, None)
        if offsets is None:
            points = np.full_like(scales, zero)
        else:
            # Without a scale a block is its offset, everywhere: offset * (1 - 0).
            flat = scales == 0
            points = np.where(flat, 0, -offsets / np.where(flat, np.float32(1), scales))
            codes = np.where(flat[..., None], np.uint8(1), codes)
            scales = np.where(flat, offsets, scales)
        return QuantizedWeight(packed_codes(codes, bits), scales, points.astype(np.float32))

    def codes(self) -> Codes:
        """The file's own codes, in its own blocks; for types that have some.

        Raises:
            ValueError: as `quantized`, or there are none.
        """
        if self._tensor.type.codes is None:
            raise ValueError(f"{self._tensor.type.name} has no codes")
        return self._tensor.type.codes(self._raw())

    def _codes(self) -> Codes:
        """The file's own codes in blocks of 32, or else new ones."""
        if self._tensor.type.bits:
            return self.codes()
        weight = quantize_blockwise(np.asarray(self, np.float32), 8, BLOCK)
        return Codes(weight.packed, weight.scales, None, 128)

    def _raw(self) -> NDArray[np.uint8]:
        """The rows' bytes [N, bytes of a row]."""
        rows = slice(self._rows.start, self._rows.stop)
        found: NDArray[np.uint8] = self._mapped[rows if self._order is None else self._order[rows]]
        return found


def interleaved_halves(heads: int, rows: int) -> NDArray[np.int64]:
    """Where a file has the rows of q or k that transformers has in order.

    Llama rotates pairs of neighbours in llama.cpp, and halves of a head in transformers; so rows
    of each head were taken in turn from its two halves when the file was written.
    """
    places = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return places.swapaxes(1, 2).reshape(-1)
