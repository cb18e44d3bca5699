"""The models that can be asked for by name, and which of them is served unasked."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

CHAT, DEMO = "smollm2", "demo"
_FILE = Path(__file__).with_name("presets.toml")


@dataclass(frozen=True, slots=True)
class Preset:
    """Which models belong together and how they fit a small machine.

    Attributes:
        about: what it is, for the table in the README.
        target, draft: see presets.toml; a draft may be `none`.
        quant, draft_quant: the weights they are wanted in; empty for a GGUF.
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


def in_environment(target: str) -> Path:
    """Where a target `share/…` lies: beside the package, in a clone's .venv as in the image."""
    return Path(sys.prefix, target)


def chat_model() -> Path:
    """The file of the preset `smollm2`, whether it is there or not."""
    return in_environment(presets()[CHAT].target)


def default_preset() -> str:
    """What is served where no preset is named: the chat model if it is there, else the demo."""
    return CHAT if chat_model().is_file() else DEMO
