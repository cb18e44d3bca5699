"""Rows of a tensor in a GGUF, read on demand: as numbers, or in the file's own blocks.

A product takes blocks of 32 weights `scale * (code - zero point)` with codes of 4 or 8 bits. Where
a file has `scale * code + offset`, the zero point is the fraction `-offset / scale`. Weights in
every other form are rounded to 8 bits, in blocks of 32.
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


class GgufRows:
    """A matrix [N, K], or some of its rows, in the order `order` or in the file's order.

    `order` [N] are indices of the file's rows; llama.cpp interleaves the halves of rotated heads.
    `bits` is the least number of bits that holds the codes. With `has_offsets`, zero points must be
    fractions. `has_codes`: the file stores codes, in blocks of any size.
    """

    def __init__(self, tensor: GgufTensor, order: NDArray[np.int64] | None = None) -> None:
        self._type = tensor.type
        self._order = order
        height, self._width = tensor.shape
        self._row_bytes = tensor.nbytes // height
        shape = (height, self._row_bytes)
        self._mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, shape)
        self._rows = range(height)
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

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> GgufRows:
        """Some of the rows, or rows in another order; nothing is read."""
        picked = copy(self)
        if isinstance(rows, slice):
            picked._rows = self._rows[rows]
        else:
            found = np.arange(len(self._mapped)) if self._order is None else self._order
            picked._order = found[self._rows.start : self._rows.stop][rows]
            picked._rows = range(len(rows))
        return picked

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The numbers [N, K], float32 by default; raises ValueError on NaN and infinity."""
        del copy  # always a copy
        found: NDArray[Any] = values_of(self._type, self._raw())
        check_finite(found)
        return found if dtype is None else found.astype(dtype, copy=False)

    def quantized(self, bits: int, *, fractions: bool) -> QuantizedWeight:
        """The weights in blocks of 32, as MatMulNBits reads them; the file's own if it has them.

        Args:
            bits: bits of a code, 4 or 8, at least the attribute `bits`.
            fractions: zero points are float32 fractions; otherwise all are the middle of the range.

        Raises:
            ValueError: a scale, an offset or a number is NaN or infinite.
        """
        if self._type.bits:
            codes, scales, offsets, zero = self.codes()
        else:
            weight = quantize_blockwise(np.asarray(self, np.float32), 8, BLOCK)
            codes, scales, offsets, zero = Codes(weight.packed, weight.scales, None, 128)
        if offsets is None and not fractions:
            middle = 1 << (bits - 1)
            packed = packed_codes(codes + np.uint8(middle - zero), bits)
            return QuantizedWeight(packed, scales, None)
        if offsets is None:
            points = np.full_like(scales, zero)
        else:
            # A block with the scale 0 is its offset everywhere: offset * (1 - 0).
            flat = scales == 0
            points = np.where(flat, 0, -offsets / np.where(flat, np.float32(1), scales))
            codes = np.where(flat[..., None], np.uint8(1), codes)
            scales = np.where(flat, offsets, scales)
        return QuantizedWeight(packed_codes(codes, bits), scales, points.astype(np.float32))

    def codes(self) -> Codes:
        """The file's own codes, in its own blocks.

        Raises:
            ValueError: a scale or an offset is NaN or infinite, or the type has no codes.
        """
        if self._type.codes is None:
            raise ValueError(f"{self._type.name} has no codes")
        return self._type.codes(self._raw())

    def _raw(self) -> NDArray[np.uint8]:
        """The rows' bytes [N, bytes of a row]."""
        rows = slice(self._rows.start, self._rows.stop)
        found: NDArray[np.uint8] = self._mapped[rows if self._order is None else self._order[rows]]
        return found


def interleaved_halves(heads: int, rows: int) -> NDArray[np.int64]:
    """The indices of a file's rows of q or k, in transformers' order.

    Llama rotates pairs of neighbours in llama.cpp, and halves of a head in transformers. The
    program that wrote the file took the rows of each head in turn from its two halves.
    """
    places = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return places.swapaxes(1, 2).reshape(-1)
