"""Reads and writes a head's checkpoint: as a model's, and integers, and weights in 8 bits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from specops.models.convert import ExportError
from specops.models.convert.checkpoint import Checkpoint, StoredTensor
from specops.models.state_dict import read_state_dict

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_GROUP = 64  # most weights that share a scale in a new checkpoint
_INTEGERS: dict[str, np.dtype[Any]] = {
    **{"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
}
_SCALES = ("F32", "F16", "BF16")
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


def write_head(
    path: Path,
    config: dict[str, Any],
    weights: Mapping[str, NDArray[np.float32]],
    tokens: Sequence[int],
) -> None:
    """Write a checkpoint into a folder. Matrices are in 8 bits, in compressed-tensors' format.

    Args:
        path: the folder.
        config: its settings.
        weights: by name.
        tokens: the target's tokens that it can guess, in the order of its output rows.
    """
    tensors = dict[str, NDArray[Any]]()
    group = math.gcd(_GROUP, *(values.shape[1] for values in weights.values() if values.ndim == 2))
    for name, values in weights.items():
        if values.ndim == 1:
            tensors[name] = values.astype(np.float16)
            continue
        groups = values.reshape(len(values), -1, group)
        scales = (np.abs(groups).max(-1).clip(1e-5) / 127).astype(np.float16)
        codes = np.rint(groups / scales[..., None].astype(np.float32)).clip(-127, 127)
        tensors[name] = codes.astype(np.int8).reshape(values.shape)
        tensors[f"{name}_scale"] = scales
    tensors["d2t"] = np.array(tokens) - np.arange(len(tokens))
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), tokens)
    (path / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    kind |= {"strategy": "group", "group_size": group}
    own = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind}},
        "ignore": ["lm_head"],
    }
    text = json.dumps(config | {"quantization_config": own}, indent=1) + "\n"
    (path / CONFIG).write_text(text, encoding="utf-8")
