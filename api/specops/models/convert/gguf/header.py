"""Reads a GGUF's header and checks every number in it before use.

The layout, little-endian: `GGUF`, version (u32), number of tensors (u64), number of metadata
entries (u64); the entries: key, type (u32), value; the tensors: name, dimensions (u32 and as many
u64, the innermost first), type (u32), offset (u64) from the beginning of the data; then the data at
the next multiple of the alignment. Strings are a length (u64) and UTF-8; arrays are a type (u32), a
length (u64) and the values. The file may be hostile, so nothing in it is used unchecked.
"""

import logging
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from specops.models.convert.checkpoint import StoredTensor
from specops.models.convert.gguf.block_types import INSTEAD, REMOVED, TYPES, BlockType
from specops.models.convert.model_config import Entries
from specops.models.errors import ExportError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEAD = struct.Struct("<4sIQQ")
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_ENTRIES = 1 << 16  # of metadata, and of tensors
_MAX_KEY = (1 << 16) - 1
_MAX_NAME = 255
_MAX_TEXT = 1 << 24  # a chat template has a few thousand characters
_MAX_TEXTS = 1 << 22  # of an array; vocabularies have some hundred thousand
_MAX_HEADER = 1 << 26  # 260,000 tokens take 15 MB; one byte may take 8 in a list
_MAX_DIMENSIONS = 4
_MAX_WEIGHTS = 1 << 40
_MAX_DEPTH = 2  # arrays of arrays
_MIN_ENTRY = 8 + 4 + 1  # bytes of an empty key, a type and a value of one byte
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type, an offset
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}

_T = TypeVar("_T")
log = logging.getLogger(__name__)


class _IncompleteHeaderError(Exception):
    """The beginning of a file ends before its header does."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor(StoredTensor):
    """A tensor in a file; `shape` has the innermost dimension last."""

    type: BlockType


GgufTensors = Mapping[str, GgufTensor]


class Metadata(Entries):
    """The metadata of a file; `{arch}` in a key means the file's architecture."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        super().__init__(values, file)
        self.architecture = self.text("general.architecture")

    def raw(self, key: str) -> Any:
        """The unchecked value of an existing key."""
        return self._values[self._key(key)]

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer from 0; also a list with the same integer for every layer."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"must be an integer from 0, is {short(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer from 0; None where the key is absent."""
        return self.integer(key) if key in self else None

    def per_layer(self, key: str) -> list[int]:
        """An integer from 0 for each layer; many files have one for all of them."""
        values, layers = self._get(key), self.integer("{arch}.block_count")
        if not isinstance(values, list):
            return [self.integer(key)] * layers
        if len(self.listed(key, int)) != layers or min(values, default=0) < 0:
            raise self.error(key, f"must be {layers} integers from 0")
        return values

    def given(self, key: str) -> float | None:
        """A positive number; None where the key is absent or 0."""
        return self.number(key) if key in self and self.raw(key) != 0 else None

    def listed(self, key: str, kind: type[_T]) -> list[_T]:
        """A list of texts, integers or numbers; numbers may be written as integers."""
        value = self._get(key)
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, list) or not all(type(item) in kinds for item in value):
            raise self.error(key, f"must be a list of {kind.__name__}, is {short(value)}")
        return value

    def _key(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    _name = _key


class Header(NamedTuple):
    """A file's metadata and tensors."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(file: Path) -> Header:
    """Reads and checks a file's header.

    Raises:
        ExportError: the file is not a GGUF or damaged, or has tensors of an unknown type; the
            message names the file and the problem.
        OSError: the file cannot be read.
    """
    if file.stat().st_size < _HEAD.size:
        raise ExportError(f"{file} is not a GGUF: it is shorter than a GGUF header")
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _Reader(file, data, len(data)).header({})


def read_beginning(file: Path) -> tuple[dict[str, Any], Header | None]:
    """The metadata in the first bytes of a file, and its header; None where the header goes on.

    Raises:
        ExportError: see `read_header`, except that nobody knows yet whether the file is cut short.
        OSError: the file cannot be read.
    """
    if file.stat().st_size < _HEAD.size:
        return {}, None
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found: dict[str, Any] = {}
        try:
            return found, _Reader(file, data, math.inf).header(found)
        except _IncompleteHeaderError:
            return found, None


class _Reader:
    """A position in a mapped file that every read moves on.

    The file has `size` bytes, of which `data` may be the first ones.
    """

    def __init__(self, file: Path, data: mmap.mmap, size: float) -> None:
        self._file = file
        self._data = data
        self._size = size
        self._at = 0
        self._warned: set[str] = set()

    def _read_metadata(self, metadata: dict[str, Any]) -> int:
        """Fills in the metadata; returns the number of tensors."""
        magic, version, tensors, entries = _HEAD.unpack_from(self._data)
        self._at = _HEAD.size
        if magic != _MAGIC:
            raise ExportError(f"{self._file} is not a GGUF: it begins with {magic!r}")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            why = "it was written big-endian" if swapped else "versions 2 and 3 can be read"
            self._refuse(f"has version {version}; {why}")
        for what, count, least in (
            ("entries of metadata", entries, _MIN_ENTRY),
            ("tensors", tensors, _MIN_TENSOR),
        ):
            if count > _MAX_ENTRIES or count * least > self._size:
                self._refuse(f"claims {count} {what}")
        for _ in range(entries):
            key = self._text("a key", _MAX_KEY)
            if not key or key in metadata:
                self._refuse(f"has the key {key!r} twice" if key else "has a key without a name")
            metadata[key] = self._value(self._number("<I"), key)
        return int(tensors)

    def header(self, metadata: dict[str, Any]) -> Header:
        """Reads everything; fills in the metadata."""
        tensors = self._read_metadata(metadata)
        described = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            self._refuse(f"has an alignment of {alignment!r}, which is not a power of 2")
        return Header(self._file, metadata, self._placed(described, alignment))

    def _placed(
        self, described: list[tuple[str, BlockType, tuple[int, ...], int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors by name; none may reach beyond the file's end or overlap another."""
        start = self._at + -self._at % alignment
        found: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in described:
            weights = math.prod(shape)
            nbytes = weights // kind.weights * kind.bytes
            if name in found:
                self._refuse(f"has the tensor {name!r} twice")
            if weights > _MAX_WEIGHTS or shape[-1] % kind.weights:
                self._refuse(
                    f"has the tensor {name!r} of shape {list(shape)}, whose rows are not whole "
                    f"blocks of {kind.name}, {kind.weights} weights each"
                )
            if offset % alignment or start + offset + nbytes > self._size:
                self._refuse(
                    f"is damaged or cut short: the tensor {name!r} takes {nbytes} bytes from "
                    f"{start + offset} on, and the file has {self._size}"
                )
            found[name] = GgufTensor(
                name, self._file, kind.name, shape, start + offset, nbytes, type=kind
            )
        in_order = sorted(found.values(), key=lambda tensor: tensor.offset)
        for one, other in pairwise(in_order):
            if one.offset + one.nbytes > other.offset:
                self._refuse(
                    f"has the tensors {one.name!r} and {other.name!r} at overlapping places"
                )
        return found

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Name, type, shape and data offset of the next tensor."""
        name = self._text("a tensor's name", _MAX_NAME)
        count = self._number("<I")
        if not name or not 1 <= count <= _MAX_DIMENSIONS:
            self._refuse(f"has the tensor {name!r} of {count} dimensions")
        shape = tuple(self._number("<Q") for _ in range(count))[::-1]
        if not all(1 <= size <= _MAX_WEIGHTS for size in shape):
            self._refuse(f"has the tensor {name!r} of shape {list(shape)}")
        number, offset = self._number("<I"), self._number("<Q")
        kind = TYPES.get(number)
        if kind is None:
            called = REMOVED.get(number, f"number {number}, which is newer than this reader")
            raise ExportError(f"{self._file} has the tensor {name!r} of type {called}: {INSTEAD}")
        return name, kind, shape, offset

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._value_text(key)
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _NUMBERS:
                return self._numbers(inner, count, key)
            if inner not in (_TEXT, _ARRAY) or depth >= _MAX_DEPTH or count > _MAX_TEXTS:
                self._refuse(f"has a key {key!r} with an array of {count} of type {inner}")
            if inner == _TEXT:
                return self._texts(count, key)
            return [self._value(inner, key, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            self._refuse(f"has a key {key!r} of an unknown type, number {kind}")
        return self._numbers(kind, 1, key)[0]

    def _texts(self, count: int, key: str) -> list[str]:
        """Texts in a row; there may be hundreds of thousands."""
        data, found = self._data, list[str]()
        whole = min(len(data), self._size, _MAX_HEADER)
        for _ in range(count):
            start = self._at + _LENGTH.size
            try:
                end = start + _LENGTH.unpack_from(data, self._at)[0]
                if end > whole or end - start > _MAX_TEXT:
                    raise ValueError
                found.append(data[start:end].decode())
                self._at = end
            except (ValueError, struct.error):
                found.append(self._value_text(key))  # says what is wrong
        return found

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        raw = self._bytes(count * dtype.itemsize, key)
        if dtype == np.bool_:
            return [byte != 0 for byte in raw]
        values: list[Any] = np.frombuffer(raw, dtype).tolist()
        return values

    def _text(self, what: str, longest: int) -> str:
        try:
            return self._raw_text(what, longest).decode()
        except UnicodeDecodeError:
            self._refuse(f"has {what!r} that is not UTF-8")

    def _raw_text(self, what: str, longest: int) -> bytes:
        length = self._number("<Q")
        if length > longest:
            self._refuse(f"has {what!r} of {length} bytes")
        return self._bytes(length, what)

    def _value_text(self, key: str) -> str:
        """A text among the metadata; bytes that are not UTF-8 become U+FFFD."""
        value = self._raw_text(key, _MAX_TEXT)
        try:
            return value.decode()
        except UnicodeDecodeError:
            if key not in self._warned:
                self._warned.add(key)
                log.warning(
                    "%s: key '%s' is not UTF-8; U+FFFD stands for its bytes", self._file, key
                )
            return value.decode(errors="replace")

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._bytes(struct.calcsize(form), "a number"))
        return int(value)

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            self._refuse(f"is damaged or cut short: {what!r} reaches beyond its end")
        if count > _MAX_HEADER - self._at:
            self._refuse(f"has {what!r} end beyond the first {_MAX_HEADER} bytes")
        if count > len(self._data) - self._at:
            raise _IncompleteHeaderError
        self._at += count
        return self._data[self._at - count : self._at]

    def _refuse(self, problem: str) -> NoReturn:
        raise ExportError(f"{self._file} {problem}: download it again")
