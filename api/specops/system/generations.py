"""Removes outdated entries from a cache, which services of several versions may share.

A cache entry is named by its source and a format version. After an update the new version adds
its entry and leaves the old one, and a rolling update runs both for a while. So the two most
recently used entries always stay, and older ones go after a week without use. A file's or folder's
modification time records its last use.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from specops.system.folders import locked

log = logging.getLogger(__name__)

_KEPT = 2
_UNUSED_SECONDS = 7 * 24 * 3600.0
_TOUCH_SECONDS = 6 * 3600.0
_in_use: set[Path] = set()
_lock = threading.Lock()


def use(path: Path) -> None:
    """Record that this process uses a file or folder of a cache, as long as it runs.

    A service may run for weeks; removing its mapped weights from a network volume would break it.
    """
    _touch(path)
    with _lock:
        first = not _in_use
        _in_use.add(path)
    if first:
        threading.Thread(target=_touch_all, name="cache-in-use", daemon=True).start()


def outdated(paths: Collection[Path]) -> list[Path]:
    """Return the outdated among one entry's generations."""
    used = {path: _used(path) for path in paths}
    old = sorted(paths, key=lambda path: used[path], reverse=True)[_KEPT:]
    return [path for path in old if used[path] < time.time() - _UNUSED_SECONDS]


def remove(paths: Collection[Path]) -> None:
    """Remove the files and folders that `outdated` returned, as far as possible."""
    for path in paths:
        log.info("removing %s: it is outdated and has not been used for a week", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # another process removes it, or the cache is read-only
                path.unlink()


def sweep(root: Path, find: Callable[[Path], list[Path]]) -> None:
    """Remove what `find` finds in a folder, unless another process holds the folder's lock.

    Called at every start: entries too recent to remove when a new one was added go later.
    """

    def leave() -> None:
        raise BlockingIOError

    if find(root):
        with suppress(OSError), locked(root, leave):
            remove(find(root))


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removes it
        return 0.0


def _touch(path: Path) -> None:
    with suppress(OSError):  # nobody removes anything from a read-only cache
        os.utime(path)


def _touch_all() -> None:
    while True:
        time.sleep(_TOUCH_SECONDS)
        with _lock:
            paths = list(_in_use)
        for path in paths:
            _touch(path)
