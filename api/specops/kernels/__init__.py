"""Kernels in C as operators of ONNX Runtime's graphs: quantized products, and attention.

Both compute a token's result independently of whatever else is in a pass, and the same bits on
every processor. `matmul.h` and `attention.h` say how.
"""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path
from typing import Protocol

DOMAIN, MATMUL, ATTENTION = "specops", "QuantizedMatMul", "Attention"
LIBRARY = Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
NAMES = ("AVX512-VNNI", "AVX2", "plain C")
"""Kernels, the fastest first; a processor that has one has all that follow."""
BLOCK_TOKENS = 64
"""Positions of a block of the KV cache."""
KV_DTYPES = {"fp32": 0, "fp16": 1, "int8": 2}
"""Elements of the KV cache, as the attention operator numbers them."""


class SessionOptions(Protocol):
    """What is asked of ONNX Runtime's."""

    def register_custom_ops_library(self, path: str) -> None:
        """Load the library with its operators."""


def _load(path: Path) -> ctypes.CDLL:
    """Load the library.

    Raises:
        ImportError: it was not built, or not for this system.
    """
    try:
        library = ctypes.CDLL(str(path))
        library.specops_kernel.restype = ctypes.c_char_p
        library.specops_force_kernel.argtypes = [ctypes.c_char_p]
        library.specops_block_bytes.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int]
        library.specops_block_bytes.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path.name} cannot be loaded ({error}): the kernels were not built, or from other "
            "sources; `scripts/venv` or `pip install --editable .` builds them"
        ) from error
    return library


_library = _load(LIBRARY)


def kernel() -> str:
    """The name of the kernels that new sessions compute with."""
    name: bytes = _library.specops_kernel()
    return name.decode()


def force(name: str | None) -> None:
    """Have new sessions compute with the kernels of that name; None: with the best again.

    For tests and measurements: all of them compute the same bits.

    Raises:
        ValueError: this processor cannot compute with them.
    """
    if not _library.specops_force_kernel(None if name is None else name.encode()):
        raise ValueError(f"no {name} kernels for this processor, whose best are {kernel()}")


def register(options: SessionOptions) -> None:
    """Let a session of ONNX Runtime load graphs with the operators."""
    options.register_custom_ops_library(str(LIBRARY))


def block_bytes(layers: int, kv_heads: int, head_size: int, dtype: str) -> int:
    """The size of a block of the KV cache: of all layers' keys and values for 64 positions.

    Args:
        layers: of the model.
        kv_heads: heads of keys and values.
        head_size: numbers of a head, a multiple of 8.
        dtype: a key of `KV_DTYPES`.

    Raises:
        ValueError: there is no such type.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"{dtype!r} is none of {', '.join(KV_DTYPES)}")
    size: int = _library.specops_block_bytes(layers, kv_heads, head_size, KV_DTYPES[dtype])
    return size
