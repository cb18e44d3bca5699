"""Kernels in C: products, norms and attention, operators of ONNX Runtime's graphs; sampling.

All of them compute a token's result independently of whatever else is in a pass, and the same bits
on every processor. `matmul.h`, `attention.h` and `sampling.h` say how. The library has the counted
suffixes, too (`suffixes.h`), which `specops.runtime.suffixes` offers.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

DOMAIN, MATMUL, NORM, ATTENTION = "specops", "QuantizedMatMul", "Norm", "Attention"
LIBRARY = Path(__file__).with_name("_native.so")
BLOCK_TOKENS = 64
"""Positions of a block of the KV cache."""
Floats = npt.NDArray[np.float32]
KV_DTYPES = {"fp32": 0, "fp16": 1, "int8": 2}
"""Elements of the KV cache, as the attention operator numbers them."""


class _Filter(ctypes.Structure):
    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_float),
        ("top_n_sigma", ctypes.c_float),
    )


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
        library.specops_kernel_of.argtypes = [ctypes.c_uint, ctypes.c_int]
        library.specops_kernel_of.restype = ctypes.c_char_p
        library.specops_features.restype = ctypes.c_uint
        library.specops_amx_refusal.argtypes = [ctypes.c_int] * 5
        library.specops_amx_refusal.restype = ctypes.c_char_p
        library.specops_no_amx.restype = ctypes.c_char_p
        library.specops_force_kernel.argtypes = [ctypes.c_char_p]
        library.specops_block_bytes.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int]
        library.specops_block_bytes.restype = ctypes.c_int64
        library.specops_share.argtypes = [ctypes.c_int64]
        library.specops_share.restype = None
        library.specops_pieces.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int, ctypes.c_int64]
        library.specops_pieces.restype = ctypes.c_int64
        array, size, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
        library.specops_filter.argtypes = [array, size, size, ctypes.POINTER(_Filter), array]
        library.specops_mask.argtypes = [array, size, size, array, size]
        library.specops_mask.restype = None
        library.specops_draw.argtypes = [array, size, ctypes.c_double]
        library.specops_draw.restype = size
        library.specops_race.argtypes = [array, size, word, word]
        library.specops_race.restype = size
        library.specops_text_new.argtypes = [size] * 3
        library.specops_text_new.restype = array
        library.specops_text_free.argtypes = [array]
        library.specops_lookups_new.argtypes = [size]
        library.specops_lookups_new.restype = array
        library.specops_lookups_free.argtypes = [array]
        library.specops_estimate_floats.restype = size
        library.specops_look_up.argtypes = [array] * 4 + [size] * 2 + [ctypes.c_float, array, array]
        library.specops_look_up.restype = size
        library.specops_teach.argtypes = [array] * 2
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path.name} cannot be loaded ({error}): the kernels were not built, or from other "
            "sources; `scripts/venv` or `pip install --editable .` builds them"
        ) from error
    return library


library = _load(LIBRARY)


def names_for(features: int) -> tuple[str, ...]:
    """Names of the kernels that a processor can compute with, the fastest first.

    Args:
        features: what it has, bits as `processor.h` numbers them.
    """
    names = (library.specops_kernel_of(features, number) for number in itertools.count())
    return tuple(name.decode() for name in itertools.takewhile(bool, names))


NAMES = names_for(library.specops_features())
"""Kernels that this processor can compute with, the fastest first; the last one is plain C."""


def kernel() -> str:
    """The name of the kernels that new sessions compute with."""
    name: bytes = library.specops_kernel()
    return name.decode()


def no_amx() -> str:
    """Why AMX, which the processor names, does not compute; empty where there is nothing to say."""
    reason: bytes = library.specops_no_amx()
    return reason.decode()


def described() -> str:
    """The kernels' name, and why they are not those of AMX where the processor names it."""
    reason = no_amx()
    return f"{kernel()}; not AMX-INT8: {reason}" if reason else kernel()


def force(name: str | None) -> None:
    """Have new sessions compute with the kernels of that name; None: with the best again.

    For tests and measurements: all of them compute the same bits.

    Raises:
        ValueError: this processor cannot compute with them.
    """
    if not library.specops_force_kernel(None if name is None else name.encode()):
        raise ValueError(f"no {name} kernels for this processor, whose best are {kernel()}")


def share(threads: int) -> None:
    """Have products be cut so that this many threads share them evenly."""
    library.specops_share(threads)


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
    size: int = library.specops_block_bytes(layers, kv_heads, head_size, KV_DTYPES[dtype])
    return size


def _address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous, writable array begins. (`array.ctypes.data` takes four times as long.)"""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def filtered(
    logits: Floats,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_n_sigma: float = 0.0,
) -> Floats:
    """The distribution that a token is drawn from, [S, V] of [S, V] logits.

    Args:
        logits: as a model has them.
        temperature: above 0; they are divided by it.
        top_k: so many of the most probable stay, with those that are as probable; 0: all.
        top_p: the smallest set that holds this share stays; 1: all.
        min_p: those with this share of the likeliest one's probability stay; at most 1.
        top_n_sigma: so many standard deviations below the largest logit is the least that stays,
            before the others count; 0: all.

    Raises:
        MemoryError: there is no room for V numbers.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    probs = np.empty_like(logits)
    by = _Filter(temperature, top_k, top_p, min_p, top_n_sigma)
    if library.specops_filter(_address(logits), *logits.shape, by, _address(probs)):
        raise MemoryError("sampling needs memory for a vocabulary of numbers")
    return probs


def mask(logits: Floats, masks: npt.NDArray[np.uint32]) -> None:
    """Make -inf of the logits whose bits are not set.

    Args:
        logits: [S, V], contiguous.
        masks: [S, W] contiguous, with W * 32 >= V: number i has bit i % 32 of word i // 32.
    """
    library.specops_mask(_address(logits), *logits.shape, _address(masks), masks.shape[1])


def draw(weights: Floats, uniform: float) -> int:
    """The index at which the sum of [V] weights passes `uniform`, 0 to 1, of the whole."""
    weights = np.ascontiguousarray(weights, np.float32)
    index: int = library.specops_draw(_address(weights), len(weights), uniform)
    return index


def race(weights: Floats, seed: int, position: int) -> int:
    """The index of [V] weights that wins a race by noise of seed, position and index alone."""
    weights = np.ascontiguousarray(weights, np.float32)
    index: int = library.specops_race(_address(weights), len(weights), seed, position)
    return index
