"""Locks and atomically replaces files and folders that several processes share."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[int]:
    """Lock `folder`, creating it if necessary; other processes wait for the lock.

    `waiting` is called once if this process has to wait. Yields the lock's handle: a child process
    that inherits it keeps the lock if this process is killed.

    Raises:
        OSError: the folder or its lock cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock_of(folder, waiting) as handle:
        yield handle


def link(source: Path, destination: Path) -> None:
    """Hard-link a file, or copy it if that is impossible, as on another volume.

    Raises:
        OSError: the file cannot be read or copied.
    """
    try:
        os.link(source.resolve(), destination)
    except OSError:
        shutil.copyfile(source, destination)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` when the block ends without an error.

    After an error nothing remains; a killed process leaves a hidden file.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def atomic_folder(destination: Path, manifest: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `destination` when the block ends without an error.

    After an error nothing remains. The next process with the same destination, or
    `clear_leftovers`, removes what a killed process left.

    Args:
        destination: the folder; if it is a link, its target.
        manifest: replace a folder only if it is empty or has this file; None: replace any.

    Raises:
        FileExistsError: `destination` must not be replaced; raised before the block.
        BlockingIOError: another process is writing the folder.
        OSError: the folder cannot be written.
    """
    destination = destination.resolve()
    if manifest is not None:
        _refuse_other(destination, manifest)
    partial = destination.with_name(f".{destination.name}.partial")

    def refuse() -> None:
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another process is writing it: wait for it to end", str(destination)
        )

    destination.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(destination, refuse):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                _sync(path)
            _replace(destination, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def clear_leftovers(root: Path) -> None:
    """Remove hidden entries left by killed processes; this process must have locked the folder."""
    for path in sorted(root.glob(".*")):
        log.info("removing %s, which an interrupted process left", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # NFS keeps a removed file under such a name while it is open
                path.unlink()


@contextmanager
def _lock_of(folder: Path, waiting: Callable[[], None] | None) -> Iterator[int]:
    """Lock a file next to `folder`, which need not exist; see `locked`.

    The lock is a file open for writing, because NFS locks nothing else across machines. It lies
    outside the folder, which may be replaced, listed and compared.
    """
    file = folder.with_name(f".{folder.name}.lock")
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    waiting()
                    waiting = None
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_open_as(file, handle):
                continue  # the process before this one has removed the file
            try:
                yield handle
            finally:
                with suppress(OSError):
                    file.unlink()  # before it is unlocked: waiting processes notice
            return
        finally:
            os.close(handle)


def _is_open_as(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _refuse_other(destination: Path, manifest: str) -> None:
    """Raise FileExistsError if `destination` holds anything that must not be replaced."""
    if not destination.exists():
        return
    problem = ""
    if Path.cwd().is_relative_to(destination):
        problem = "is the current folder, or the current folder lies in it: choose another one"
    elif not destination.is_dir() or (
        any(destination.iterdir()) and not (destination / manifest).is_file()
    ):
        problem = f"exists and was not written by this command (no {manifest}): choose another one"
    if problem:
        raise FileExistsError(errno.EEXIST, problem, str(destination))


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
