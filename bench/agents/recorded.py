"""Recorded requests of agents: Claude Code, opencode and Codex, as their npm packages sent them.

A file keeps a request's parts, and none of its author's prose: of each line of a prompt or
description with 24 characters or more it keeps the length and a digest (`§88.5f0a`), and reading
puts words of our own with that length in its place. Equal lines stay equal and different ones
different, in every request, so that two requests agree as far as they did. Names of tools and of
their parameters are kept, paths and accounts are replaced.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "recorded"
_PROSE = frozenset({"content", "description", "input", "instructions", "output", "system", "text"})
_SHORT = re.compile(r"§(\d+)\.([0-9a-f]{8})")
_VOCABULARY = (
    "a all always an and answer any as ask at be before begin build by call can change check "
    "code command do each edit file find first folder for from give goes has here how if in "
    "into is it keep last line list look make may more must name never new no not of on one "
    "only open or other path plan read rest result run same say search see several small so "
    "some step task tell test text than that the them then there they this time to tool two "
    "under use user wait what when where which while who with word work write you your"
)
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests of one agent, in the order in which it sent them.

    Attributes:
        agent: its name and version.
        path: where it sent them.
        requests: by what each one is, the bodies.
    """

    agent: str
    path: str
    requests: Mapping[str, dict[str, Any]]


def load(path: Path) -> Recording:
    """Read a file: the first request, and of the others the fields that differ from it."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    first = next(iter(kept["requests"].values()))
    requests = {name: expanded(first | own) for name, own in kept["requests"].items()}
    return Recording(kept["agent"], kept["path"], requests)


def expanded(body: dict[str, Any]) -> dict[str, Any]:
    """Return a shortened body with words in place of the lines that were left out."""
    longer: dict[str, Any] = _mapped(body, lambda text: _SHORT.sub(_words, text))
    return longer


def _mapped(value: Any, change: Callable[[str], str], *, prose: bool = False) -> Any:
    """Return JSON with every text of a prompt or a description changed."""
    if isinstance(value, str):
        return change(value) if prose else value
    if isinstance(value, list):
        return [_mapped(item, change, prose=prose) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change, prose=key in _PROSE) for key, item in value.items()}
    return value


def _words(found: re.Match[str]) -> str:
    """Return words of the length of the line, the same ones each time."""
    length, rng = int(found[1]), random.Random(found[2])
    text = found[2]  # makes the line the only one of its kind
    while len(text) < length:
        text += " " + rng.choice(_WORDS)
    return text[:length]
