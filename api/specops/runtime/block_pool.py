"""The memory of a KV cache: equal blocks in one stretch of anonymous memory, lazily touched.

The operator finds a block by its number alone, so that requests share blocks by holding the same
numbers, and copying one is a single memcpy.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from specops.system.page_cache import ask_large_pages


class BlockPool:
    """`num_blocks` blocks, each free or taken.

    Attributes:
        memory: [num_blocks, block_bytes], page aligned. A page of it takes memory from the first
            write on; nothing is ever zeroed.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs a block at least, not {num_blocks}")
        # Private: shared anonymous memory would count as files that cannot be dropped.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, num_blocks * block_bytes, flags=flags)
        # Large pages: 2 to 3 % of a pass of the demo's target, 8 slots behind 900 tokens each.
        ask_large_pages(mapped)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8).reshape(
            num_blocks, block_bytes
        )
        # The last one given back is the first one taken: its pages are there already.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    @property
    def address(self) -> int:
        """Where block 0 begins."""
        return int(self.memory.ctypes.data)

    def take(self) -> int | None:
        """Number of a block that was free; None: there is none."""
        return self._free.pop() if self._free else None

    def give(self, block: int) -> None:
        """Take a block back."""
        self._free.append(block)

    def copy(self, source: int, destination: int) -> None:
        """Write a block's contents into another one."""
        self.memory[destination] = self.memory[source]
