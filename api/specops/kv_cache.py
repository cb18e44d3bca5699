"""The KV cache: one buffer per layer, a contiguous slice per row, a length per row.

Forward passes read and write the buffers in place (their addresses are bound to the graph), so
rolling back is a length change: what lies beyond a row's length is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the first on."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


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

    def copy(self, source: int, destination: int, length: int) -> None:
        """Replace what a row holds by the first `length` tokens of another row."""
        if not 0 <= length <= self.lengths[source]:
            raise ValueError(
                f"row {source} holds {self.lengths[source]} tokens, cannot give {length}"
            )
        for keys, values in self.buffers:
            keys[destination, :, :length] = keys[source, :, :length]
            values[destination, :, :length] = values[source, :, :length]
        self.lengths[destination] = length

    def swap(self, first: int, second: int) -> None:
        """Let two rows change places; one that is empty costs a single copy."""
        one, other = self.lengths[first], self.lengths[second]
        for buffers in self.buffers:
            for buffer in buffers:
                kept = buffer[first, :, :one].copy() if other else buffer[first, :, :one]
                buffer[first, :, :other] = buffer[second, :, :other]
                buffer[second, :, :one] = kept
        self.lengths[first], self.lengths[second] = other, one
