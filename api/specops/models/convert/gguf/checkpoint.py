"""A GGUF as a checkpoint: families read it under transformers' names."""

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.checkpoint import Checkpoint, Float, StoredTensor
from specops.models.convert.gguf.architectures import family_in
from specops.models.convert.gguf.block_types import INSTEAD, TYPES
from specops.models.convert.gguf.header import GgufTensor, Header, Metadata, read_header
from specops.models.convert.gguf.names import is_beside_text, parted, stored_name
from specops.models.convert.gguf.rows import GgufRows, interleaved_halves
from specops.models.convert.gguf.settings import (
    ROPE_FACTORS,
    config_of,
    num_layers,
    rotated_heads,
)
from specops.models.convert.gguf.tokenizer import tokenizer_files
from specops.models.convert.quantization import FileQuantization
from specops.models.errors import ExportError
from specops.models.gguf_files import files_of
from specops.sampling_defaults import GENERATION_CONFIG
from specops.text.files import TOKENIZER

_MAX_FACTORS = 1 << 12
_TRANSPOSED = "transformer.h."  # the names of GPT-2's layers
_FILE_TYPES = {  # general.file_type
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"},
    **{10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M"},
    **{16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 25: "IQ4_NL", 30: "IQ4_XS"},
    **{32: "BF16"},
}
_SAMPLING = {  # llama.cpp's names in general.sampling.*, and generation_config.json's
    **{"temp": "temperature", "penalty_repeat": "repetition_penalty"},
    **{name: name for name in ("top_k", "top_p", "min_p")},
}


class GgufCheckpoint(Checkpoint):
    """A GGUF, single or in shards."""

    def __init__(self, path: Path, headers: list[Header] | None = None) -> None:
        """Reads and checks all headers, and makes the tokenizer's files.

        Args:
            path: the file, or any of its shards.
            headers: already read, from files of which only the beginnings are here yet.

        Raises:
            ExportError: the file is damaged or cannot be exported.
        """
        self.path, self._headers_alone = path, headers is not None
        headers = headers or [read_header(file) for file in files_of(path)]
        self.files = [header.file for header in headers]
        self.config_file = self.files[0]
        self._metadata = metadata = Metadata(headers[0].metadata, headers[0].file)
        self._family = family = family_in(metadata)
        joined = _joined(headers, metadata).items()
        text = {name: tensor for name, tensor in joined if not is_beside_text(name)}
        self._stored = parted(family, text)
        self._texts = tokenizer_files(metadata)
        self.config = config_of(family, metadata, self._stored, self._factors())
        if self._texts.size > self.config["vocab_size"]:
            raise metadata.error(
                "tokenizer.ggml.tokens",
                f"has {self._texts.size} tokens for a table of {self.config['vocab_size']}",
            )
        self.config |= {"bos_token_id": self._texts.bos, "eos_token_id": self._texts.ends}
        self.quantization = FileQuantization(kind=self._kind())
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in self._stored.values():
            if tensor.name not in ROPE_FACTORS:
                self.tensors[self._checked_name(tensor)] = tensor

    def expect(self, shapes: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Checks the tensors against `shapes`, in both directions, before any work.

        Transformers stores GPT-2's weights transposed, and a file does not; a file leaves out the
        axis of length 1 of a convolution that mixes no channels, and gives some vectors one.
        """
        expected = {
            name: shape[::-1] if len(shape) == 2 and name.startswith(_TRANSPOSED) else shape
            for name, shape in shapes.items()
        }
        for name, shape in expected.items():
            if len(shape) > 2:
                expected[name] = shape[0], *shape[2:]
            elif name in self.tensors and len(shape) == 1:
                stored = self.tensors[name].shape
                expected[name] = stored if stored in ((*shape, 1), (1, *shape)) else shape
        self._compare(expected, ignored)

    def vector(self, name: str) -> Float:
        """A one-dimensional tensor, or a small one's numbers, as float32 in transformers' order."""
        tensor = self._stored[self._find(name).name]
        try:
            values = _numbers(tensor)
        except ValueError:
            raise ExportError(
                f"{tensor.file}: tensor {tensor.name} contains NaN or infinity: download it again"
            ) from None
        order = self._order(tensor)
        if tensor.name.endswith(".ssm_a"):  # a state's decay, -exp(A_log)
            if (values >= 0).any():
                raise ExportError(f"{tensor.file}: tensor {tensor.name} is not below 0 everywhere")
            values = np.log(-values.astype(np.float64)).astype(np.float32)
        is_norm = tensor.name.endswith("norm.weight") and ".ssm_" not in tensor.name
        if is_norm and self._family.offset_norms:
            values = values - np.float32(1)
        return values if order is None else values[order]

    def write_texts(self, folder: Path, *, in_place: bool = False) -> None:
        """Writes the files of the tokenizer and of sampling, as other checkpoints have them."""
        del in_place  # a GGUF has no such files
        files = {TOKENIZER: self._texts.make(), **self._texts.others}
        if advice := self._advice():
            files[GENERATION_CONFIG] = advice
        write = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
        for name, content in files.items():
            text = content if isinstance(content, str) else write(content)
            (folder / name).write_text(text, encoding="utf-8")

    # -----------------------------------------------------------------------------------------

    def _checked_name(self, tensor: GgufTensor) -> str:
        """The name of a tensor in transformers."""
        if not tensor.type.readable:
            readable = ", ".join(kind.name for kind in TYPES.values() if kind.readable)
            raise ExportError(
                f"{tensor.file}: tensor {tensor.name} has type {tensor.type.name}; those that can "
                f"be read are {readable}: {INSTEAD}"
            )
        name = stored_name(self._family, num_layers(self._metadata), tensor.name)
        if name is None or name in self.tensors:
            raise ExportError(
                f"{tensor.file}: tensor {tensor.name} is not part of the architecture "
                f"{self._metadata.architecture}; exporting without it would give a wrong model"
            )
        return name

    def _view(self, name: str, *, transposed: bool = False) -> GgufRows:
        """The rows of a tensor; a file stores none transposed."""
        del transposed
        tensor = self._stored[self._find(name).name]
        return GgufRows(tensor, self._order(tensor))

    def _order(self, tensor: GgufTensor) -> NDArray[np.int64] | None:
        """The file's indices of transformers' rows; None if both have the same order."""
        part = tensor.name.split(".")[-2]
        heads = rotated_heads(self._family, part, self._metadata)
        return interleaved_halves(heads, tensor.shape[0]) if heads else None

    def _factors(self) -> dict[str, list[float]]:
        """The divisors of the rotation's frequencies, under the names of a config.json."""
        found: dict[str, list[float]] = {}
        for name, called in ROPE_FACTORS.items():
            if (tensor := self._stored.get(name)) is None:
                continue
            if tensor.type.name != "F32" or math.prod(tensor.shape) > _MAX_FACTORS:
                raise ExportError(f"{tensor.file}: tensor {name} must be a few F32")
            if self._headers_alone:
                found[called] = [1.0] * math.prod(tensor.shape)
            else:
                found[called] = _numbers(tensor).tolist()
        return found

    def _advice(self) -> dict[str, Any]:
        """How the file's authors advise to draw tokens. The service checks the values."""
        found = {
            ours: self._metadata.raw(key)
            for theirs, ours in _SAMPLING.items()
            if (key := f"general.sampling.{theirs}") in self._metadata
        }
        return {  # 0.95 in single precision is 0.949999988
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in found.items()
        }

    def _kind(self) -> str:
        """The file's name for its mixture of types, or the type of most weights."""
        file_type = self._metadata.optional_integer("general.file_type")
        if file_type in _FILE_TYPES:
            return _FILE_TYPES[file_type]
        counts: Counter[str] = Counter()
        for tensor in self._stored.values():
            counts[tensor.type.name] += math.prod(tensor.shape)
        return counts.most_common(1)[0][0]


def _numbers(tensor: GgufTensor) -> Float:
    """All numbers of a vector, in the order of the file; ValueError if one is NaN or infinite."""
    if tensor.type.dtype is None:
        raise ExportError(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.type.name}; vectors can only be "
            f"read as F32, F16 and BF16: {INSTEAD}"
        )
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (1, tensor.nbytes))
    values: Float = tensor.type.numbers(raw)[0]
    return values


def _joined(headers: list[Header], metadata: Metadata) -> dict[str, GgufTensor]:
    """The tensors of all shards by name."""
    if metadata.integer("split.count", 1) not in (0, len(headers)):
        raise metadata.error("split.count", f"does not say {len(headers)}, as the name does")
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        if header.metadata.get("split.no", number) != number:
            raise ExportError(f"{header.file}: key 'split.no' is not {number}, as the name says")
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ExportError(f"{header.file}: tensor {name} is in {tensors[name].file} too")
            tensors[name] = tensor
    if metadata.integer("split.tensors.count", len(tensors)) != len(tensors):
        raise metadata.error("split.tensors.count", f"does not say {len(tensors)}, the tensors")
    return tensors
