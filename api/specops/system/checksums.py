"""Computes checksums of cached files, which detect damage, not attacks.

An attacker who can write the files can also write their checksums. So XXH3 is enough: it is as fast
as reading, while SHA-256 took three times as long on two processors.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from specops.system.page_cache import drop, read_ahead

CHECKSUMS = "checksums.json"
_PIECE = 4 << 20  # bytes read at a time; a multiple of a large page


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder into a file next to them.

    Raises:
        OSError: a file cannot be read, or the folder cannot be written.
    """
    digests = checksums(sorted(folder.iterdir()))
    (folder / CHECKSUMS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums that `write_checksums` wrote.

    Raises:
        OSError, ValueError: the file is missing or damaged.
    """
    digests = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    if not digests or not isinstance(digests, dict):
        raise ValueError(f"{folder / CHECKSUMS} lists no files")
    return digests


def checksums(
    paths: Iterable[Path], room: int = 0, progress: Callable[[int], None] = lambda done: None
) -> dict[str, str]:
    """Read files in order; return each file's checksum by its name.

    Args:
        paths: the files.
        room: number of bytes that may stay in the page cache, where `read_ahead` puts them; later
            bytes are dropped from it.
        progress: called with the number of bytes read so far.

    Raises:
        OSError: a file cannot be read.
    """
    digests: dict[str, str] = {}
    done, buffer = 0, memoryview(bytearray(_PIECE))
    for path in paths:
        digest, start = xxhash.xxh3_128(), 0
        with path.open("rb", buffering=0) as file:
            while True:
                stays = max(0, room - done)
                read_ahead(file.fileno(), start, min(stays, _PIECE))
                if not (size := file.readinto(buffer)):
                    break
                progress(done)
                digest.update(buffer[:size])
                if stays < size:  # a length of 0 would mean the whole file
                    drop(file.fileno(), start + stays, size - stays)
                done += size
                start += size
        digests[path.name] = digest.hexdigest()
    return digests
