"""Conversions on disk: one per content of a checkpoint, kind of weights and version of the code.

They are named by a digest of what was converted, so the same checkpoint under two paths, a draft
that is the target's own files for one, is stored once. The digest takes reading every byte; it is
kept beside the files' sizes and times and taken again only when one of those has changed.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from specops.models.folder import MANIFEST
from specops.models.hub import locked
from specops.models.layout import Parts

log = logging.getLogger(__name__)

_CODE = (
    "models/convert/**/*.py",
    *("models/layout.py", "models/state_dict.py", "models/sentencepiece.py"),
)
_SOURCES = "sources.json"
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

    def find(self, path: Path, parts: Parts, quant: str) -> Conversion | None:
        """The conversion of a checkpoint that has not changed since; reads no weights.

        Args:
            path: the checkpoint.
            parts: what it is made of.
            quant: the weights wanted.
        """
        source = self._read().get(str(path.resolve()))
        if source is None or source.seen != _seen(parts):
            return None
        found = self._conversion(source.digest, quant, name="", lock=None)
        return found if found.exists else None

    @contextmanager
    def held(
        self, path: Path, parts: Parts, quant: str, *, name: str, report: Report
    ) -> Iterator[Conversion]:
        """Hold the lock over a conversion that may have to be made.

        Before one is, what killed processes left is removed, and so is every conversion that no
        known checkpoint leads to any more: the checkpoint has changed, or the converter.

        Args:
            path: the checkpoint.
            parts: what it is made of.
            quant: the weights wanted.
            name: how a new conversion's folder begins.
            report: told how far reading the checkpoint is, and when another process is at it.

        Raises:
            OSError: the checkpoint cannot be read or the folder cannot be written.
        """

        def wait() -> None:
            report(f"waiting for another process that converts in {self._root}")

        with locked(self._root, wait) as lock:
            sources, place, seen = self._read(), str(path.resolve()), _seen(parts)
            source = sources.get(place)
            if source is None or source.seen != seen:
                source = sources[place] = _Source(seen, _digest(path, parts, report))
                self._write(sources)
            conversion = self._conversion(source.digest, quant, name=name, lock=lock)
            if not conversion.exists:
                self._clear({self._key(known.digest) for known in sources.values()})
            yield conversion

    def _conversion(self, digest: str, quant: str, *, name: str, lock: int | None) -> Conversion:
        key = self._key(digest)
        # Another name may have come first: the folder goes by the content.
        made = sorted(self._root.glob(f"[!.]*-{key}-{quant}"))
        return Conversion(made[0] if made else self._root / f"{name}-{key}-{quant}", digest, lock)

    def _key(self, digest: str) -> str:
        return hashlib.sha256(f"{self._code}\0{digest}".encode()).hexdigest()[:16]

    def _clear(self, keys: set[str]) -> None:
        for folder in sorted(self._root.iterdir()):
            if not folder.is_dir():
                continue
            if folder.name.startswith("."):
                log.info("removing %s, which an interrupted conversion left", folder)
                shutil.rmtree(folder, ignore_errors=True)
            elif (match := _NAME.fullmatch(folder.name)) and match["key"] not in keys:
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


def _seen(parts: Parts) -> str:
    """Changes whenever a file of the checkpoint may have."""
    digest = hashlib.sha256()
    for file in parts.files:
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
