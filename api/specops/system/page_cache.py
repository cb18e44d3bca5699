"""Get files into the page cache in pieces as large as the processor can map at once.

A pass over the weights reads hundreds of megabytes. Where these lie in pages of 4 KiB, much of the
time goes to looking up where they are; where they lie in pieces of 2 MiB, a lookup covers 512 as
many. The kernel makes such pieces of what it reads from a disk for a mapping that asks for them,
not of what a program has written, and what is in memory once stays as it is.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

_LARGE_PAGE = 2 << 20
# MADV_POPULATE_READ, Linux 5.14; the module `mmap` has no name for it. Elsewhere the next best.
_POPULATE_READ = 22 if sys.platform == "linux" else mmap.MADV_WILLNEED


def read_ahead(file: int, start: int, size: int) -> None:
    """Have the kernel read a part of a file in large pieces, if it can.

    Nothing says whether it did: a reader of the file gets it either way, or the error.

    Args:
        file: a descriptor of a file that is open for reading.
        start: byte, a multiple of the page size.
        size: bytes; none are asked for beyond the end of the file.
    """
    size = min(size, os.fstat(file).st_size - start)
    if size <= 0:
        return
    with (
        suppress(OSError, ValueError),  # an old kernel, a file system without mappings
        mmap.mmap(file, size, prot=mmap.PROT_READ, offset=start) as mapped,
    ):
        ask_large_pages(mapped)
        # A page of each: the kernel reads all around it, and what it has is not mapped in vain.
        for place in range(0, size, _LARGE_PAGE):
            mapped.madvise(_POPULATE_READ, place, mmap.PAGESIZE)


def ask_large_pages(mapped: mmap.mmap) -> None:
    """Let a mapping have large pages, where the system knows of them."""
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # a kernel without large pages
            mapped.madvise(advice)


def drop(file: int, start: int = 0, size: int = 0) -> None:
    """Let a part of a file leave the page cache, where the system can be told; 0: to its end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


def forget(path: Path) -> None:
    """Let a file that was written leave the page cache; what others have mapped stays.

    Raises:
        OSError: it cannot be written to the disk.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        drop(file.fileno())
