"""The types of tensors in GGUF files, as far as the header reader needs to know them.

Weights in blocks stay as they are from the file to the kernels; the layouts of blocks are in
`runtime/kernels/tiles.h`, and `runtime/kernels/tiles.c` reads them.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specops.models.convert.quantize import check_finite
from specops.runtime.kernels import library

Bytes = NDArray[np.uint8]

_BLOCK, _SUPER = 32, 256  # weights in a block


class BlockType(NamedTuple):
    """A type: its `number` in a file, and the bytes and weights of one block.

    `dtype` is the type of plain numbers, which are blocks of one. Other types can be read if the
    kernels know them.
    """

    number: int
    name: str
    bytes: int
    weights: int
    dtype: Any = None

    @property
    def readable(self) -> bool:
        """Whether the weights can be read."""
        return self.dtype is not None or library.specops_row_bytes(self.number, self.weights) > 0

    def numbers(self, raw: Bytes) -> NDArray[np.float32]:
        """Rows [N, bytes] of plain numbers in float32; ValueError if one is NaN or infinite."""
        values: NDArray[np.float32] = np.ascontiguousarray(raw).view(self.dtype).astype(np.float32)
        check_finite(values)
        return values

    def check_scales(self, raw: Bytes) -> None:
        """Raises ValueError if a scale or an offset in rows [N, bytes] is NaN or infinite."""
        raw, depth = np.ascontiguousarray(raw), raw.shape[-1] // self.bytes * self.weights
        if not library.specops_finite_rows(self.number, raw.ctypes.data, len(raw), depth):
            raise ValueError("weights contain NaN or infinity")


TYPES: dict[int, BlockType] = {
    kind.number: kind
    for kind in (
        BlockType(0, "F32", 4, 1, dtype=np.dtype("<f4")),
        BlockType(1, "F16", 2, 1, dtype=np.dtype("<f2")),
        BlockType(2, "Q4_0", 18, _BLOCK),
        BlockType(3, "Q4_1", 20, _BLOCK),
        BlockType(6, "Q5_0", 22, _BLOCK),
        BlockType(7, "Q5_1", 24, _BLOCK),
        BlockType(8, "Q8_0", 34, _BLOCK),
        BlockType(9, "Q8_1", 40, _BLOCK),
        BlockType(10, "Q2_K", 84, _SUPER),
        BlockType(11, "Q3_K", 110, _SUPER),
        BlockType(12, "Q4_K", 144, _SUPER),
        BlockType(13, "Q5_K", 176, _SUPER),
        BlockType(14, "Q6_K", 210, _SUPER),
        BlockType(15, "Q8_K", 292, _SUPER),
        BlockType(16, "IQ2_XXS", 66, _SUPER),
        BlockType(17, "IQ2_XS", 74, _SUPER),
        BlockType(18, "IQ3_XXS", 98, _SUPER),
        BlockType(19, "IQ1_S", 50, _SUPER),
        BlockType(20, "IQ4_NL", 18, _BLOCK),
        BlockType(21, "IQ3_S", 110, _SUPER),
        BlockType(22, "IQ2_S", 82, _SUPER),
        BlockType(23, "IQ4_XS", 136, _SUPER),
        BlockType(24, "I8", 1, 1),
        BlockType(25, "I16", 2, 1),
        BlockType(26, "I32", 4, 1),
        BlockType(27, "I64", 8, 1),
        BlockType(28, "F64", 8, 1),
        BlockType(29, "IQ1_M", 56, _SUPER),
        BlockType(30, "BF16", 2, 1, dtype=np.dtype(ml_dtypes.bfloat16)),
        BlockType(34, "TQ1_0", 54, _SUPER),
        BlockType(35, "TQ2_0", 66, _SUPER),
        BlockType(39, "MXFP4", 17, _BLOCK),
        BlockType(40, "NVFP4", 36, 64),
        BlockType(41, "Q1_0", 18, 128),
        BlockType(42, "Q2_0", 18, 64),
    )
}
Q8_0 = TYPES[8]
REMOVED = {  # types that llama.cpp no longer reads
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
INSTEAD = "download the model as Q4_K_M, IQ4_XS, Q3_K_M or Q8_0 instead"
