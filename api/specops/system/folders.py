"""Folders that several processes use: one process writes at a time, and folders appear whole."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[int]:
    """Lock `folder`, which is made if missing; other processes wait for the lock.

    `waiting` is called once if this process has to wait. Yields the handle of the lock: a child
    process that gets it keeps the lock if this process is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


@contextmanager
def folder_at_once(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `destination` when the block ends without an error.

    After an error nothing is left. The remains of a killed process are removed by the next process
    with the same destination, or by `clear_leftovers`.

    Raises:
        BlockingIOError: another process is writing the folder.
        OSError: the folder cannot be written.
    """
    partial = destination.with_name(f".{destination.name}.partial")

    def refuse() -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing it", str(partial))

    with locked(partial, refuse) as handle:
        # The other process may have renamed the folder before this one had the lock.
        if not (partial.exists() and partial.stat().st_ino == os.fstat(handle).st_ino):
            refuse()
        for file in partial.iterdir():
            file.unlink()
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                _sync(path)
            _replace(destination, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def clear_leftovers(root: Path) -> None:
    """Remove the hidden folders that killed processes left in a folder locked by this process."""
    for folder in sorted(root.glob(".*")):
        if folder.is_dir():
            log.info("removing %s, which an interrupted process left", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _replace(destination: Path, partial: Path) -> None:
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    partial.rename(destination)
    _sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
