"""Keeps conversions on disk: one for each content of a checkpoint, kind of weights and format.

A conversion is named by a digest of its source and by the converter's format version. So a
checkpoint under two paths is converted and stored once, for example a draft with the target's own
files. The digest reads every byte. It is kept with the files' sizes and times, and
computed again only when these change. Versions of the service that share a folder leave each
other's conversions alone: `specops.system.generations` says how long outdated ones stay.

A conversion is compared with its checksums before its first use after a boot of the machine, with
a new version of ONNX Runtime, and when a file has changed since. A damaged one is made again.

The process that converts holds a lock; another process waits and then finds the conversion. A
half-made folder under a free lock was left by a killed process.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from specops.models.contract import FORMAT_VERSION
from specops.models.layout import Parts
from specops.runtime import session
from specops.system.checksums import CHECKSUMS, checksums, read_checksums
from specops.system.folders import atomic_file, clear_leftovers, locked
from specops.system.generations import outdated, remove, sweep, use
from specops.text.files import TOKENIZER

log = logging.getLogger(__name__)

_SOURCES = "sources.json"  # path of a checkpoint → its files and their marks, its digest `sha256:…`
_VERIFIED = "verified"  # a file of a conversion: its marks when checksums were last compared
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"(?P<name>.+)-(?P<key>[0-9a-f]{16})-(?P<quant>fp32|int[48]-.+|gguf)")

_Source = tuple[str, str, list[str]]  # marks, digest, files
_UNKNOWN: _Source = ("", "", [])

Report = Callable[[str], None]
Convert = Callable[[Path, str, int], None]
"""Writes a conversion into a folder, with the source's digest, while a lock is held."""


def converted(
    root: Path,
    path: Path,
    parts: Parts,
    quant: str,
    *,
    name: str,
    check: Callable[[], object],
    convert: Convert,
    report: Report,
) -> Path:
    """Return the folder of a checkpoint's conversion; make it if need be.

    The weights of an unchanged checkpoint are mostly not read. Before a conversion is made, this
    removes what killed processes left; at every start, outdated conversions that nobody uses.

    Args:
        root: the folder of conversions.
        path: the checkpoint.
        parts: its files.
        quant: the kind of weights.
        name: how a new conversion's folder begins.
        check: called before weights that are not known yet are read; may raise.
        convert: makes the conversion.
        report: called with how far reading is, and when another process holds the lock.

    Raises:
        OSError: the checkpoint cannot be read or the folder cannot be written.
    """
    source, files = str(path.resolve()), [str(file.absolute()) for file in parts.files]
    seen, digest, _ = _sources(root).get(source, _UNKNOWN)
    if seen == _marks(files):
        folder = _folder(root, _key(digest), quant, name)
        use(folder)  # first, so that no other process takes it for unused
        if _intact(folder, report):
            sweep(root, _outdated)
            return folder

    def wait() -> None:
        report(f"waiting for another process that converts in {root}")

    with locked(root, wait) as lock:
        sources, now = _sources(root), _marks(files)
        seen, digest, _ = sources.get(source, _UNKNOWN)
        if seen != now:
            check()
            digest = parts.digest(lambda done: report(f"reading {path}: {done} %"))
            sources[source] = now, digest, files
            _write(root, sources)
        folder = _folder(root, _key(digest), quant, name)
        if folder.exists() and not _intact(folder, report):
            log.warning("%s is damaged: making it again", folder)
            shutil.rmtree(folder)
        if not folder.exists():
            clear_leftovers(root)
            remove(_outdated(root))
            convert(folder, digest, lock)
            _remember(folder)
        use(folder)
    return folder


def _folder(root: Path, key: str, quant: str, name: str) -> Path:
    """Return a conversion's folder; one that exists may begin with another name."""
    made = sorted(root.glob(f"[!.]*-{key}-{quant}"))
    return made[0] if made else root / f"{name}-{key}-{quant}"


def _key(digest: str) -> str:
    return hashlib.sha256(f"{FORMAT_VERSION}\0{digest}".encode()).hexdigest()[:16]


def _outdated(root: Path) -> list[Path]:
    """Return the conversions to remove: no known checkpoint leads to them, and nobody uses them.

    Conversions with the same name and kind of weights are generations of one thing.
    """
    known = {_key(digest) for _, digest, _ in _sources(root).values()}
    generations: dict[tuple[str, str], list[Path]] = defaultdict(list)
    current: set[Path] = set()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _NAME.fullmatch(folder.name):
            generations[match["name"], match["quant"]].append(folder)
            if match["key"] in known:
                current.add(folder)
    old = (outdated(folders) for folders in generations.values())
    return [folder for folders in old for folder in folders if folder not in current]


# -- known checkpoints -----------------------------------------------------------------------------


def source_files(conversion: Path) -> list[Path]:
    """Return the files that a conversion was made from, as long as they are unchanged."""
    for seen, digest, files in _sources(conversion.parent).values():
        if f"-{_key(digest)}-" in conversion.name:
            with suppress(OSError):
                if _marks(files) == seen:
                    return [Path(file) for file in files]
    return []


def _sources(root: Path) -> dict[str, _Source]:
    try:
        content = json.loads((root / _SOURCES).read_text(encoding="utf-8"))
        return {
            source: (known["seen"], known["digest"], known.get("files", []))
            for source, known in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a cache: the digests are computed again


def _write(root: Path, sources: dict[str, _Source]) -> None:
    content = {
        source: {"seen": seen, "digest": digest, "files": files}
        for source, (seen, digest, files) in sources.items()
    }
    with atomic_file(root / _SOURCES) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _marks(files: Iterable[str | Path]) -> str:
    """Return a digest that changes whenever a file is written, replaced or linked.

    A tokenizer.json does not count as changed by a link: conversions have links to it.
    """
    digest = hashlib.sha256()
    for file in files:
        status = os.stat(file)
        changed = 0 if Path(file).name == TOKENIZER else status.st_ctime_ns
        marks = (status.st_size, status.st_ino, status.st_mtime_ns, changed)
        digest.update(f"{file}\0{marks}\0".encode())
    return digest.hexdigest()


# -- whether a conversion is intact ----------------------------------------------------------------


def _intact(folder: Path, report: Report) -> bool:
    """Return whether a conversion is unchanged; read it whole if that is not known."""
    try:
        known = folder / _VERIFIED
        if known.is_file() and known.read_text(encoding="utf-8") == _verified(folder):
            return True
        expected = read_checksums(folder)
        report(f"checking {folder}")
        if checksums(folder / name for name in expected) != expected:
            return False
    except (OSError, ValueError):
        return False
    with suppress(OSError):  # a read-only cache is read again next time
        _remember(folder)
    return True


def _verified(folder: Path) -> str:
    """Return a digest that changes with the machine's boot, ONNX Runtime's version and any file."""
    boot = _BOOT.read_text(encoding="ascii") if _BOOT.is_file() else ""
    files = [folder / name for name in (*read_checksums(folder), CHECKSUMS)]
    return hashlib.sha256(f"{boot}\0{session.VERSION}\0{_marks(files)}".encode()).hexdigest()


def _remember(folder: Path) -> None:
    (folder / _VERIFIED).write_text(_verified(folder), encoding="utf-8")
