"""Rows of a matrix in a GGUF, read on demand: the file's own blocks, or numbers."""

from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.gguf.block_types import Q8_0, Bytes
from specops.models.convert.gguf.header import GgufTensor
from specops.models.convert.quantize import check_finite, quantize_blockwise


class GgufRows:
    """A matrix [N, K], or some of its rows, in the order `order` or in the file's order.

    `order` [N] are indices of the file's rows; llama.cpp interleaves the halves of rotated heads.
    `has_blocks`: the file has blocks, not plain numbers. `kind` is the number of the type of what
    `blocks` returns.
    """

    def __init__(self, tensor: GgufTensor, order: NDArray[np.int64] | None = None) -> None:
        self.file = tensor.file
        self._type = tensor.type
        self._order = order
        height, self._width = tensor.shape
        self._row_bytes = tensor.nbytes // height
        shape = (height, self._row_bytes)
        self._mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, shape)
        self._rows = range(height)
        self.has_blocks = tensor.type.dtype is None
        self.kind = (tensor.type if self.has_blocks else Q8_0).number

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self), self._width

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self) * self._row_bytes

    @property
    def place(self) -> tuple[int, tuple[int, int], list[int] | None]:
        """Where rows are in the file: offset, shape uint8 [N, bytes of a row], and their order."""
        offset: int = self._mapped.offset
        if self._order is not None:
            order: list[int] = self._order[self._rows.start : self._rows.stop].tolist()
            return offset, self._mapped.shape, order
        return offset + self._rows.start * self._row_bytes, (len(self), self._row_bytes), None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Self:
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
        """Plain numbers [N, K], float32 by default; ValueError if one is NaN or infinite."""
        del copy  # always a copy
        found = self._type.numbers(self._raw())
        return found if dtype is None else found.astype(dtype, copy=False)

    def blocks(self) -> Bytes:
        """The blocks of the rows [N, bytes of a row]: the file's own; plain numbers become Q8_0.

        Raises:
            ValueError: a scale, an offset or a number is NaN or infinite.
        """
        if self.has_blocks:
            raw = self._raw()
            self._type.check_scales(raw)
            return raw
        return in_q8_0(np.asarray(self, np.float32))

    def _raw(self) -> Bytes:
        """The rows' bytes [N, bytes of a row]."""
        rows = slice(self._rows.start, self._rows.stop)
        found: Bytes = self._mapped[rows if self._order is None else self._order[rows]]
        return found


def in_q8_0(weights: NDArray[np.float32]) -> Bytes:
    """Rows [N, K] as Q8_0's blocks, [N, bytes of a row].

    Raises:
        ValueError: a number is NaN or infinite, or larger than the type can hold.
    """
    found = quantize_blockwise(weights, 8, Q8_0.weights)
    with np.errstate(over="ignore"):
        scales = found.scales.astype("<f2")[..., None]
    check_finite(scales)
    codes = found.packed ^ np.uint8(128)  # Q8_0 has signed codes
    return np.concatenate([scales.view(np.uint8), codes], axis=-1).reshape(len(weights), -1)


def interleaved_halves(heads: int, rows: int) -> NDArray[np.int64]:
    """The indices of a file's rows of q or k, in transformers' order.

    Llama rotates pairs of neighbours in llama.cpp, and halves of a head in transformers. The
    program that wrote the file took the rows of each head in turn from its two halves.
    """
    places = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return places.swapaxes(1, 2).reshape(-1)
