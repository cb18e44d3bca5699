"""The memory of a KV cache: blocks of equal size in one region of anonymous memory.

The attention operator finds a block by its number alone. So requests share a block by holding the
same number, and copying a block is a single memcpy.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from specops.runtime import kernels
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.layer_shapes import Attention, LayerShape, Recurrent, ShortConv
from specops.system.page_cache import ask_large_pages

ROLLBACK = 16  # maximum number of draft tokens, and thus of tokens that a slot can take back


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a model's cache.

    Attributes:
        attention: the heads of each layer with keys and values.
        dtype: element type of keys and values, a key of `kernels.KV_DTYPES`.
        ring_floats_per_token: floats that all recurrent layers together keep per recent token.
        positions_before: number of earlier tokens that a convolution reads.
        state_floats: floats in the states of all recurrent layers together.
    """

    attention: tuple[Attention, ...]
    dtype: str
    ring_floats_per_token: int = 0
    positions_before: int = 0
    state_floats: int = 0

    @classmethod
    def of(cls, layers: Sequence[LayerShape], dtype: str) -> CacheShape:
        """The cache sizes of a graph with these layers.

        Raises:
            ValueError: no layer has attention.
        """
        attention = tuple(layer for layer in layers if isinstance(layer, Attention))
        others = [layer for layer in layers if isinstance(layer, Recurrent)]
        taps = [layer.taps for layer in others if isinstance(layer, ShortConv)]
        if not attention:
            raise ValueError("no layer has attention")
        return cls(
            attention,
            dtype,
            sum(layer.ring_floats_per_token for layer in others),
            max(taps, default=1) - 1,
            sum(layer.state_floats for layer in others),
        )

    @property
    def ring(self) -> int:
        """Positions in a slot's ring: enough for rejecting the last `ROLLBACK` tokens of a pass."""
        return self.positions_before + ROLLBACK + 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's recurrent state and ring."""
        return (self.state_floats + self.ring * self.ring_floats_per_token) * 4

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys and values of 64 tokens in all layers."""
        return kernels.block_bytes(map(astuple, self.attention), self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.block_bytes // BLOCK_TOKENS


class BlockPool:
    """`num_blocks` blocks, each free or in use.

    Args:
        num_blocks: number of blocks, at least 1.
        block_bytes: size of a block.

    Attributes:
        memory: [num_blocks, block_bytes], page aligned. A page takes memory when it is first
            written; the pool never zeroes a block.

    Raises:
        ValueError: there is not even one block.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least 1 block, not {num_blocks}")
        # Private: shared anonymous memory would be charged as files that cannot be dropped.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, num_blocks * block_bytes, flags=flags)
        # Large pages save 2 to 3 % of a pass (demo target, 8 slots after 900 tokens each).
        ask_large_pages(mapped)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8).reshape(
            num_blocks, block_bytes
        )
        # A stack: the block freed last has its pages already.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self) -> int:
        """Allocate a free block and return its number. There must be one."""
        return self._free.pop()

    def free(self, block: int) -> None:
        """Free a block."""
        self._free.append(block)

    def copy(self, source: int, destination: int) -> None:
        """Copy the contents of a block into another block."""
        self.memory[destination] = self.memory[source]
