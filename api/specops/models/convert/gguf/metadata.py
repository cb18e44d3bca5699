"""Metadata of a GGUF, read key by key: what is missing or odd is an error that names it."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any, TypeVar

from specops.models.convert.gguf.header import Header
from specops.models.convert.model_config import Entries

_T = TypeVar("_T")


class Metadata(Entries):
    """The entries of a header; `{arch}` in a key stands for the file's architecture."""

    def __init__(self, header: Header) -> None:
        super().__init__(header.metadata, header.file)
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
            raise self.error(key, f"must be an integer from 0, is {short(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer from 0; None where there is none."""
        return self.integer(key) if key in self else None

    def listed(self, key: str, kind: type[_T]) -> list[_T]:
        """A list of texts, of integers or of numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(key, f"must be a list of {kind.__name__}, is {short(value)}")
        return value

    def _find(self, key: str) -> Any:
        return self._values.get(self._name(key))

    def _name(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key
