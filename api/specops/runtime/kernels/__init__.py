"""Kernels in C: ONNX Runtime's custom operators, and functions for Python.

The operators are matrix products, embedding lookups, norms, attention, short convolutions and two
kinds of recurrent states. Each computes a token independently of the rest of the pass, with the
same bits on every processor; the headers say how. This module loads the library.
`specops.runtime.sampling` calls `sampling.h`, `specops.runtime.suffixes` calls `suffixes.h`,
`specops.speculation.controller` calls `lengths.h`,
`specops.models.convert.quantize` calls `quantize.h`, `specops.runtime.kernels.packing` calls
`tiles.c`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOMAIN, MATMUL, GATHER = "specops", "QuantizedMatMul", "QuantizedGather"
NORM, ATTENTION, SHORT_CONV = "Norm", "Attention", "ShortConv"
GATED_DELTA, STATE_SPACE = "GatedDelta", "StateSpace"
LIBRARY = Path(__file__).with_name("_native.so")
BLOCK_TOKENS = 64
"""Positions of a block of the KV cache."""
KV_DTYPES = {"fp32": 0, "fp16": 1, "int8": 2}
"""Element types of the KV cache, with the attention operator's numbers for them."""


class Filter(ctypes.Structure):
    """The filters of sampling; see `sampling.h`."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_float),
    )


class Adjustment(ctypes.Structure):
    """Penalties and biases for the logits of an answer's next token; see `sampling.h`."""

    _fields_ = (
        ("repetition", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
        ("num_biased", ctypes.c_int64),
        ("biased", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("num_known", ctypes.c_int64),
        ("known", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("in_prompt", ctypes.c_void_p),
    )


class StepCosts(ctypes.Structure):
    """Seconds of a step by its number of draft tokens; see `lengths.h`."""

    _fields_ = (
        ("requests", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("drafting", ctypes.c_double),
        ("place_seconds", ctypes.c_void_p),
        ("token_seconds", ctypes.c_void_p),
        ("costs", ctypes.c_void_p),
        ("prompt_costs", ctypes.c_void_p),
        ("least", ctypes.c_double),
    )


_INT, _UINT, _STRING, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_char_p, ctypes.c_void_p
_SIZE, _WORD, _FLOAT, _DOUBLE = ctypes.c_int64, ctypes.c_uint64, ctypes.c_float, ctypes.c_double
# The types of each function's result and arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "kernel": (_STRING,),
    "kernel_of": (_STRING, _UINT, _INT),
    "features": (_UINT,),
    "force_kernel": (_INT, _STRING),
    "part_bytes": (_SIZE, _SIZE, _INT),
    "share": (None, _SIZE),
    "pieces": (_SIZE, *[_SIZE] * 3, _INT, _SIZE),
    "piece_positions": (_SIZE, *[_SIZE] * 5),
    "filter": (_INT, _POINTER, _SIZE, _SIZE, ctypes.POINTER(Filter), _POINTER),
    "mask": (None, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE),
    "draw": (_SIZE, _POINTER, _SIZE, _DOUBLE),
    "gumbel_argmax": (_SIZE, _POINTER, _SIZE, _WORD, _WORD),
    "top": (_DOUBLE, _POINTER, _SIZE, _SIZE, _POINTER),
    "adjust": (None, _POINTER, _SIZE, _SIZE, *[_POINTER] * 3, ctypes.POINTER(Adjustment)),
    "text_new": (_POINTER, *[_SIZE] * 3),
    "text_free": (None, _POINTER),
    "lookups_new": (_POINTER, _SIZE),
    "lookups_free": (None, _POINTER),
    "estimate_floats": (_SIZE,),
    "look_up": (_SIZE, *[_POINTER] * 5, _SIZE, _SIZE, _FLOAT, _POINTER, _POINTER),
    "teach": (None, _POINTER, _POINTER),
    "choose_lengths": (None, ctypes.POINTER(StepCosts), *[_POINTER] * 3),
    "tile_bytes": (_SIZE, _INT, *[_SIZE] * 3),
    "row_bytes": (_SIZE, _INT, _SIZE),
    "finite_rows": (_INT, _INT, _POINTER, _SIZE, _SIZE),
    "pack_rows": (_INT, _INT, _POINTER, _SIZE, _SIZE, _POINTER),
    "pack_codes": (None, _INT, *[_POINTER] * 3, *[_SIZE] * 3, _POINTER),
    "grids": (None, _POINTER, _SIZE, _SIZE, *[_POINTER] * 3),
    "codes": (None, _POINTER, _SIZE, _SIZE, _INT, *[_POINTER] * 3),
    "report_lost_pages": (_INT,),
    "compensate": (None, *[_POINTER] * 2, _SIZE, _SIZE, *[_POINTER] * 5, _SIZE),
}


def _load(path: Path) -> ctypes.CDLL:
    """Load the library.

    Raises:
        ImportError: the library was not built, or was built for another system or from other
            sources.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"specops_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path.name} cannot be loaded ({error}): build the kernels from these "
            "sources: `scripts/venv` or `pip install --editable .`"
        ) from error
    return library


library = _load(LIBRARY)


def report_lost_pages() -> None:
    """Log the file's name before the process dies because a mapped file was truncated."""
    library.specops_report_lost_pages()


def names_for(features: int) -> tuple[str, ...]:
    """Names of the kernels that a processor can run, the fastest first.

    Args:
        features: the processor's features, as bits numbered in `processor.h`.
    """
    names = (library.specops_kernel_of(features, number) for number in itertools.count())
    return tuple(name.decode() for name in itertools.takewhile(bool, names))


NAMES = names_for(library.specops_features())
"""Names of the kernels that this processor can run, the fastest first; the last is plain C."""


def kernel() -> str:
    """The name of the kernels that new sessions use."""
    name: bytes = library.specops_kernel()
    return name.decode()


def force(name: str | None) -> None:
    """Make new sessions use the kernels of this name; None: the fastest ones again.

    This is for tests and measurements: all kernels compute the same bits.

    Raises:
        ValueError: this processor cannot run these kernels.
    """
    if not library.specops_force_kernel(None if name is None else name.encode()):
        raise ValueError(f"no {name} kernels for this processor, whose best are {kernel()}")


def share(threads: int) -> None:
    """Cut matrix products into pieces that divide evenly among this number of threads."""
    library.specops_share(threads)


def block_bytes(layers: Iterable[tuple[int, int]], dtype: str) -> int:
    """Bytes of a block of the KV cache: keys and values of 64 positions in all layers.

    Args:
        layers: for each layer the number of key-value heads and the size of a head, a multiple
            of 8.
        dtype: a key of `KV_DTYPES`.

    Raises:
        ValueError: there is no such type.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"{dtype!r} is not one of {', '.join(KV_DTYPES)}")
    kind = KV_DTYPES[dtype]
    return sum(heads * library.specops_part_bytes(size, kind) for heads, size in layers)
