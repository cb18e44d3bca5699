"""Products with 4-bit and 8-bit weights in C, as an operator of ONNX Runtime's graphs.

ONNX Runtime's own kernel does not read ahead, which is what one token at a time waits for, and
computes several tokens in other steps than one. Where there is no compiler, or no kernel for the
processor, its kernel is what computes; nothing else changes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sysconfig
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

DOMAIN, OPERATOR = "specops", "QuantizedMatMul"
LIBRARY = Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")


class SessionOptions(Protocol):
    """What is asked of ONNX Runtime's."""

    def register_custom_ops_library(self, path: str) -> None:
        """Load the library with its operators."""


@functools.cache
def kernel() -> str | None:
    """The name of the kernel that computes on this processor; None if it is ONNX Runtime's."""
    if not LIBRARY.is_file():
        log.info("products are computed by ONNX Runtime: %s was not built", LIBRARY.name)
        return None
    try:
        name = ctypes.CDLL(str(LIBRARY)).specops_kernel
    except (OSError, AttributeError) as error:
        log.warning("products are computed by ONNX Runtime: %s", error)
        return None
    name.restype = ctypes.c_char_p
    found: bytes | None = name()
    if found is None:
        log.info("products are computed by ONNX Runtime: no kernel here for this processor")
        return None
    return found.decode()


def register(options: SessionOptions) -> None:
    """Let a session of ONNX Runtime load graphs with the operator, where there is a kernel."""
    if kernel():
        options.register_custom_ops_library(str(LIBRARY))
