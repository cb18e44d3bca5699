"""What a GGUF's name says: that it is one, and of which shards.

Both sides of the wall between the service and the converter need it.
"""

from __future__ import annotations

import re
from pathlib import Path

from specops.models.inside import inside

SUFFIX = ".gguf"
OWN_WEIGHTS = "gguf"
"""The quantization of a GGUF, whichever its blocks are."""
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>(?!0{5})\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF's, going by its name."""
    return path.suffix == SUFFIX and not path.is_dir()


def shards_of(name: str) -> list[str]:
    """The names of a GGUF's files in order, of which one is known."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return [name]
    count = found["count"]
    return [f"{found['stem']}-{one:05d}-of-{count}{SUFFIX}" for one in range(1, int(count) + 1)]


def files_of(path: Path) -> tuple[Path, ...]:
    """A GGUF's files in order, of which one is known; FileNotFoundError where one is missing."""
    names = shards_of(path.name)
    try:  # the file that a person named may be a link to anywhere, unless it leads to others
        files = (path,) if len(names) == 1 else tuple(inside(path.parent, name) for name in names)
    except ValueError as error:
        raise FileNotFoundError(str(error)) from error
    for file in files:
        if not file.is_file():
            others = f": all {len(files)} lie beside each other" if len(files) > 1 else ""
            raise FileNotFoundError(f"{file} is missing{others}")
    return files
