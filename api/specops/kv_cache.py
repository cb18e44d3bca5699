"""The KV cache: one buffer per layer, a contiguous slice per row, a length per row.

Forward passes read and write the buffers in place (their addresses are bound to the graph), so
rolling back is a length change: what lies beyond a row's length is overwritten by the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the graph fixes about its cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype[np.generic]

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values of `rows` sequences of at most `capacity` tokens.

    Attributes:
        buffers: per layer (keys, values), each [rows, kv_heads, capacity, head_dim].
        lengths: tokens held per row.
    """

    def __init__(self, shape: CacheShape, *, rows: int, capacity: int) -> None:
        self.shape = shape
        self.rows = rows
        self.capacity = capacity
        extent = (rows, shape.kv_heads, capacity, shape.head_dim)
        # Zeros, not empty: the operator multiplies masked positions by 0, and 0 * NaN is NaN.
        self.buffers = [
            (np.zeros(extent, shape.dtype), np.zeros(extent, shape.dtype))
            for _ in range(shape.layers)
        ]
        self.lengths = [0] * rows

    @property
    def tokens(self) -> int:
        """Tokens held in all rows."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return self.shape.bytes_per_token * self.rows * self.capacity

    def truncate(self, row: int, length: int) -> None:
        """Forget what `row` holds beyond `length` tokens."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} tokens, cannot keep {length}")
        self.lengths[row] = length

    def move(self, source: int, destination: int) -> None:
        """Copy a row's used part over another row and empty the source."""
        used = self.lengths[source]
        for keys, values in self.buffers:
            keys[destination, :, :used] = keys[source, :, :used]
            values[destination, :, :used] = values[source, :, :used]
        self.lengths[destination] = used
        self.lengths[source] = 0
