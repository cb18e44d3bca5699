"""Weights in the form that this machine's kernels use, kept on disk so that they can be mapped.

A prepacked graph fits one processor and one version of ONNX Runtime. It is a cache: named after
both and the graph it was made from, checked against its own digests at every start, and made again
when anything differs. Checking it reads it once from front to back, which is also what brings it
into the page cache before the first request needs it. What kernels use comes first in the file,
then the originals of what was packed, which are not read again. Those, and what the memory cap has
no room for, are checked all the same, but let go of at once, so that they push nothing else out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import signal
import subprocess  # nosec B404: runs only our own module
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from specops.models.folder import MANIFEST, MEMORY_ADVICE, ModelError
from specops.runtime import session
from specops.system.checksums import checksums
from specops.system.folders import clear_leftovers, folder_at_once, locked
from specops.system.memory import page_cache_room
from specops.system.numa import interleaved
from specops.system.page_cache import forget

log = logging.getLogger(__name__)

_FORMAT = 11  # counts up when what is written here or by `prepack` changes
USED = "used"  # a file: how many bytes of the weights are read once the graph is loaded
_GRAPH = "model.onnx"
_MANIFEST = "prepacked.json"
_KEPT = 2  # prepacked graphs of one name: models of one name may take turns
_REPORT_SECONDS = 1.0
_CPUINFO = Path("/proc/cpuinfo")


def prepacked_graph(graph: Path, name: str, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Find the form of a graph that the engine runs, or make it.

    Args:
        graph: the graph as it was exported.
        name: the model's name, first part of the folder's.
        cache_dir: where prepacked graphs are kept.
        report: told what takes time.

    Returns:
        The prepacked graph, its weights read ahead.

    Raises:
        ModelError: it cannot be made: the graph is not understood, the disk is full or read-only,
            or memory ran out. The message is a line that says what to do.
    """
    root, key = cache_dir / "prepacked", graph_key(graph)
    damaged: int | None = None
    try:
        while True:
            # Read without the lock: replicas that start together read beside each other.
            folder = _found(root, key)
            if folder is not None:
                if _intact(folder, report):
                    with suppress(OSError):  # a cache that cannot be written needs no order
                        folder.touch()
                    return folder / _GRAPH
                damaged = _inode(folder)
            with locked(root, lambda: report(f"waiting for another process that writes in {root}")):
                folder = _found(root, key)
                if folder is None or _inode(folder) == damaged:
                    if folder is not None:
                        log.warning("%s is damaged and is made again", folder)
                    _clear(root, name)
                    report(f"laying out the weights of {name} for this processor")
                    return _make(graph, folder or root / f"{name}-{key}")
            # Another process made it meanwhile.
    except OSError as error:
        raise ModelError(
            f"{error.filename or root} cannot be written ({error.strerror}), and the weights of "
            f"{name} are laid out there for this processor: SPECOPS_CACHE_DIR takes a folder that "
            "can be written, with room for the weights"
        ) from error


def _found(root: Path, key: str) -> Path | None:
    """The folder of a graph: one, for a draft that is the target's own file too."""
    return next((path for path in root.glob(f"*-{key}") if path.is_dir()), None)


def _inode(folder: Path) -> int | None:
    """What tells a folder from another one that was made in its place."""
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None


def graph_key(graph: Path) -> str:
    """Differs where the graph, the processor, ONNX Runtime or the format does.

    An export's manifest names its source by digest, so copies of an export and links to it have
    the same key; of a graph without one the path counts.
    """
    digest = hashlib.sha256(f"{_FORMAT}\0{session.VERSION}\0{_processor()}\0".encode())
    digest.update(graph.read_bytes())  # a few hundred kilobytes: the weights lie beside it
    manifest = graph.with_name(MANIFEST)
    digest.update(
        manifest.read_bytes() if manifest.is_file() else str(graph.resolve()).encode() + b"\0"
    )
    for path in sorted(graph.parent.glob(f"{graph.name}*")):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What ONNX Runtime chooses its kernels by."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return "unknown"
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _intact(folder: Path, report: Callable[[str], None]) -> bool:
    """Read a prepacked graph whole and compare its digests; tells how far it is."""
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        used = used_bytes(folder)
    except (OSError, ValueError):
        return False
    total, room = sum(path.stat().st_size for path in _files(folder)), page_cache_room()
    if room < used:
        log.warning(
            "%s has %.0f MB of weights in use and memory has room for %.0f: the rest is read from "
            "disk for every token; raise the memory limit, or take smaller weights",
            *(folder, used / 1e6, room / 1e6),
        )
    kept, tell = min(room, used), _percents(folder, total, report)
    try:
        with interleaved():
            return bool(expected) and checksums(_files(folder), kept, tell) == expected
    except OSError:  # another process removed it, or the disk is failing
        return False


def used_bytes(folder: Path) -> int:
    """Bytes of a prepacked graph's folder that should be in the page cache.

    Raises:
        OSError, ValueError: the file that says so is missing or damaged.
    """
    return (folder / _GRAPH).stat().st_size + int((folder / USED).read_text(encoding="ascii"))


def _percents(folder: Path, total: int, report: Callable[[str], None]) -> Callable[[int], None]:
    """Passes on bytes read as a percentage, at once and then now and then."""
    told = float("-inf")

    def tell(done: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _REPORT_SECONDS:
            told = time.monotonic()
            report(f"reading {folder}: {100 * done // max(total, 1)} %")

    return tell


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_GRAPH}*"))


def _clear(root: Path, name: str) -> None:
    """Remove what killed attempts left, and the oldest of too many graphs of one name."""
    clear_leftovers(root)
    own = [path for path in root.glob(f"{escape(name)}-*") if len(path.name) == len(name) + 17]
    own.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for outdated in own[_KEPT - 1 :]:
        log.info("removing %s, which was made for another graph or runtime", outdated)
        shutil.rmtree(outdated, ignore_errors=True)


def _make(graph: Path, folder: Path) -> Path:
    """Prepack in a process of its own, whose memory goes back; the folder appears when complete."""
    shutil.rmtree(folder, ignore_errors=True)  # damaged: its room on the disk is wanted
    with folder_at_once(folder) as temporary:
        _prepack(graph, temporary / _GRAPH)
        for path in _files(temporary):
            forget(path)  # and read again, from the disk: see `read_ahead`
        kept = min(page_cache_room(), used_bytes(temporary))
        with interleaved():
            manifest = json.dumps(checksums(_files(temporary), kept), indent=2)
        (temporary / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")
    return folder / _GRAPH


def _prepack(graph: Path, destination: Path) -> None:
    """Run `specops.models.graph.prepack`; what it says last is what was wrong."""
    done = subprocess.run(  # noqa: S603 # nosec B603: our own module, paths as arguments
        [sys.executable, "-m", "specops.models.graph.prepack", str(graph), str(destination)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        ending = signal.Signals(-done.returncode).name
        raise ModelError(
            f"laying out the weights of {graph} was ended by {ending}, {MEMORY_ADVICE}"
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it does not say why"]
        raise ModelError(said[-1])
