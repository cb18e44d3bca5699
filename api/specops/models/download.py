"""Downloads a model's files from the hub: only the needed ones, resumable, checked, with progress.

huggingface_hub lists the repository and opens the connections (endpoint, token, proxy, meaning of
refusals). This module writes the bytes itself, because huggingface_hub's own download starts a file
over after a restart, compares no checksum, and keeps the last megabytes of a cut connection to
itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TypeVar

import httpx
from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from specops.models.errors import ModelError
from specops.models.folder import ADAPTER, ADAPTER_ADVICE, GENAI_CONFIG, TOKENIZER_ADVICE
from specops.models.gguf_files import SUFFIX
from specops.models.hub import (
    CONFIG,
    MANIFEST,
    Check,
    HubModel,
    IncompleteError,
    Progress,
    choose_files,
    has_tokenizer,
)
from specops.models.progress import every
from specops.system.folders import atomic_file
from specops.text.files import TOOLS_TEMPLATE

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BUSY = (408, 429, 500, 502, 503, 504)  # status codes after which it makes sense to ask again
_ATTEMPTS = 6  # in a row without one new byte
_WAIT_SECONDS = 1.0  # before the second attempt; doubles each time
_TIMEOUT = httpx.Timeout(30.0)
_PROGRESS_SECONDS = 0.5
_LOG_SECONDS = 15.0
# Bytes of a GGUF that are downloaded to read its header: the settings are in the first ones, the
# tokenizer and the types of the tensors after them; a longer header is refused.
_BEGINNINGS = (1 << 18, 1 << 21, 1 << 24, 1 << 26)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file to download. The hub knows a sha256 for large files and a git id for small ones."""

    name: str
    size: int
    sha256: str | None
    git_id: str | None

    @property
    def part(self) -> str:
        """The name of the partial download; another version of the file has another one."""
        return f"{self.name}.{(self.sha256 or self.git_id or '')[:12]}.part"


def snapshot(
    model: HubModel,
    folder: Path,
    progress: Progress,
    *,
    tokenizer: bool = True,
    check: Check = lambda *files: len(files),
) -> None:
    """Download a model's files into `folder`, and at the very end write the manifest.

    Files of an earlier attempt, whole or in part, are checked and not downloaded again.

    Args:
        model: on the hub.
        folder: where the files go.
        progress: gets a line now and then.
        tokenizer: also its files.
        check: refuses a list of files before their download.

    Raises:
        ModelError: the download failed; the message says why and what to do. Or `check` raised it.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    try:
        commit, files = _listing(model, tokenizer)
        _remove_others(folder, files)
        _check_room(folder, files)
        download = _Download(model, commit, folder, _Progress(model, files, progress))
        if model.gguf:
            download.check_headers(files, check)
        names = {file.name for file in files}
        # Others made finished graphs, and a model without a tokenizer is a draft head.
        converted = GENAI_CONFIG not in names and has_tokenizer(names)
        for file in files:
            download.obtain(file)
            if file.name == CONFIG and converted:
                check(folder / file.name)
        download.meter.end()
        manifest = {
            "model": asdict(model),
            "commit": commit,
            "files": {file.name: asdict(file) for file in files},
        }
        with atomic_file(folder / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except HfHubHTTPError as error:
        raise ModelError(_refusal(model, error)) from error
    except UnicodeEncodeError as error:
        raise ModelError("HF_TOKEN has characters that no token has: copy it again") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelError(
            f"the hub cannot be reached for {model} ({error or type(error).__name__}): check the "
            "connection and HF_ENDPOINT, then start again; what is here already is kept"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = (
                f"the disk of {folder} is full: free some, or set SPECOPS_CACHE_DIR to a larger "
                "disk; what is here already is kept, and the next start continues from there"
            )
        else:
            problem = (
                f"{folder} cannot be written ({error}): check the disk, or set SPECOPS_CACHE_DIR"
            )
        raise ModelError(problem) from error


# -- the list of files -----------------------------------------------------------------------------


def _listing(model: HubModel, tokenizer: bool) -> tuple[str, list[HubFile]]:
    """Return the commit of the model's revision, and the files to download."""
    api = HfApi(endpoint=_endpoint())
    info = _retry(lambda: api.model_info(model.repo, revision=model.revision, files_metadata=True))
    siblings = info.siblings or []
    folder = PurePosixPath(model.repo_folder)
    in_folder = {
        path.name: item
        for item in siblings
        if (path := PurePosixPath(item.rfilename)).parent == folder
    }
    named = {item.rfilename: item for item in siblings}
    if tools := named.get(str(folder / TOOLS_TEMPLATE)):
        in_folder[TOOLS_TEMPLATE] = tools
    try:
        names = choose_files(set(in_folder), model.gguf)
    except IncompleteError as error:
        raise ModelError(
            f"{model} is not whole on the hub: {error} is missing; take another revision or "
            "repository"
        ) from error
    except ValueError as error:
        if ADAPTER in in_folder:
            raise ModelError(f"{model} {ADAPTER_ADVICE}") from error
        advice = _advice(model, [PurePosixPath(item.rfilename) for item in siblings])
        raise ModelError(f"{model} contains {error}: {advice}") from error
    if tokenizer and not (model.gguf or has_tokenizer(set(names))):
        raise ModelError(f"{model} has no tokenizer: {TOKENIZER_ADVICE}")
    files = []
    for name in names:
        item = in_folder[name]
        size = item.lfs.size if item.lfs else item.size
        if info.sha is None or size is None:
            raise ModelError(
                f"the hub at HF_ENDPOINT does not report the size of {name} in {model}"
            )
        files.append(HubFile(name, size, item.lfs.sha256 if item.lfs else None, item.blob_id))
    return str(info.sha), files


def _advice(model: HubModel, paths: list[PurePosixPath]) -> str:
    """Return which other folder or file of the repository a person may choose."""
    graphs = sorted({str(path.parent) for path in paths if path.name == GENAI_CONFIG})
    ggufs = sorted(str(path) for path in paths if path.suffix == SUFFIX)
    for kind, named in (("folders", graphs), ("files", ggufs)):
        if named:
            example = f"{model.repo}@{model.revision}:{named[0]}"
            return f"choose one of its {kind}, such as {example}; it has {', '.join(named)}"
    return "choose a repository with safetensors"


def _endpoint() -> str | None:
    """Return the hub's address; None leaves it to huggingface_hub."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or None


# -- one file --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Download:
    """Downloads files of one commit into a folder; those that are there are whole and checked."""

    model: HubModel
    commit: str
    folder: Path
    meter: _Progress

    def check_headers(self, files: list[HubFile], check: Check) -> None:
        """Download the beginnings of a GGUF's files until they hold the headers, and check these.

        If the hub does not send parts of files, this costs the beginnings twice.
        """
        if all(self._is_here(file) for file in files):
            return  # they are checked when they are converted
        here = [self.folder / (file.name if self._is_here(file) else file.part) for file in files]
        for file in files:
            self._begin(file, _BEGINNINGS[0])
        told = check(*here)  # starts a process: once, not for each shard
        for number, file in enumerate(files):
            for shorter, size in pairwise(_BEGINNINGS):
                if told > number or shorter >= file.size:
                    break
                self._begin(file, size)
                told = check(*here)

    def _begin(self, file: HubFile, size: int) -> None:
        """Download a file's first bytes, as many as `size` if it has them."""
        if not self._is_here(file):
            self._fetch(file, min(size, file.size))

    def obtain(self, file: HubFile) -> None:
        """Download a file whole and checked, unless it is there."""
        part = self.folder / file.part
        if not self._is_here(file):
            self._fetch(file, file.size)
            if not _is_intact(part, file):
                part.unlink()
                raise ModelError(
                    f"{file.name} of {self.model} has a different checksum than the hub reports: "
                    "it was damaged in transit and has been deleted. Start again; if this "
                    "persists, check HF_ENDPOINT and proxies"
                )
            part.replace(self.folder / file.name)
        self.meter.set(file, file.size)

    def _is_here(self, file: HubFile) -> bool:
        return (self.folder / file.name).exists()

    def _fetch(self, file: HubFile, size: int) -> None:
        """Download the first bytes of a file, as many as `size`, into its part."""
        part = self.folder / file.part
        part.parent.mkdir(exist_ok=True)
        url = hf_hub_url(
            self.model.repo,
            file.name,
            subfolder=self.model.repo_folder or None,
            revision=self.commit,
            endpoint=_endpoint(),
        )

        def told(have: int) -> None:
            self.meter.set(file, have)

        _retry(lambda: _stream(url, part, size, file.size, told), lambda: _size(part))


def _stream(url: str, part: Path, size: int, whole: int, told: Callable[[int], None]) -> None:
    """Append bytes to `part` until it has `size`.

    Args:
        url: the file's.
        part: the bytes that are here already.
        size: how many of the file's first bytes to get.
        whole: the file's size.
        told: called with the number of bytes that are here.

    Raises:
        httpx.HTTPError: the connection or the hub failed; `part` has the bytes that came.
        OSError: `part` cannot be written.
    """
    have = _size(part)
    if have > whole:
        part.unlink()
        have = 0
    told(have)
    if have >= size and part.exists():
        return
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if have or size < whole:
        headers["Range"] = f"bytes={have}-{size - 1 if size < whole else ''}"
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as response:
        hf_raise_for_status(response)
        resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
        with part.open("ab" if resumed else "wb") as out:
            for piece in response.iter_raw():
                out.write(piece)
                told(out.tell())
                if out.tell() >= size < whole:  # the hub sends more than it was asked for
                    break
            out.flush()
            os.fsync(out.fileno())  # before it gets its name: that must mean it is on the disk
    if _size(part) < size:
        raise httpx.RemoteProtocolError(f"{part.name} ended after {_size(part)} bytes")


def _retry(call: Callable[[], _T], progress: Callable[[], int] = lambda: 0) -> _T:
    """Return the result of `call`; repeat it while the connection or the hub fails.

    Raises:
        httpx.HTTPError: `_ATTEMPTS` attempts in a row made no `progress`, or the hub refuses.
    """
    failures = 0
    while True:
        before = progress()
        try:
            return call()
        except (httpx.TransportError, HfHubHTTPError) as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in _BUSY:
                raise
            if isinstance(error, httpx.UnsupportedProtocol):  # the address itself is wrong
                raise
            failures = 1 if progress() > before else failures + 1
            if failures == _ATTEMPTS:
                raise
            log.warning("the hub failed (%s): retrying", str(error).strip().partition("\n")[0])
            time.sleep(_WAIT_SECONDS * 2 ** (failures - 1))


def _is_intact(path: Path, file: HubFile) -> bool:
    """Return whether size and digest are those that the hub tells."""
    if path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
    if file.git_id is not None:  # a blob of git: small, so it may be read whole
        blob = b"blob %d\0" % file.size + path.read_bytes()
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == file.git_id
    return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _remove_others(folder: Path, files: list[HubFile]) -> None:
    """Remove other versions of the files, whole or partial."""
    for file in files:
        if (here := folder / file.name).exists() and not _is_intact(here, file):
            here.unlink()
    parts = {folder / file.part for file in files}
    for other in {*folder.rglob("*.part")} - parts:
        log.info("removing %s: the hub has another version of the file", other)
        other.unlink()


def _check_room(folder: Path, files: list[HubFile]) -> None:
    """Raise ModelError if the disk has no room for the missing bytes."""
    here = sum(_size(folder / file.name) + _size(folder / file.part) for file in files)
    missing = sum(file.size for file in files) - here
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelError(
            f"{folder} has room for {free / 1e9:.2f} GB, the download needs {missing / 1e9:.2f} "
            "GB: free some, or set SPECOPS_CACHE_DIR to a larger disk"
        )


# -- reports ---------------------------------------------------------------------------------------


class _Progress:
    """Counts the bytes that are here; reports and logs them from time to time."""

    def __init__(self, model: HubModel, files: list[HubFile], progress: Progress) -> None:
        self._model, self._progress = model, progress
        self._total = sum(file.size for file in files)
        self._here: dict[str, int] = {}
        self._report_due, self._log_due = every(_PROGRESS_SECONDS), every(_LOG_SECONDS)
        log.info("downloading %s: %.1f MB", model, self._total / 1e6)
        progress(0, self._total)

    def set(self, file: HubFile, have: int) -> None:
        """Note how many bytes of a file are here."""
        self._here[file.name] = have
        if self._report_due():
            self._progress(self._done, self._total)
        if self._log_due():
            done, total = self._done / 1e6, self._total / 1e6
            log.info("downloading %s: %.1f of %.1f MB", self._model, done, total)

    def end(self) -> None:
        """Report that everything is here."""
        self._progress(self._total, self._total)
        log.info("downloaded %s", self._model)

    @property
    def _done(self) -> int:
        return sum(self._here.values())


def _refusal(model: HubModel, error: HfHubHTTPError) -> str:
    """Return the meaning of the hub's refusal, and a remedy."""
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status == httpx.codes.FORBIDDEN:
        return (
            f"the hub refuses {model.repo} ({status}): accept its terms on its page, and set "
            "HF_TOKEN to a token that may read it"
        )
    if status == httpx.codes.UNAUTHORIZED:
        return (
            f"the hub requires a login for {model.repo} ({status}): it is private, or there is no "
            "such repository; check the name, and set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{model.repo} has no revision {model.revision} ({status}): check the revision"
    if isinstance(error, RepositoryNotFoundError) or status == httpx.codes.NOT_FOUND:
        return f"the hub has no {model} ({status}): check repository, revision and HF_ENDPOINT"
    return f"the hub fails for {model} ({status}): start again later, or check HF_ENDPOINT"
