"""Reads the names of files with weights: whether one is a GGUF, and which shards belong to it.

Both the service and the converter use this; they import nothing else of each other's.
"""

import re
from pathlib import Path

from specops.models.errors import ModelError
from specops.models.paths import path_inside

SUFFIX = ".gguf"
OWN_WEIGHTS = "gguf"
"""The name of a GGUF's weights, whatever their format."""
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>(?!0{5})\d{5})(?P<suffix>\.\w+)")


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF's, by its name."""
    return path.suffix == SUFFIX and not path.is_dir()


def shards_of(name: str) -> list[str]:
    """Return the names of all shards in order; `name` is one of them, or of a file that is whole.

    Safetensors and torch's files are numbered like a GGUF's.
    """
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return [name]
    count = shard["count"]
    return [
        f"{shard['stem']}-{one:05d}-of-{count}{shard['suffix']}" for one in range(1, int(count) + 1)
    ]


def files_of(path: Path) -> tuple[Path, ...]:
    """Return all files of a GGUF in order; `path` is one of them.

    Raises:
        ModelError: a file is missing, or a shard is a link that leads out of the folder.
    """
    names = shards_of(path.name)
    try:  # a single file that a person named may be a link to anywhere
        files = (
            (path,) if len(names) == 1 else tuple(path_inside(path.parent, name) for name in names)
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    for file in files:
        if not file.is_file():
            others = f": all {len(files)} shards must be in one folder" if len(files) > 1 else ""
            raise ModelError(f"{file} is missing{others}")
    return files
