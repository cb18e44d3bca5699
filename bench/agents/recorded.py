"""Recorded requests of coding agents: Claude Code, opencode and Codex, from their npm packages.

A file has the structure of the requests, but none of the agent's prose: lines of 24 characters or
more in prompts and descriptions are replaced by their length and a digest (`§88.5f0a`). Reading
turns these into our own words of that length. Equal lines stay equal and different lines different
in all requests, so that common prefixes stay common. Names of tools and parameters are kept; paths
and accounts are replaced.
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
    """Requests of one agent, in the order of sending.

    Attributes:
        agent: its name and version.
        path: path of the endpoint.
        requests: the bodies, by a description such as "after a tool".
    """

    agent: str
    path: str
    requests: Mapping[str, dict[str, Any]]


def load(path: Path) -> Recording:
    """Read a file: it has the whole first request, and the fields in which others differ."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    first = next(iter(kept["requests"].values()))
    requests = {name: expanded(first | own) for name, own in kept["requests"].items()}
    return Recording(kept["agent"], kept["path"], requests)


def expanded(body: dict[str, Any]) -> dict[str, Any]:
    """Return a shortened body with words in place of the removed lines."""
    longer: dict[str, Any] = _mapped(body, lambda text: _SHORT.sub(_words, text))
    return longer


def _mapped(value: Any, change: Callable[[str], str], *, prose: bool = False) -> Any:
    """Return JSON with every string of a prompt or description changed."""
    if isinstance(value, str):
        return change(value) if prose else value
    if isinstance(value, list):
        return [_mapped(item, change, prose=prose) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change, prose=key in _PROSE) for key, item in value.items()}
    return value


def _words(found: re.Match[str]) -> str:
    """Return words with the length of a removed line, always the same."""
    length, rng = int(found[1]), random.Random(found[2])
    text = found[2]  # makes the line unique
    while len(text) < length:
        text += " " + rng.choice(_WORDS)
    return text[:length]
