"""Reads files into the page cache in large pages.

A pass over the weights reads hundreds of megabytes. With pages of 4 KiB, address translation takes
much of the time; with pages of 2 MiB, one entry covers 512 times as many bytes. The kernel makes
large pages when it reads a file from disk for a mapping that requests them. It makes none for data
that a program writes, and does not change pages that are already in memory.
"""

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

_LARGE_PAGE = 2 << 20
# MADV_POPULATE_READ of Linux 5.14, which `mmap` does not name; the next best on other systems.
_POPULATE_READ = 22 if sys.platform == "linux" else mmap.MADV_WILLNEED


def read_ahead(file: int, start: int, size: int) -> None:
    """Ask the kernel to read a part of a file into large pages.

    Failures are not reported: whoever reads the file then gets its content or the error.

    Args:
        file: descriptor of a file that is open for reading.
        start: first byte, a multiple of the page size.
        size: number of bytes; the file may end earlier.
    """
    size = min(size, os.fstat(file).st_size - start)
    if size <= 0:
        return
    with (
        suppress(OSError, ValueError),  # an old kernel, a file system without mappings
        mmap.mmap(file, size, prot=mmap.PROT_READ, offset=start) as mapped,
    ):
        ask_large_pages(mapped)
        # One small page in each large one: the kernel reads all of the large page.
        for offset in range(0, size, _LARGE_PAGE):
            mapped.madvise(_POPULATE_READ, offset, mmap.PAGESIZE)


def ask_large_pages(mapped: mmap.mmap) -> None:
    """Allow large pages for a mapping, if the system has them."""
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # a kernel without large pages
            mapped.madvise(advice)


def drop(file: int, start: int = 0, size: int = 0) -> None:
    """Drop a part of a file from the page cache, if the system can.

    Args:
        file: the file's descriptor.
        start: first byte.
        size: number of bytes; 0: to the end.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


def forget(path: Path) -> None:
    """Write a file's pages to disk and drop them from the page cache; mapped pages stay.

    Raises:
        OSError: the file cannot be written to the disk.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        drop(file.fileno())
