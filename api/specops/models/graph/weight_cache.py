"""Keeps weights on disk in the form that this machine's kernels use, so that they can be mapped.

A prepacked graph fits one processor and one version of ONNX Runtime. It is a cache: its name has a
digest of both and of the graph it was made from; `specops.system.generations` says how long others
of the same model stay. Every start compares it with its checksums and makes it again if anything
differs. This check reads the files once from front to back, which also brings them into the page
cache before the first request needs them. What kernels use comes first in the file. Then come the
originals of packed weights, which no pass reads, and tables, of which a pass reads a few rows. The
check drops these from memory at once, as well as what the memory cap has no room for, so that they
push nothing else out.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path

from specops.models.child import ChildError, run_module
from specops.models.contract import MANIFEST, USED
from specops.models.errors import ModelError
from specops.models.progress import every
from specops.runtime import session
from specops.system.checksums import CHECKSUMS, checksums
from specops.system.folders import atomic_folder, clear_leftovers, locked
from specops.system.generations import outdated, remove, sweep, use
from specops.system.memory import page_cache_room
from specops.system.page_cache import forget

log = logging.getLogger(__name__)

_FORMAT = 19  # counts up when the files written here or by `prepack` change
_GRAPH = "model.onnx"
_MANIFEST = "prepacked.json"
_REPORT_SECONDS = 1.0
_CPUINFO = Path("/proc/cpuinfo")


def prepacked_graph(
    graph: Path,
    name: str,
    cache_dir: Path,
    report: Callable[[str], None],
    *,
    states: Sequence[int] = (),
    mtp: Path | None = None,
) -> Path:
    """Find the form of a graph that the engine runs, or make it.

    Args:
        graph: the graph as it was exported.
        name: the model's name, the first part of the folder's name.
        cache_dir: the folder for prepacked graphs.
        report: called with each slow step.
        states: layers whose inputs a draft head reads: another graph than the one without.
        mtp: the graph of the model's MTP block, which is prepacked into the same folder.

    Returns:
        The prepacked graph; its weights are in the page cache.

    Raises:
        ModelError: the graph cannot be prepacked: the engine does not understand it, the disk is
            full or read-only, or memory ran out. The message is one line that says what to do.
    """
    root, key = cache_dir / "prepacked", graph_key(graph, states, mtp)
    try:
        # Replicas that start together read at the same time, so this takes no lock.
        if folder := _found(root, key):
            use(folder)  # first, so that no other process takes it for unused
            if _intact(folder, report):
                sweep(root, lambda root: outdated(_generations(root, name)))
                return folder / _GRAPH
        waiting = f"waiting for another process that writes in {root}"
        with locked(root, lambda: report(waiting)) as lock:
            if folder := _found(root, key):
                if _intact(folder, report):  # another process has made it meanwhile
                    use(folder)
                    return folder / _GRAPH
                log.warning("%s is damaged: making it again", folder)
            clear_leftovers(root)
            remove(outdated(_generations(root, name)))
            report(f"laying out the weights of {name} for this processor")
            made = _make(graph, folder or root / f"{name}-{key}", lock, states, mtp)
            use(made.parent)
            return made
    except OSError as error:
        raise ModelError(
            f"{error.filename or root} cannot be written ({error.strerror}), and the weights of "
            f"{name} are laid out there for this processor: set SPECOPS_CACHE_DIR to a writable "
            "folder with room for the weights"
        ) from error


def _found(root: Path, key: str) -> Path | None:
    """Return a graph's folder; its name may begin with another model's that has the same graph."""
    return next((path for path in root.glob(f"*-{key}") if path.is_dir()), None)


def graph_key(graph: Path, states: Sequence[int] = (), mtp: Path | None = None) -> str:
    """Return a key that differs if the graph, the processor, ONNX Runtime or the format does.

    An export has a manifest with a digest of its source, and checksums of its files. So copies of
    an export have the same key, whenever they were made. For a graph without a manifest its path
    counts, for one without checksums the sizes and times of its files.

    Args:
        graph: the file.
        states: layers whose states a draft head reads.
        mtp: graph of the MTP block; None: it has none.
    """
    digest = hashlib.sha256(f"{_FORMAT}\0{session.VERSION}\0{_processor()}\0".encode())
    digest.update("".join(f"{layer}\0" for layer in states).encode())
    if mtp is not None:
        digest.update(mtp.read_bytes())
    digest.update(graph.read_bytes())  # a few hundred kilobytes, without the weights
    manifest = graph.with_name(MANIFEST)
    digest.update(
        manifest.read_bytes() if manifest.is_file() else str(graph.resolve()).encode() + b"\0"
    )
    written = graph.with_name(CHECKSUMS)
    if known := written.is_file():
        digest.update(written.read_bytes())
    for path in sorted(graph.parent.glob(f"{graph.name}*")):
        status = path.stat()
        time = 0 if known else status.st_mtime_ns
        digest.update(f"{path.name}\0{status.st_size}\0{time}\0".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return the processor's properties by which ONNX Runtime chooses its kernels."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return "unknown"
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _intact(folder: Path, report: Callable[[str], None]) -> bool:
    """Read a prepacked graph whole, compare its checksums and report how far that is."""
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        used = used_bytes(folder)
    except (OSError, ValueError):
        return False
    total, room = sum(path.stat().st_size for path in _files(folder)), page_cache_room()
    if room < used:
        log.warning(
            "%s has %.0f MB of weights in use and memory has room for %.0f: the rest is read from "
            "disk for every token; raise the memory limit, or use smaller weights",
            *(folder, used / 1e6, room / 1e6),
        )
    due = every(_REPORT_SECONDS, at_once=True)

    def tell(done: int) -> None:
        if due():
            report(f"reading {folder}: {100 * done // max(total, 1)} %")

    try:
        return bool(expected) and checksums(_files(folder), min(room, used), tell) == expected
    except OSError:  # another process removed it, or the disk is failing
        return False


def used_bytes(folder: Path) -> int:
    """Return how many bytes of a prepacked graph's folder should be in the page cache.

    Raises:
        OSError, ValueError: the file with the number is missing or damaged.
    """
    return (folder / _GRAPH).stat().st_size + int((folder / USED).read_text(encoding="ascii"))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.onnx*"))


def _generations(root: Path, name: str) -> list[Path]:
    """Return the prepacked graphs of a name, for whatever processor and version of the service."""
    return [path for path in root.glob(f"{escape(name)}-*") if len(path.name) == len(name) + 17]


def _make(graph: Path, folder: Path, lock: int, states: Sequence[int], mtp: Path | None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one; its room on the disk is needed
    with atomic_folder(folder) as temporary:
        _prepack(graph, temporary / _GRAPH, lock, states, mtp)
        for path in _files(temporary):
            forget(path)  # the checksums read it again from the disk: see `read_ahead`
        kept = min(page_cache_room(), used_bytes(temporary))
        manifest = json.dumps(checksums(_files(temporary), kept), indent=2)
        (temporary / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")
    return folder / _GRAPH


def _prepack(
    graph: Path, destination: Path, lock: int, states: Sequence[int], mtp: Path | None
) -> None:
    module = "specops.models.graph.prepack"
    options = ["--states", *map(str, states)] if states else []
    options += ["--mtp", str(mtp)] if mtp else []
    try:
        run_module(module, str(graph), str(destination), *options, lock=lock)
    except ChildError as error:
        said = str(error).splitlines()[-1]
        start = f"laying out the weights of {graph}: " if error.killed else ""
        raise ModelError(start + said) from error
