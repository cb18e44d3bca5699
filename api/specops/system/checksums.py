"""Checksums of files that were written to be kept: what they find is damage, not malice.

Whoever can write the files can write their checksums too. So XXH3, which is no slower than reading,
where SHA-256 took three times as long on two processors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from specops.system.page_cache import drop, read_ahead

CHECKSUMS = "checksums.json"
_PIECE = 4 << 20  # bytes read at a time, whole large pages


def write_checksums(folder: Path) -> None:
    """Put those of all files in a folder beside them.

    Raises:
        OSError: a file cannot be read, or the folder cannot be written.
    """
    found = checksums(sorted(folder.iterdir()))
    (folder / CHECKSUMS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """What `write_checksums` wrote.

    Raises:
        OSError, ValueError: it is missing or damaged.
    """
    found = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    if not found or not isinstance(found, dict):
        raise ValueError(f"{folder / CHECKSUMS} lists no files")
    return found


def checksums(
    paths: Iterable[Path], room: int = 0, tell: Callable[[int], None] = lambda done: None
) -> dict[str, str]:
    """The checksum of every file by its name, read in order.

    Args:
        paths: of the files.
        room: bytes that may stay in the page cache, brought there as `read_ahead` does it; what
            lies beyond them leaves it again.
        tell: told the bytes that were read.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[str, str] = {}
    done, buffer = 0, memoryview(bytearray(_PIECE))
    for path in paths:
        digest, start = xxhash.xxh3_128(), 0
        with path.open("rb", buffering=0) as file:
            while True:
                stays = max(0, room - done)
                read_ahead(file.fileno(), start, min(stays, _PIECE))
                if not (size := file.readinto(buffer)):
                    break
                tell(done)
                digest.update(buffer[:size])
                if stays < size:  # a length of 0 would mean the whole file
                    drop(file.fileno(), start + stays, size - stays)
                done += size
                start += size
        found[path.name] = digest.hexdigest()
    return found
