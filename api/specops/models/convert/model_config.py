"""Typed access to config.json and the like: a missing or odd key is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from specops.models.convert.errors import ExportError

_MOST_LAYERS = 1_000  # published decoders have up to 126
_BEYOND = 1 << 40  # no size of a model is; Python's integers have no end, but NumPy's have
_LARGEST = 1e30  # which float32 can hold, with room for products


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that its KV cache and its graph inputs follow from.

    `context_length` is in tokens: the rows of the rotary table, or of that of the learned
    positions, so no position beyond it exists.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int


class Entries:
    """What a file says, read key by key."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self._values = values
        self._file = file

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; `default` where there is none."""
        value = self._get(key, default)
        if not _is_number(value):
            raise self.error(key, f"must be a positive number, is {short(value)}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` where there is none."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {short(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; `default` where there is none."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {short(value)}")
        return value

    def error(self, key: str, problem: str) -> ExportError:
        """An error that names the file and the key."""
        return ExportError(f"{self._file}: key '{self._name(key)}' {problem}")

    def _name(self, key: str) -> str:
        """What the file calls a key."""
        return key

    def _find(self, key: str) -> Any:
        """The value of a key; None where it is absent or null."""
        return self._values.get(key)

    def _get(self, key: str, default: Any) -> Any:
        value = self._find(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing, and the export cannot do without it")
        return value


class ModelConfig(Entries):
    """A config.json, or a dict inside it; null is as good as an absent key."""

    def __init__(self, values: dict[str, Any], file: Path, prefix: str = "") -> None:
        super().__init__(values, file)
        self._prefix = prefix

    def with_defaults(self, defaults: Mapping[str, Any]) -> ModelConfig:
        """The same with values for keys that are absent or null."""
        given = {key: value for key, value in self._values.items() if value is not None}
        return ModelConfig({**defaults, **given}, self._file, self._prefix)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2^40; `default` where there is none."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _BEYOND:
            raise self.error(key, f"must be a positive integer, is {short(value)}")
        return value

    def layers(self, key: str) -> int:
        """How many layers there are: a number whose layers can be listed one by one."""
        value = self.integer(key)
        if value > _MOST_LAYERS:
            raise self.error(key, f"is {value}; more than {_MOST_LAYERS} cannot be exported")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer; None where the key is absent or null."""
        return None if self._values.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        """A positive number; None where the key is absent or null."""
        return None if self._values.get(key) is None else self.number(key)

    def numbers(self, key: str, count: int) -> list[float]:
        """`count` positive numbers."""
        values = self._get(key, None)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
            raise self.error(key, f"must be {count} positive numbers")
        return list(values)

    def integers(self, key: str, count: int) -> list[int] | None:
        """The first `count` of a list of integers; None where the key is absent or null."""
        return self._list(key, count, int, "integers")

    def texts(self, key: str, count: int) -> list[str] | None:
        """The first `count` of a list of strings; None where the key is absent or null."""
        return self._list(key, count, str, "strings")

    def require_flag(self, key: str, needed: bool) -> None:
        """An error unless the key is absent, null or the boolean that an export needs."""
        if self.flag(key, needed) != needed:
            raise self.error(key, f"must be {str(needed).lower()} to be exported for this family")

    def first_text(self, key: str) -> str | None:
        """The first of a list of strings; None where the key is absent, null or empty."""
        values = self._values.get(key)
        if not values:
            return None
        if not isinstance(values, list) or not isinstance(values[0], str):
            raise self.error(key, f"must be a list of names, is {values!r}")
        return values[0]

    def section(self, key: str) -> ModelConfig | None:
        """An object inside the config; None where the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {value!r}")
        return ModelConfig(value, self._file, f"{self._prefix}{key}.")

    def _list(self, key: str, count: int, kind: type, called: str) -> list[Any] | None:
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) < count:
            raise self.error(key, f"must be {count} {called}")
        if not all(isinstance(value, kind) for value in values):
            raise self.error(key, f"must be {called}")
        return values[:count]

    def _name(self, key: str) -> str:
        return self._prefix + key


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _LARGEST
