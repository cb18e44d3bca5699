"""Models on the hub: how they are named, and where their files are kept once they are here.

A snapshot is complete when its manifest is there, which is written last; from then on it is used
without asking the hub for anything. What downloads is another module, loaded only when needed:
most starts of the service are not the first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from specops.models.folder import ModelError
from specops.models.gguf_files import SUFFIX
from specops.system.folders import locked

MANIFEST = "download.json"
_NAME = r"[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w./-]+))?(?::(?P<subfolder>[\w./-]+))?", re.ASCII
)

Progress = Callable[[int, int], None]
"""Told the bytes that are here and the bytes in all."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub, written `org/name`, `org/name@revision` or `org/name@revision:folder`.

    `revision` is a commit, a tag or a branch; `subfolder` is where in the repository it lies, or
    the path of a GGUF there, or of one of its shards.
    """

    repo: str
    revision: str = "main"
    subfolder: str = ""

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """The model that `text` names; None where it cannot be a name on the hub."""
        found = _REFERENCE.fullmatch(text)
        if found is None:
            return None
        return cls(
            found["repo"], found["revision"] or "main", (found["subfolder"] or "").strip("/")
        )

    @property
    def name(self) -> str:
        """The repository's name, without whose it is."""
        return self.repo.partition("/")[2]

    @property
    def gguf(self) -> str:
        """The name of the GGUF that it is; empty where it is a folder."""
        path = PurePosixPath(self.subfolder)
        return path.name if path.suffix == SUFFIX else ""

    @property
    def place(self) -> str:
        """Where in the repository its files lie; empty for its root."""
        if not self.gguf:
            return self.subfolder
        return self.subfolder.removesuffix(self.gguf).rstrip("/")

    def folder(self, cache_dir: Path) -> Path:
        """Where its files are kept below `cache_dir`."""
        key = self.revision + (f"--{self.subfolder}" if self.subfolder else "")
        return cache_dir / "hub" / self.repo.replace("/", "--") / key.replace("/", "--")

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + (f":{self.subfolder}" if self.subfolder else "")


def fetch(model: HubModel, cache_dir: Path, progress: Progress) -> Path:
    """The folder with a model's files, downloaded unless they are complete here already.

    Args:
        cache_dir: where downloads are kept, below `hub/`.
        progress: told about a download while it lasts.

    Raises:
        ModelError: the model cannot be had; the message says why and what to do.
    """
    folder = model.folder(cache_dir)
    if is_complete(folder, model):
        return folder
    if offline():
        raise ModelError(
            f"{model} is not (completely) in {folder} and HF_HUB_OFFLINE forbids to download it: "
            "unset it for one start, or give SPECOPS_TARGET a folder"
        )
    if not os.environ.get("HF_ENDPOINT"):  # Compose passes unset variables on as empty ones,
        os.environ.pop("HF_ENDPOINT", None)  # which huggingface_hub takes for an address
    from specops.models import download  # noqa: PLC0415 - heavy, and only needed here

    try:
        with locked(folder):
            if not is_complete(folder, model):  # another process may have been at it
                download.snapshot(model, folder, progress)
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written ({error.strerror}): set SPECOPS_CACHE_DIR to a folder "
            "that can"
        ) from error
    return folder


def offline() -> bool:
    """Requests are forbidden, by huggingface_hub's own variables."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def is_complete(folder: Path, model: HubModel) -> bool:
    """Every file that the manifest names is there in its full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
        wanted = manifest["model"] == asdict(model) and bool(sizes)
        return wanted and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
