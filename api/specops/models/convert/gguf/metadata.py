"""Metadata of a GGUF, read key by key: what is missing or odd is an error that names it."""

from __future__ import annotations

from typing import Any

from specops.models.convert.errors import ExportError
from specops.models.convert.gguf.header import Header


class Metadata:
    """The entries of a header; `{arch}` in a key stands for the file's architecture."""

    def __init__(self, header: Header) -> None:
        self._file = header.file
        self._values = header.metadata
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self._values

    def raw(self, key: str) -> Any:
        """The value of a key that is there."""
        return self._values[self._name(key)]

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer from 0; `default` where there is none."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # of every layer
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"must be an integer from 0, is {_short(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer from 0; None where there is none."""
        return self.integer(key) if key in self else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number; `default` where there is none."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(key, f"must be a positive number, is {_short(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where there is none."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {_short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text; `default` where there is none."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, is {_short(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int]:
        """A list of integers."""
        return self._list(key, int)

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        return self._list(key, float)

    def error(self, key: str, problem: str) -> ExportError:
        """An error that names the file and the key."""
        return ExportError(f"{self._file}: key '{self._name(key)}' {problem}")

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(key, f"must be a list of {kind.__name__}, is {_short(value)}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._name(key), default)
        if value is None:
            raise self.error(key, "is missing, and the export cannot do without it")
        return value

    def _name(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key


def _short(value: Any) -> str:
    text = repr(value[:4] if isinstance(value, list | str) else value)
    return text if len(text) < 80 else text[:77] + "..."
