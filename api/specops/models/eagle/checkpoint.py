"""Reads a head's checkpoint: as a model's, and integers, and weights in 8 bits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.models.convert import ExportError
from specops.models.convert.checkpoint import Checkpoint, StoredTensor
from specops.models.state_dict import read_state_dict

_INTEGERS: dict[str, np.dtype[Any]] = {
    **{"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
}
_SCALES = ("F32", "F16", "BF16")
_KINDS = {kind: name for name, kind in _INTEGERS.items()}


class HeadCheckpoint(Checkpoint):
    """A head's checkpoint.

    Weights [N, K] of type I8 come with scales [N, K / group], `NAME_scale`: the format
    `int-quantized` of the library compressed-tensors.
    """

    def __init__(self, path: Path, weights: Sequence[Path] = ()) -> None:
        """See `Checkpoint`."""
        super().__init__(path, weights)
        for file in weights:  # of torch, which are read without their integers
            for name, values in read_state_dict(file).items():
                if kind := _KINDS.get(values.dtype):
                    self.tensors[name] = StoredTensor(
                        name, file, kind, values.shape, 0, values.nbytes, values
                    )

    def integers(self, name: str, count: int) -> NDArray[np.int64]:
        """A tensor [count] of integers.

        Raises:
            ExportError: it has another type or size.
        """
        stored = self.tensors[name]
        if stored.dtype not in _INTEGERS or stored.shape != (count,):
            raise ExportError(
                f"{stored.file}: tensor {name} is {stored.dtype} {list(stored.shape)}, not {count} "
                "integers"
            )
        return self._numbers(stored, _INTEGERS[stored.dtype]).astype(np.int64)

    def expect(self, shapes: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Checks the tensors; those in 8 bits get their values."""
        for name, stored in list(self.tensors.items()):
            scale = self.tensors.get(f"{name}_scale")
            if stored.dtype == "I8" and scale is not None:
                shape, groups = stored.shape, math.prod(scale.shape[1:])
                fits = scale.shape[:1] == shape[:1] and len(shape) == 2
                if not fits or not groups or shape[1] % groups or scale.dtype not in _SCALES:
                    raise ExportError(
                        f"{stored.file}: tensor {name}_scale is {scale.dtype} {list(scale.shape)}, "
                        f"which does not fit the weights {list(shape)}"
                    )
                scales = self.vector(scale.name).reshape(-1, groups, 1)
                codes = self._numbers(stored, np.dtype(np.int8)).reshape(shape[0], groups, -1)
                values = (codes * scales).reshape(shape)
                self.tensors[name] = replace(stored, dtype="F32", values=values)
                del self.tensors[scale.name]
        super().expect(shapes, ignored)

    def _numbers(self, stored: StoredTensor, kind: np.dtype[Any]) -> NDArray[Any]:
        if stored.values is not None:
            return stored.values
        return np.memmap(stored.file, kind, "r", stored.offset, stored.shape)
