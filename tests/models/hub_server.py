"""A hub on the loopback: the part of the protocol that huggingface_hub needs, with faults.

Serves `/api/models/{repo}/revision/{revision}` and `/{repo}/resolve/{revision}/{file}`; large
files redirect to `/storage/{sha256}` on another host, which must not get the token.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from specops.models import download
from tests.loopback import Handler, listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".onnx", ".data", ".gguf")  # kept apart, with a sha256
_API = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

Content = bytes | Path
"""A file's content: the bytes, or the path of a file with them."""


@dataclass
class Hub:
    """The server's repositories, its faults, and the requests that it got.

    Attributes:
        repos: repository → path of a file in it → content.
        revisions: revisions that every repository has, beside `COMMIT`.
        token: the token that a client must send; empty: none.
        status: the status of every answer; 0: the right one.
        busy: number of requests that get 503 first.
        gone: a file that is listed but missing.
        cuts: numbers of bytes after which the next downloads of large files end.
        damage: whether large files arrive with a wrong byte.
        sends_parts: whether requests for a part of a large file get it; else they get the whole.
        requests: method, path and range of every request, in order.
        leaked: tokens that the storage got.
    """

    repos: Mapping[str, Mapping[str, Content]]
    revisions: tuple[str, ...] = ("main",)
    token: str = ""
    status: int = 0
    busy: int = 0
    gone: str = ""
    cuts: list[int] = field(default_factory=list)
    damage: bool = False
    sends_parts: bool = True
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    url: str = ""

    def storage(self) -> dict[str, Content]:
        """Return the large files by sha256."""
        return {
            _sha256(content): content
            for files in self.repos.values()
            for path, content in files.items()
            if path.endswith(LARGE)
        }

    def ranges(self) -> list[str]:
        """Return the ranges of the requests for large files, in order; empty: the whole file."""
        return [part for _, path, part in self.requests if path.startswith("/storage/")]


def folder_paths(folder: Path, prefix: str = "") -> dict[str, Path]:
    """Return the files of a folder by their names in a repository."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): path for path in files}


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the content of a folder's files by their names in a repository."""
    return {name: path.read_bytes() for name, path in folder_paths(folder).items()}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port of the loopback and set `hub.url`."""

    handler = type("Handler", (_Handler,), {"content": hub})
    with listening(handler) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub


def download_from(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process download from `hub` without a token and without waits between attempts."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", os.devnull)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.0)


class _Handler(Handler):
    content: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.content, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if hub.status:
            self._answer(hub.status, b"{}")
        elif hub.busy:
            hub.busy -= 1
            self._answer(503, b"{}")
        elif path.startswith("/storage/"):
            self._storage(hub.storage()[path.removeprefix("/storage/")])
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(401, b"{}", {"X-Error-Message": "Invalid username or password."})
        elif match := _API.fullmatch(path):
            self._info(*match.groups())
        elif match := _RESOLVE.fullmatch(path):
            self._resolve(*match.groups())
        else:
            self._answer(404, b"{}")

    def _info(self, repo: str, revision: str) -> None:
        files = self.content.repos.get(repo)
        if files is None:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if revision not in (*self.content.revisions, COMMIT):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [_sibling(path, content) for path, content in files.items()]
        body = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": []}
        self._answer(200, json.dumps({**body, "siblings": siblings}).encode())

    def _resolve(self, repo: str, revision: str, file: str) -> None:
        content = self.content.repos.get(repo, {}).get(file)
        if content is None or revision != COMMIT or file == self.content.gone:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif file.endswith(LARGE):
            digest = _sha256(content)
            headers = {"X-Linked-Size": str(size_of(content)), "X-Linked-ETag": f'"{digest}"'}
            storage = self.content.url.replace("127.0.0.1", "localhost")
            self._answer(302, b"", {**headers, "Location": f"{storage}/storage/{digest}"})
        else:
            body = _bytes_of(content)
            self._answer(200, body, {"ETag": f'"{_git_id(body)}"'})

    def _storage(self, content: Content) -> None:
        """Send a large file or the rest of it, cut or damaged if the hub says so."""
        hub, size = self.content, size_of(content)
        if token := self.headers.get("Authorization"):
            hub.leaked.append(token)
        part = _RANGE.fullmatch(self.headers.get("Range", "")) if hub.sends_parts else None
        start, stop = (int(part[1]), int(part[2] or size - 1) + 1) if part else (0, size)
        count = min(stop, size) - start
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(count))
        if part:
            self.send_header("Content-Range", f"bytes {start}-{start + count - 1}/{size}")
        self.end_headers()
        if hub.cuts:
            count = min(count, hub.cuts.pop(0))
            self.close_connection = True
        if isinstance(content, Path):
            with content.open("rb") as stream:
                self.connection.sendfile(stream, start, count or None)
            return
        if hub.damage:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.wfile.write(content[start : start + count])

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.reply(status, body, {**(headers or {}), "X-Repo-Commit": COMMIT})


def size_of(content: Content) -> int:
    """Bytes in a file."""
    return content.stat().st_size if isinstance(content, Path) else len(content)


def _bytes_of(content: Content) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


@cache  # a file does not change while it is served
def _sha256(content: Content) -> str:
    if isinstance(content, Path):
        with content.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(content).hexdigest()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sibling(path: str, content: Content) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": path, "size": size_of(content)}
    if not path.endswith(LARGE):
        return {**entry, "blobId": _git_id(_bytes_of(content))}
    lfs = {"sha256": _sha256(content), "size": size_of(content), "pointerSize": 134}
    return {**entry, "blobId": _git_id(b"pointer"), "lfs": lfs}
