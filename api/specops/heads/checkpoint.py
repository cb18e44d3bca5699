"""Reads a head's checkpoint: as a model's, and integers, and weights in 8 bits."""

from __future__ import annotations

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
_KINDS = {kind: name for name, kind in _INTEGERS.items()}


class HeadCheckpoint(Checkpoint):
    """A head's checkpoint.

    Weights [N, K] of type I8 have scales [N, K / group] beside them, `NAME_scale`: the format
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
            if stored.dtype == "I8" and f"{name}_scale" in self.tensors:
                scales = np.asarray(self._view(f"{name}_scale"), np.float32)
                del self.tensors[f"{name}_scale"]
                codes = self._numbers(stored, np.dtype(np.int8))
                if len(scales) != len(codes) or codes.shape[1] % scales[0].size:
                    raise ExportError(
                        f"{stored.file}: tensor {name}_scale is {list(scales.shape)}, which does "
                        f"not fit the weights {list(codes.shape)}"
                    )
                groups = codes.reshape(len(codes), scales[0].size, -1)
                values = (groups * scales.reshape(len(codes), -1, 1)).reshape(codes.shape)
                self.tensors[name] = replace(stored, dtype="F32", values=values)
        super().expect(shapes, ignored)

    def _numbers(self, stored: StoredTensor, kind: np.dtype[Any]) -> NDArray[Any]:
        if stored.values is not None:
            return stored.values
        return np.memmap(stored.file, kind, "r", stored.offset, stored.shape)
