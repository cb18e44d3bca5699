"""Conversions on disk: one per content of a checkpoint, kind of weights and version of the code.

They are named by a digest of what was converted, so the same checkpoint under two paths, a draft
that is the target's own files for one, is stored once. The digest takes reading every byte; it is
kept beside the files' sizes and times and taken again only when one of those has changed.

What was written is compared with its checksums before it is used, unless that was done since the
machine booted, for this version of ONNX Runtime, and nothing has touched a file since. A damaged
conversion is made again.

The process that converts holds a lock: another one waits and then finds the conversion there. A
half-made folder that is seen under the lock was left by a process that was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from specops.models.folder import MANIFEST
from specops.models.layout import Parts
from specops.runtime import session
from specops.system.checksums import CHECKSUMS, checksums, read_checksums
from specops.system.folders import clear_leftovers, locked

log = logging.getLogger(__name__)

_CODE = (
    "models/convert/**/*.py",
    *("models/layout.py", "models/state_dict.py", "models/sentencepiece.py"),
)
_SOURCES = "sources.json"
_VERIFIED = "verified"  # a file of a conversion: its marks when checksums were last compared
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r".+-(?P<key>[0-9a-f]{16})-(?:fp32|int[48]-.+|gguf)")
_PIECE = 4 << 20
_REPORT_SECONDS = 5.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Source:
    """What is remembered of a checkpoint: its files' sizes and times, and its digest, `sha256:…`.

    `seen` changes whenever a file is written, replaced or linked; the digest only with content.
    """

    seen: str
    digest: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """Where a conversion is, or is to be made."""

    folder: Path
    source_digest: str
    lock: int | None  # a handle, while the lock is held

    @property
    def exists(self) -> bool:
        """It is complete: the manifest's folder appears at once."""
        return (self.folder / MANIFEST).is_file()


class Conversions:
    """The conversions in a folder, made if need be."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._code = _code_digest()

    def find(self, path: Path, parts: Parts, quant: str, *, report: Report) -> Conversion | None:
        """The conversion of a checkpoint that has not changed since; mostly, reads no weights.

        Args:
            report: told when the conversion has to be read.
        """
        source = self._read().get(str(path.resolve()))
        if source is None or source.seen != _seen(parts.files):
            return None
        found = self._conversion(source.digest, quant, name="", lock=None)
        return found if found.exists and _intact(found.folder, report) else None

    @contextmanager
    def held(
        self, path: Path, parts: Parts, quant: str, *, name: str, report: Report
    ) -> Iterator[Conversion]:
        """Hold the lock over a conversion that may have to be made.

        Before one is, what killed processes left is removed, and so is every conversion that no
        known checkpoint leads to any more: the checkpoint has changed, or the converter.

        Args:
            name: how a new conversion's folder begins.
            report: told how far reading the checkpoint is, and when another process is at it.

        Raises:
            OSError: the checkpoint cannot be read or the folder cannot be written.
        """

        def wait() -> None:
            report(f"waiting for another process that converts in {self._root}")

        with locked(self._root, wait) as lock:
            sources, place, seen = self._read(), str(path.resolve()), _seen(parts.files)
            source = sources.get(place)
            if source is None or source.seen != seen:
                source = sources[place] = _Source(seen, _digest(path, parts, report))
                self._write(sources)
            conversion = self._conversion(source.digest, quant, name=name, lock=lock)
            if conversion.folder.exists() and not _intact(conversion.folder, report):
                log.warning("%s is damaged and is made again", conversion.folder)
                shutil.rmtree(conversion.folder)
            if not conversion.exists:
                self._clear({self._key(known.digest) for known in sources.values()})
            yield conversion
            if conversion.exists:
                _remember(conversion.folder, _marks(conversion.folder))

    def _conversion(self, digest: str, quant: str, *, name: str, lock: int | None) -> Conversion:
        key = self._key(digest)
        # Another name may have come first: the folder goes by the content.
        made = sorted(self._root.glob(f"[!.]*-{key}-{quant}"))
        return Conversion(made[0] if made else self._root / f"{name}-{key}-{quant}", digest, lock)

    def _key(self, digest: str) -> str:
        return hashlib.sha256(f"{self._code}\0{digest}".encode()).hexdigest()[:16]

    def _clear(self, keys: set[str]) -> None:
        clear_leftovers(self._root)
        for folder in sorted(self._root.iterdir()):
            if (match := _NAME.fullmatch(folder.name)) and match["key"] not in keys:
                log.info("removing %s: its checkpoint or the converter has changed", folder)
                shutil.rmtree(folder, ignore_errors=True)

    def _read(self) -> dict[str, _Source]:
        try:
            content = json.loads((self._root / _SOURCES).read_text(encoding="utf-8"))
            return {place: _Source(**fields) for place, fields in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # a cache: what it does not say is found out again

    def _write(self, sources: dict[str, _Source]) -> None:
        content = {place: asdict(source) for place, source in sources.items()}
        partial = self._root / f"{_SOURCES}.part"
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._root / _SOURCES)


def _code_digest() -> str:
    """Changes whenever the converter does."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(file for pattern in _CODE for file in package.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _intact(folder: Path, report: Report) -> bool:
    """A conversion is what was written; reads it whole where that is not known."""
    try:
        marks = _marks(folder)
        known = folder / _VERIFIED
        if known.is_file() and known.read_text(encoding="utf-8") == marks:
            return True
        report(f"checking {folder}")
        expected = read_checksums(folder)
        if checksums(folder / name for name in expected) != expected:
            return False
    except (OSError, ValueError):
        return False
    with suppress(OSError):  # a cache that cannot be written is read again next time
        _remember(folder, marks)
    return True


def _marks(folder: Path) -> str:
    """Changes when the machine boots, with ONNX Runtime, and when a file has been touched."""
    boot = _BOOT.read_text(encoding="ascii") if _BOOT.is_file() else ""
    files = [folder / name for name in (*read_checksums(folder), CHECKSUMS)]
    return hashlib.sha256(f"{boot}\0{session.VERSION}\0{_seen(files)}".encode()).hexdigest()


def _remember(folder: Path, marks: str) -> None:
    (folder / _VERIFIED).write_text(marks, encoding="utf-8")


def _seen(files: Iterable[Path]) -> str:
    """Changes whenever one of the files may have."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        marks = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(f"{file}\0{marks}\0".encode())
    return digest.hexdigest()


def _digest(path: Path, parts: Parts, report: Report) -> str:
    """`sha256:` over the content of all files: equal digests, equal models. Reads every byte."""
    total = sum(file.stat().st_size for file in parts.files)
    done, told = 0, time.monotonic()
    whole = hashlib.sha256()
    for file in parts.files:
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                done += len(piece)
                if time.monotonic() - told >= _REPORT_SECONDS:
                    told = time.monotonic()
                    report(f"reading {path}: {100 * done // total} %")
        name = "" if file in parts.freely_named else file.name
        whole.update(f"{name}\0".encode() + digest.digest())
    return f"sha256:{whole.hexdigest()}"
