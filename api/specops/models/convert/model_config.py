"""Typed access to config.json and the like: an error names every missing or malformed key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

from specops.models.errors import ExportError

_MAX_LAYERS = 1_000  # published decoders have up to 126
_BEYOND = 1 << 40  # above every size of a model; Python's integers have no limit, NumPy's have one
_MAX_DIGITS = 9  # of a layer's number
_LARGEST = 1e30  # float32 can hold it, with room for products

_T = TypeVar("_T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that define its KV cache and its graph inputs.

    `context_length` is in tokens: the number of rows of the rotary table or of the table of learned
    positions.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int


class Entries:
    """The entries of a file, read key by key; null means the same as an absent key.

    Every method raises ExportError for a value of the wrong type, and for a missing key without a
    default.
    """

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._file = file

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._values

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if not _is_number(value):
            raise self.error(key, f"must be a positive number, is {short(value)}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {short(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {short(value)}")
        return value

    def error(self, key: str, problem: str) -> ExportError:
        """An error that names the file and the key."""
        return ExportError(f"{self._file}: key '{self._name(key)}' {problem}")

    def warn(self, key: str, problem: str) -> None:
        """Log a problem of a key that the export can do without."""
        log.warning("%s: key '%s' %s", self._file, self._name(key), problem)

    def _name(self, key: str) -> str:
        """The name of a key in errors."""
        return key

    def _key(self, key: str) -> str:
        """The name of a key in the file."""
        return key

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(self._key(key), default)
        if value is None:
            raise self.error(key, "is missing, and the export needs it")
        return value


class ModelConfig(Entries):
    """A config.json, or an object inside it.

    Args:
        values: of the file.
        file: its path, for errors.
        prefix: of a section's keys, for errors.
    """

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        super().__init__(values, file)
        self._prefix = prefix

    def with_defaults(self, defaults: Mapping[str, Any]) -> ModelConfig:
        """The same config with values for absent keys."""
        return ModelConfig({**defaults, **self._values}, self._file, self._prefix)

    def replaced(self, **values: Any) -> ModelConfig:
        """The same config with other values."""
        return ModelConfig({**self._values, **values}, self._file, self._prefix)

    def without(self, key: str) -> ModelConfig:
        """The same config without a key."""
        values = {name: value for name, value in self._values.items() if name != key}
        return ModelConfig(values, self._file, self._prefix)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2^40."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _BEYOND:
            raise self.error(key, f"must be a positive integer, is {short(value)}")
        return value

    def factor(self, key: str) -> float | None:
        """A positive number; None where the key is absent or 0."""
        return self.number(key) if self._values.get(key) not in (None, 0) else None

    def count(self, key: str) -> int:
        """An integer from 0; 0 where it is absent."""
        return self.integer(key) if self._values.get(key) else 0

    def layers(self, key: str) -> int:
        """The number of layers; the limit keeps a hostile config from a list without end."""
        value = self.integer(key)
        if value > _MAX_LAYERS:
            raise self.error(key, f"is {value}; more than {_MAX_LAYERS} cannot be exported")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` positive numbers."""
        values = self._get(key)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
            raise self.error(key, f"must be {count} positive numbers")
        return list(values)

    def list_of(self, kind: type[_T], key: str, count: int | None = None) -> list[_T] | None:
        """The first `count` of a list of integers or strings, or all; None where it is absent.

        Args:
            kind: `int` or `str`.
            key: of the list.
            count: items to read; None: all.
        """
        called = {int: "integers", str: "strings"}[kind]
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) < (count or 0):
            raise self.error(key, f"must be {count or 'a list of'} {called}")
        if not all(isinstance(value, kind) for value in values):
            raise self.error(key, f"must be {called}")
        return values[:count]

    def require(self, key: str, *allowed: Any) -> None:
        """An error unless the key is absent or has one of these values."""
        if key in self and (value := self._get(key)) not in allowed:
            raise self.error(key, f"is {short(value)}; it must be {allowed[0]} or absent")

    def require_flag(self, key: str, needed: bool) -> None:
        """An error unless the key is absent or the boolean that an export needs."""
        if self.flag(key, needed) != needed:
            raise self.error(key, f"must be {str(needed).lower()} to be exported for this family")

    def first_text(self, key: str) -> str | None:
        """The first of a list of strings; None where the key is absent or the list is empty."""
        values = self._values.get(key)
        if not values:
            return None
        if not isinstance(values, list) or not isinstance(values[0], str):
            raise self.error(key, f"must be a list of names, is {values!r}")
        return values[0]

    def section(self, key: str) -> ModelConfig | None:
        """An object inside the config; None where the key is absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {value!r}")
        return ModelConfig(value, self._file, f"{self._prefix}{key}.")

    def numbered(self, key: str) -> dict[int, ModelConfig] | None:
        """Objects by the numbers that name them, such as `05`; None where the key is absent."""
        if (objects := self.section(key)) is None:
            return None
        found: dict[int, ModelConfig] = {}
        for name in objects._values:
            if not name.isdecimal() or len(name) > _MAX_DIGITS:
                raise self.error(key, f"must have numbers as keys, has {short(name)}")
            if (part := objects.section(name)) is not None:
                found[int(name)] = part
        return found

    def _name(self, key: str) -> str:
        return self._prefix + key


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _LARGEST
