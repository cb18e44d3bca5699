"""Weights in the form that this machine's kernels use, kept on disk so that they can be mapped.

A prepacked graph fits one processor and one version of ONNX Runtime. It is a cache: named after
both and the graph it was made from, checked against its own digest at every start, and made again
when anything differs. Checking it reads it once from front to back, which is also what brings it
into the page cache before the first request needs it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess  # nosec B404: runs only our own module
import sys
from collections.abc import Callable
from pathlib import Path

from specops import session

log = logging.getLogger(__name__)

_FORMAT = 1  # counts up when `prepack` writes something else than before
_GRAPH = "model.onnx"
_MANIFEST = "prepacked.json"
_PIECE = 16 << 20
_CPUINFO = Path("/proc/cpuinfo")


def prepacked_graph(
    graph: Path, name: str, cache_dir: Path, report: Callable[[str], None]
) -> Path | None:
    """Find a graph's prepacked form, or make it.

    Args:
        graph: the graph as it was exported.
        name: the model's name, first part of the folder's.
        cache_dir: where prepacked graphs are kept.
        report: told what takes time.

    Returns:
        The prepacked graph, its weights read ahead; None where none could be made: the disk is
        full or read-only, or memory ran out. The reason is logged; the graph itself still works.
    """
    folder = cache_dir / "prepacked" / f"{name}-{_key(graph)}"
    if folder.exists():
        report(f"reading {folder}")
        if _intact(folder):
            return folder / _GRAPH
        log.warning("%s is damaged and is made again", folder)
    report(f"laying out the weights of {name} for this processor")
    try:
        _make(graph, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning(
            "weights are copied into memory, none could be prepacked: %s", str(reason).strip()
        )
        return None
    return folder / _GRAPH


def _key(graph: Path) -> str:
    """Differs where the graph, the processor, ONNX Runtime or the format does."""
    digest = hashlib.sha256(f"{_FORMAT}\0{session.VERSION}\0{_processor()}\0".encode())
    digest.update(graph.read_bytes())  # a few hundred kilobytes: the weights lie beside it
    for path in sorted(graph.parent.glob(f"{graph.name}*")):
        status = path.stat()
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What ONNX Runtime chooses its kernels by."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return "unknown"
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _digests(folder: Path) -> dict[str, str]:
    """Digest per file. Reads them whole, in order."""
    found = {}
    for path in sorted(folder.glob(f"{_GRAPH}*")):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        found[path.name] = digest.hexdigest()
    return found


def _intact(folder: Path) -> bool:
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(expected) and _digests(folder) == expected


def _make(graph: Path, folder: Path) -> None:
    """Prepack in a process of its own, whose memory goes back; the folder appears when complete."""
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        subprocess.run(  # noqa: S603 # nosec B603: our own module, paths as arguments
            [sys.executable, "-m", "specops.models.prepack", str(graph), str(temporary / _GRAPH)],
            capture_output=True,
            text=True,
            check=True,
        )
        manifest = json.dumps(_digests(temporary), indent=2)
        (temporary / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
