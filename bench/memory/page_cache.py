"""Puts weights out of the page cache, so that the next start reads them from the disk.

Where a file lies in memory depends on which process read it and on other uses of memory since:
with the same file TinyLlama's shape made 59 tokens per second and, half an hour later, 42. A start
from the disk can be repeated.
"""

from pathlib import Path

from specops.system.page_cache import forget


def evict(folder: Path) -> None:
    """Put every file below a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            forget(path)
