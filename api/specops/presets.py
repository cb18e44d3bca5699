"""The models that can be asked for by name, as presets.toml describes them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("presets.toml")


@dataclass(frozen=True, slots=True)
class Preset:
    """Which models belong together and how they fit a small machine.

    Attributes:
        about: what it is, for the table in the README.
        target, draft: see presets.toml; a draft may be `none`.
        quant, draft_quant: the weights they are wanted in.
        settings: defaults of settings, by their names in lower case.
    """

    about: str
    target: str
    draft: str
    quant: str
    draft_quant: str
    settings: dict[str, int | str] = field(default_factory=dict)


@cache
def presets() -> dict[str, Preset]:
    """Every preset by its name."""
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Preset(**entry) for name, entry in table.items()}
