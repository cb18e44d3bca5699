"""Reads a Hugging Face checkpoint folder without loading it: headers first, bytes on demand.

The safetensors library checks a file's header. This module maps the bytes itself, because the
library would copy whole tensors. The layout: 8 bytes of header length, a JSON header, raw tensors.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from specops.models.convert.quantization import FileQuantization
from specops.models.convert.quantize import check_finite
from specops.models.errors import ExportError
from specops.models.paths import indexed, path_inside
from specops.models.state_dict import read_state_dict
from specops.sampling_defaults import GENERATION_CONFIG
from specops.system.folders import link
from specops.text import added_tokens, files
from specops.text.tokenizer import Tokenizer, TokenizerError

Float = NDArray[np.float32]
log = logging.getLogger(__name__)

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()} | {np.dtype(np.float64): "F32"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
MTP = "mtp."  # how the names of an MTP block's tensors begin
_EMBEDDINGS = ("embed_tokens.weight", "decoder.embed_tokens.weight", "wte.weight")
_PREFIXES = (
    *("model.language_model.", "language_model.model.", "language_model.", "model."),
    "transformer.",
)
_TIED = "tie_word_embeddings"
_QUERY_BIAS, _OUTPUT_BIAS = "self_attn.q_proj.bias", "self_attn.o_proj.bias"
_COMPARED_ROWS = 4096
_BESIDE_TEXT = (  # patterns of tensors for images or sound
    *("*vision_tower.*", "*embed_vision.*", "*audio_tower.*", "*embed_audio.*", "*visual.*"),
    "*multi_modal_projector.*",
)
_COPIED = (
    *(files.TOKENIZER, files.TOKENIZER_CONFIG, files.SPECIAL_TOKENS, files.ADDED_TOKENS),
    *(files.TEMPLATE, files.OLD_TEMPLATE, files.SYSTEM, GENERATION_CONFIG),
)


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: `nbytes` bytes of `file` from `offset` on.

    `values` is the mapped array of a state dict's tensor, which may have any strides.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    values: NDArray[Any] | None = None

    @property
    def num_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Matrix:
    """One weight [N, K], possibly several stored tensors on top of each other (q, k, v).

    The parts stay memory-mapped: arrays, or rows of a GGUF.
    """

    name: str
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): output features, input features."""
        return sum(len(part) for part in self.parts), int(self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_gguf(self) -> bool:
        """Whether the parts are rows of a GGUF, with a `kind` and `blocks`, and not arrays."""
        return not isinstance(self.parts[0], np.ndarray)

    def rows(self, step: int) -> Iterator[Any]:
        """The rows as they are stored, at most `step` at a time."""
        for part in self.parts:
            for start in range(0, len(part), step):
                yield part[start : start + step]

    def reordered(self, orders: Sequence[NDArray[np.int64]]) -> Matrix:
        """The same parts, each with its rows in another order."""
        parts = (part[order] for part, order in zip(self.parts, orders, strict=True))
        order = crc32(np.concatenate(orders).tobytes())  # a name stands for the same rows
        return Matrix(f"{self.name} in the order {order:08x}", tuple(parts))

    def divided(self, row: int) -> tuple[Matrix, Matrix]:
        """The rows before one, and the others."""
        parts: tuple[list[Any], list[Any]] = ([], [])
        start = 0
        for part in self.parts:
            middle = min(max(row - start, 0), len(part))
            for side, piece in zip(parts, (part[:middle], part[middle:]), strict=True):
                side.extend([piece] if len(piece) else [])
            start += len(part)
        first, second = map(tuple, parts)
        return Matrix(f"{self.name}[:{row}]", first), Matrix(f"{self.name}[{row}:]", second)

    def columns(self, start: int, stop: int) -> Float:
        """Columns [start, stop) of all rows: float32 [N, stop - start]."""
        return np.concatenate([np.asarray(part[:, start:stop], np.float32) for part in self.parts])


class Checkpoint:
    """A folder with config.json and weights: safetensors, single or sharded, or state dicts.

    Errors in `config` name `config_file`. `quantization` is the checkpoint's own quantization, if
    the weights keep it.
    """

    quantization: FileQuantization | None = None

    def __init__(self, path: Path, weights: Sequence[Path] = ()) -> None:
        """Reads config.json and the headers of the weights; raises ExportError naming the file.

        `weights` is the folder of the safetensors if it is another one, or the state dicts.
        """
        self.path = path
        if not path.is_dir():
            raise ExportError(f"{path} is not a folder; give the checkpoint's folder")
        self.config_file = path / "config.json"
        self.config: dict[str, Any] = read_json(self.config_file)
        state_dicts = [file for file in weights if file.is_file()]
        self.files = state_dicts or _weight_files(weights[0] if weights else path)
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            self.tensors |= _read_state_dict(file) if state_dicts else _read_header(file)
        self._follow_tensors()

    def _follow_tensors(self) -> None:
        """Corrects settings that the stored tensors contradict, as transformers does.

        A head that is stored separately from the embedding, with other values, is used even if the
        config ties both. Where queries have a bias and no output has one, outputs have none.
        """
        config = self.config.get("text_config") or self.config
        if not isinstance(config, dict):
            return
        by_body = {_body(name): tensor for name, tensor in self.tensors.items()}
        embedding = next((by_body[name] for name in _EMBEDDINGS if name in by_body), None)
        head = by_body.get(HEAD)
        tied = config.get(_TIED) if self.config.get(_TIED) is None else self.config[_TIED]
        if tied in (True, None) and head and embedding and not self._same(head, embedding):
            if tied:
                log.warning(
                    "%s: '%s' is ignored: %s and %s differ",
                    *(self.config_file, _TIED, head.name, embedding.name),
                )
            self.config[_TIED] = config[_TIED] = False
        ends = {".".join(name.split(".")[-3:]) for name in self.tensors}
        if _QUERY_BIAS in ends and _OUTPUT_BIAS not in ends:
            config["attention_output_bias"] = False

    def _same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Whether two matrices have the same shape and values."""
        if one.shape != other.shape or not {one.dtype, other.dtype} <= _DTYPES.keys():
            return False
        views = self._view(one.name), self._view(other.name)
        return all(
            np.array_equal(*(view[start : start + _COMPARED_ROWS] for view in views))
            for start in range(0, one.shape[0], _COMPARED_ROWS)
        )

    def expect(self, shapes: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Checks the stored tensors against `shapes`, in both directions, before any work.

        A stored tensor that no family reads would make a silently wrong graph, so it is an error
        too, unless it is for images or sound or matches one of `ignored`, names with `*`. Programs
        write the first parts of names differently (`transformer.h.0…` is `h.0…` without a head,
        `model.language_model.…` is `language_model.model.…`); tensors get the names in `shapes`.
        """
        ignored = (*ignored, *_BESIDE_TEXT)
        spare = defaultdict(list)
        for name in self.tensors.keys() - shapes.keys():
            spare[_body(name)].append(name)
        for name in shapes.keys() - self.tensors.keys():
            if len(found := spare[_body(name)]) == 1:
                self.tensors[name] = replace(self.tensors.pop(found[0]), name=name)
        for tensor in self.tensors.values():
            if tensor.dtype not in _DTYPES and not _matches(tensor.name, ignored):
                raise ExportError(
                    f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}; only F32, F16 "
                    "and BF16 checkpoints can be exported, not already quantized ones"
                )
        self._compare(shapes, ignored)

    @property
    def has_mtp(self) -> bool:
        """Whether it has any tensor of an MTP block."""
        return any(_body(name).startswith(MTP) for name in self.tensors)

    def vector(self, name: str) -> Float:
        """A one-dimensional tensor as float32; ExportError if a number is NaN or infinite."""
        values = np.asarray(self._view(name), dtype=np.float32)
        try:
            check_finite(values)
        except ValueError as error:
            raise ExportError(
                f"{self._find(name).file}: tensor {name}: {error}; the checkpoint is damaged, "
                "download it again"
            ) from None
        return values

    def vectors(self, *names: str) -> Float:
        """Concatenated one-dimensional tensors as float32."""
        return np.concatenate([self.vector(name) for name in names])

    def matrix(self, *names: str, transposed: bool = False) -> Matrix:
        """Tensors [N_i, K], or [K, N_i] if stored `transposed`, stacked to one [sum N_i, K]."""
        parts = (self._view(name, transposed=transposed) for name in names)
        return Matrix(" + ".join(names), tuple(parts))

    def matrix_rows(self, name: str, start: int, stop: int | None = None) -> Matrix:
        """Rows [start, stop) of a tensor [N, K]: one tensor may hold several weights.

        Args:
            name: of the tensor.
            start: the first row.
            stop: the row after the last one; None: all.
        """
        return Matrix(f"{name}[{start}:{stop}]", (self._view(name)[start:stop],))

    def bos_and_eos(self, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
        """The tokens that begin and end a text.

        generation_config.json has precedence over config.json, and that over its text part. The
        tokenizer's own end token ends a text, too: it is the one that the chat template writes. Ids
        outside the vocabulary are ignored with a warning.
        """
        file, text = self.path / GENERATION_CONFIG, self.config.get("text_config")
        generation = read_json(file) if file.is_file() else {}
        found: dict[str, Any] = {}
        for given in (text if isinstance(text, dict) else {}, self.config, generation):
            found |= {key: value for key, value in given.items() if value is not None}
        named = self._named_tokens()
        bos, eos = found.get("bos_token_id"), found.get("eos_token_id")
        begins = [named["bos_token"]] if bos is None and "bos_token" in named else [bos]
        ends = eos if isinstance(eos, list) else [eos]
        if "eos_token" in named:
            ends = [*ends, named["eos_token"]]
        begin = self._tokens("bos_token_id", begins, vocab_size)
        return next(iter(begin), None), self._tokens("eos_token_id", ends, vocab_size)

    def _tokens(self, key: str, ids: list[Any], vocab_size: int) -> tuple[int, ...]:
        """Those ids that are tokens, each once."""
        found = [token for token in ids if token is not None]
        if not all(type(token) is int for token in found):  # a bool is an `int`, too
            raise ExportError(f"{self.path}: key '{key}' must be token ids, is {found}")
        for token in found:
            if not 0 <= token < vocab_size:
                log.warning(
                    "%s: '%s' %d is ignored: the vocabulary has %d tokens",
                    *(self.path, key, token, vocab_size),
                )
        return tuple(dict.fromkeys(token for token in found if 0 <= token < vocab_size))

    def _named_tokens(self) -> dict[str, int]:
        """The special tokens that the tokenizer's files name, by their roles."""
        if not (self.path / files.TOKENIZER).is_file():
            return {}
        try:
            tokenizer = Tokenizer.load(self.path)
            texts = added_tokens.special_texts(self.path)
        except (TokenizerError, ValueError) as error:
            raise ExportError(str(error)) from error
        found = {role: tokenizer.token(text) for role, text in texts.items()}
        return {role: token for role, token in found.items() if token is not None}

    def write_texts(self, folder: Path, *, in_place: bool = False) -> None:
        """Copies the tokenizer and the other small files into `folder`.

        With `in_place` the tokenizer, the largest of them, is not there a second time.
        """
        for name in _COPIED:
            if (self.path / name).is_file():
                place = link if in_place and name == files.TOKENIZER else shutil.copyfile
                place(self.path / name, folder / name)
        tools, config = self.path / files.TOOLS_TEMPLATE, folder / files.TOKENIZER_CONFIG
        if tools.is_file() and config.is_file():
            settings = json.loads(config.read_text(encoding="utf-8"))
            named = [files.named_template(files.TOOL_USE, tools.read_text(encoding="utf-8"))]
            if isinstance(default := settings.get("chat_template"), str):
                named.append(files.named_template(files.DEFAULT, default))
            settings["chat_template"] = named
            config.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")

    def _compare(self, shapes: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        for name, shape in shapes.items():
            stored = self._find(name)
            if stored.shape != shape:
                raise ExportError(
                    f"{stored.file}: tensor {stored.name} has shape {list(stored.shape)}, "
                    f"{self.config_file.name} expects {list(shape)}; config and weights belong to "
                    "different models"
                )
        for name in self.tensors.keys() - shapes.keys():
            if not _matches(name, ignored):
                stored = self.tensors[name]
                raise ExportError(
                    f"{stored.file}: tensor {stored.name} is not part of this architecture; "
                    "exporting without it would give a wrong model"
                )

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ExportError(
                f"{self.path}: tensor {name} is missing from {len(self.files)} file(s); download "
                f"the checkpoint again, or check the architecture in {self.config_file.name}"
            )
        return self.tensors[name]

    def _view(self, name: str, *, transposed: bool = False) -> Any:
        """The mapped tensor or its transpose."""
        stored = self._find(name)
        view = stored.values
        if view is None:
            dtype = _DTYPES[stored.dtype]
            view = np.memmap(stored.file, dtype, "r", offset=stored.offset, shape=stored.shape)
        return view.T if transposed else view


def _body(name: str) -> str:
    """A tensor's name without the first parts, which programs write differently."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ExportError naming the file if it is absent or malformed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except FileNotFoundError:
        raise ExportError(f"{path} is missing: a checkpoint folder must have one") from None
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ExportError(f"{path} must hold a JSON object")
    return content


def _number(content: dict[str, Any]) -> Any:
    """The number that an object stands for: transformers writes infinities as objects."""
    text = content.get("__float__")
    return float(text) if text in ("Infinity", "-Infinity", "NaN") else content


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    try:
        single = path_inside(path, _SINGLE)
        # As in transformers: next to a whole file, an index belongs to other files.
        files = indexed(index) if index.exists() and not single.is_file() else [single]
    except ValueError as error:
        raise ExportError(str(error)) from error
    for file in files:
        if not file.is_file():
            raise ExportError(
                f"{file} is missing; only safetensors weights can be exported, and all shards "
                "must be there: download the checkpoint again"
            )
    return files


def _read_state_dict(file: Path) -> dict[str, StoredTensor]:
    """The floating-point tensors; integer buffers are no weights."""
    return {
        name: StoredTensor(name, file, kind, values.shape, 0, values.nbytes, values)
        for name, values in read_state_dict(file).items()
        if (kind := _KINDS.get(values.dtype)) is not None
    }


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, "numpy"):  # checks that the header describes the file
            pass
    except (SafetensorError, OSError) as error:
        raise ExportError(
            f"{file} is truncated or not a safetensors file ({error}); download it again"
        ) from None
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(
            name, file, entry["dtype"], shape, 8 + length + start, end - start
        )
    return tensors
