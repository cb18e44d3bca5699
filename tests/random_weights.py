"""Random tensors in safetensors files, written one at a time and as fast as the disk allows."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

Shapes = dict[str, tuple[int, ...]]

_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TABLES = ("embed_tokens.weight", "embed_positions.weight", "wte.weight", "wpe.weight")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_BLOCK = (1 << 20) - 3  # a prime: in a larger tensor, whose values repeat, no two rows are equal


def write_safetensors(
    file: Path,
    shapes: Shapes,
    dtype: str,
    tensors: Iterator[np.ndarray[Any, Any]],
    integers: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
) -> None:
    """Writes `tensors`, in the order of `shapes`, as a safetensors file of one dtype.

    Behind them come `integers`: int64 or bool.
    """
    item = _numpy_dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * item.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    for name, values in integers.items():
        start, end = end, end + values.nbytes
        kind = "BOOL" if values.dtype == np.bool_ else "I64"
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.write(tensor.astype(item, copy=False).reshape(-1).view(np.uint8).data)
        for values in integers.values():
            stream.write(values.tobytes())


class RandomWeights:
    """Draws tensors with the spread of trained weights; large ones repeat a block.

    With `offsets` norms are stored minus 1, but those of a linear attention's output.
    """

    def __init__(self, seed: int, dtype: str, *, offsets: bool = False) -> None:
        self._offsets = offsets
        self._rng = np.random.default_rng(seed)
        self._dtype = _numpy_dtype(dtype)
        self._blocks: dict[float, np.ndarray[Any, Any]] = {}

    def of(self, shapes: Shapes) -> Iterator[np.ndarray[Any, Any]]:
        """A tensor for each of the shapes, in their order."""
        for name, shape in shapes.items():
            if name.endswith(".bias") and len(shape) == 1:
                yield self._normal(shape, 0.2)
            elif name.endswith("A_log"):  # states that last for one to a thousand tokens
                yield np.log(self._rng.uniform(0.001, 1.0, shape)).astype(self._dtype)
            elif len(shape) < 2:
                middle = 0 if self._offsets and "linear_attn" not in name else 1
                drawn = self._rng.standard_normal(shape, np.float32) / 10
                yield (middle + drawn).astype(self._dtype)
            elif name.endswith(_TABLES):
                yield self._normal(shape, 0.3)
            elif len(shape) == 4:
                yield np.tril(np.ones(shape, self._dtype))
            elif name.endswith(_TRANSPOSED):
                yield self._normal(shape, shape[0] ** -0.5)
            else:
                yield self._normal(shape, shape[1] ** -0.5)

    def _normal(self, shape: tuple[int, ...], scale: float) -> np.ndarray[Any, Any]:
        if math.prod(shape) <= _BLOCK:
            drawn = self._rng.standard_normal(shape, np.float32)
            return (drawn * np.float32(scale)).astype(self._dtype)
        if scale not in self._blocks:
            drawn = self._rng.standard_normal(_BLOCK, np.float32)
            self._blocks[scale] = (drawn * np.float32(scale)).astype(self._dtype)
        start = int(
            self._rng.integers(_BLOCK)
        )  # another start each time, because equal tensors are shared
        return np.resize(np.roll(self._blocks[scale], start), shape)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
