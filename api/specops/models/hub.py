"""Names models on the hub, and says where their files are and which files a model needs.

A download is complete when its manifest is there, which is written last. From then on the service
uses it without any request to the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from specops.models.errors import ModelError
from specops.models.folder import GENAI_CONFIG
from specops.models.gguf_files import SUFFIX, shards_of
from specops.models.head_folder import NGRAMS
from specops.sampling_defaults import GENERATION_CONFIG
from specops.text import files

MANIFEST = "download.json"
CONFIG = "config.json"
_CONFIGS = (CONFIG, GENERATION_CONFIG)
_TOKENIZER = (
    *(files.TOKENIZER, files.TOKENIZER_CONFIG, files.SPECIAL_TOKENS, files.ADDED_TOKENS),
    *(*files.BYTE_PAIRS, files.TEMPLATE, files.OLD_TEMPLATE, files.TOOLS_TEMPLATE),
)
_TOKENIZERS = ({files.TOKENIZER}, {*files.BYTE_PAIRS})  # either set is enough
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_STATE_DICTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_ONNX = re.compile(r".+\.onnx([._]data)?")
_NAME = r"[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w./-]+))?(?::(?P<subfolder>[\w./-]+))?", re.ASCII
)

_IMPOSSIBLE = re.compile(r"--|\.\.|\.git$|[.-](/|$)|[^/]{97}")  # in a name, as the hub says


class IncompleteError(ValueError):
    """Some shards of a model's weights are there and others missing; the message is one's name."""


Check = Callable[..., int]
"""Called with a config.json, or with the present parts of all files of a GGUF.

Raises ModelError if a model cannot run; returns the number of files with nothing more to tell.
"""
Progress = Callable[[int, int], None]
"""Called with the number of bytes that are here and the number of all bytes."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub, written `org/name`, `org/name@revision` or `org/name@revision:folder`.

    `revision` is a commit, a tag or a branch. `subfolder` is a folder of the repository, or the
    path of a GGUF in it, or of one of a GGUF's shards.
    """

    repo: str
    revision: str = "main"
    subfolder: str = ""

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Return the model that `text` names; None if it cannot be a name on the hub.

        Raises:
            ModelError: it is a URL, or written like a name on the hub, which has no such names.
        """
        if "://" in text:
            raise ModelError(
                f"{text} is a URL: a model on the hub is named org/name, org/name@revision or "
                "org/name@revision:file.gguf, and HF_ENDPOINT is the hub's address"
            )
        match = _REFERENCE.fullmatch(text)
        if match is None:
            return None
        if _IMPOSSIBLE.search(match["repo"]):
            raise ModelError(
                f"{text} is neither a local path nor a name on the hub: such a name has no "
                "`--` and no `..`, does not end with `.`, `-` or `.git`, and has "
                "at most 96 characters"
            )
        return cls(
            match["repo"], match["revision"] or "main", (match["subfolder"] or "").strip("/")
        )

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo.partition("/")[2]

    @property
    def gguf(self) -> str:
        """The file name of the GGUF; empty if the model is a folder."""
        path = PurePosixPath(self.subfolder)
        return path.name if path.suffix == SUFFIX else ""

    @property
    def repo_folder(self) -> str:
        """The repository's folder with the model's files; empty for the root."""
        if not self.gguf:
            return self.subfolder
        return self.subfolder.removesuffix(self.gguf).rstrip("/")

    def folder(self, cache_dir: Path) -> Path:
        """Return the folder for the model's files below `cache_dir`."""
        key = self.revision + (f"--{self.subfolder}" if self.subfolder else "")
        return cache_dir / "hub" / self.repo.replace("/", "--") / key.replace("/", "--")

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + (f":{self.subfolder}" if self.subfolder else "")


def is_complete(folder: Path, model: HubModel) -> bool:
    """Return whether every file of the manifest is there in its full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
        same = manifest["model"] == asdict(model) and bool(sizes)
        return same and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# -- which files a model needs ---------------------------------------------------------------------


def choose_files(names: set[str], gguf: str = "") -> list[str]:
    """Return the names of the files that loading a model needs: of several forms of weights, one.

    Args:
        names: all files of a folder.
        gguf: the name of a GGUF, or one of its shards; empty for other forms of weights.

    Raises:
        IncompleteError: a shard of the weights is missing.
        ValueError: no usable form of weights is among them.
    """
    if gguf:
        chosen = shards_of(gguf)
        if not names & {*chosen}:
            raise ValueError(f"no {gguf}")
        _check_complete(chosen, names)
        return chosen
    common = [name for name in (*_CONFIGS, *_TOKENIZER, NGRAMS) if name in names]
    if files.SENTENCEPIECE in names and not any(needed <= names for needed in _TOKENIZERS):
        common.append(files.SENTENCEPIECE)
    if GENAI_CONFIG in names:
        return [*common, GENAI_CONFIG, *sorted(filter(_ONNX.fullmatch, names))]
    for kind in (_SAFETENSORS, _STATE_DICTS):
        weights = sorted(filter(kind.fullmatch, names))
        index = [name for name in weights if name.endswith(".index.json")]
        single = [name for name in weights if "-of-" not in name and name not in index]
        chosen = single or ([name for name in weights if name not in single] if index else [])
        if chosen and CONFIG in names:
            _check_complete(chosen, names)
            return [*common, *chosen]
    raise ValueError("neither safetensors nor PyTorch weights with a config.json")


def _check_complete(weights: list[str], names: set[str]) -> None:
    shards = {shard for name in weights for shard in shards_of(name)}
    if missing := sorted(shards - names):
        raise IncompleteError(missing[0])


def has_tokenizer(names: set[str]) -> bool:
    """Return whether a tokenizer can be read from these files, or made of them."""
    return any(needed <= names for needed in (*_TOKENIZERS, {files.SENTENCEPIECE}))
