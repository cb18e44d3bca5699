"""Reads the presets, which are models with settings under a name, and chooses the default."""

import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

CHAT, DEMO = "smollm2", "demo"
_FILE = Path(__file__).with_name("presets.toml")


@dataclass(frozen=True, slots=True)
class Preset:
    """A target, perhaps a draft, and settings that fit them to a small machine.

    Attributes:
        about: the remark in the table of docs/models.md.
        target, draft: see presets.toml.
        quant, draft_quant: their weight formats; empty for a GGUF.
        settings: defaults of settings, by their names in lower case.
    """

    about: str = ""
    target: str = ""
    draft: str = ""
    quant: str = "int4-128-mixed"
    draft_quant: str = "int8-128"
    settings: dict[str, int | str] = field(default_factory=dict)


@cache
def presets() -> dict[str, Preset]:
    """Return every preset by its name."""
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Preset(**entry) for name, entry in table.items()}


def in_environment(target: str) -> Path:
    """Return the path of a target `share/…`, in Python's environment."""
    return Path(sys.prefix, target)


def chat_model() -> Path:
    """Return the path of the preset `smollm2`'s file, which may not exist."""
    return in_environment(presets()[CHAT].target)


def default_preset() -> str:
    """Return the preset to serve if none is named: the chat model if it exists, else the demo."""
    return CHAT if chat_model().is_file() else DEMO
