"""Brings a checkpoint into the layout that the converter reads, for what comes in another one.

A configuration beside the weights becomes config.json, and a tokenizer of vocabulary and merges, or
SentencePiece's, becomes tokenizer.json. The weights stay where they are. Runs in a process of its
own, whose memory goes back: `python -m specops.models.layout SOURCE DEST`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.models import hub
from specops.models.folder import TOKENIZER_ADVICE
from specops.models.gguf_files import files_of, is_gguf
from specops.models.hub_files import has_tokenizer
from specops.models.inside import indexed
from specops.models.sentencepiece import make_tokenizer

_SUFFIXES = (".pt", ".pth", ".bin")
_HUB_WEIGHTS = "pytorch_model.bin"
_SAFETENSORS = "model*.safetensors*"
_TOKENIZER = "tokenizer.json"
_VOCABULARY = {"vocab.json", "merges.txt"}
_SENTENCEPIECE = "tokenizer.model"
_COPIED = (".json", ".jinja", ".txt")  # what a converted folder may need beside the weights


class LayoutError(Exception):
    """A checkpoint that cannot be understood; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a checkpoint is made of.

    `state_dicts` is empty where the weights are safetensors already. `shards` are a GGUF's files,
    one or more, which hold all there is.
    """

    folder: Path
    config: Path
    state_dicts: tuple[Path, ...]
    shards: tuple[Path, ...] = ()

    @property
    def in_order(self) -> bool:
        """The converter can read the checkpoint as it is."""
        if self.shards:
            return True
        return not self.state_dicts and (self.folder / _TOKENIZER).is_file()

    @property
    def freely_named(self) -> tuple[Path, ...]:
        """The files whose names say nothing of what is in them."""
        return self.shards or self.state_dicts

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that the converted model follows from, in a fixed order."""
        if self.shards:
            return self.shards
        weights = self.state_dicts or self.folder.glob(_SAFETENSORS)
        texts = (file for file in self.folder.iterdir() if file.suffix in _COPIED)
        found = {self.config, self.folder / _SENTENCEPIECE, *weights, *texts}
        found.discard(self.folder / hub.MANIFEST)
        return tuple(sorted(file for file in found if file.is_file()))


def parts_of(source: Path) -> Parts:
    """Find weights, configuration and tokenizer.

    Args:
        source: a checkpoint's folder, a file that torch saved (`name.pt` goes with `name.json` or
            `config.json`), or a GGUF or one of its shards.

    Raises:
        LayoutError: something is missing or ambiguous.
    """
    if is_gguf(source):
        try:
            return Parts(source.parent, source, (), files_of(source))
        except FileNotFoundError as error:
            raise LayoutError(str(error)) from error
    if source.is_file() and source.suffix in _SUFFIXES:
        found = Parts(source.parent, _config_of(source), (source,))
    elif any(source.glob(_SAFETENSORS)):
        found = Parts(source, source / "config.json", ())
    else:
        files = _state_dicts(source)
        found = Parts(source, _config_of(files[0]), files)
    if not found.config.is_file():
        raise LayoutError(f"{source} has no configuration: {found.config} is missing")
    folder = found.folder
    if not has_tokenizer({path.name for path in folder.iterdir()}):
        raise LayoutError(f"{folder} has no tokenizer: {TOKENIZER_ADVICE}")
    return found


def arrange(source: Path, destination: Path) -> None:
    """Fill the folder `destination` with what the converter reads besides the weights.

    Raises:
        LayoutError: the checkpoint cannot be understood.
    """
    parts = parts_of(source)
    destination.mkdir(parents=True, exist_ok=True)
    for file in parts.folder.iterdir():
        if file.is_file() and file.suffix in _COPIED:
            shutil.copyfile(file, destination / file.name)
    (destination / "config.json").write_text(json.dumps(_config(parts.config), indent=2))
    if not (destination / _TOKENIZER).is_file():
        _make_tokenizer(parts.folder, destination / _TOKENIZER)


def _config_of(weights: Path) -> Path:
    own = weights.with_suffix(".json")
    return own if own.is_file() else weights.with_name("config.json")


def _state_dicts(folder: Path) -> tuple[Path, ...]:
    index = folder / f"{_HUB_WEIGHTS}.index.json"
    if index.is_file():
        try:
            return tuple(indexed(index))
        except ValueError as error:
            raise LayoutError(str(error)) from error
    if (folder / _HUB_WEIGHTS).is_file():
        return (folder / _HUB_WEIGHTS,)
    found = [path for path in sorted(folder.glob("*")) if path.suffix in (".pt", ".pth")]
    if not found:
        raise LayoutError(
            f"{folder} holds no model: no specops.json, no genai_config.json, and no config.json "
            "with safetensors or a `.pt` file"
        )
    if len(found) > 1:
        listed = ", ".join(path.name for path in found)
        raise LayoutError(f"{folder} holds several state dicts ({listed}): name the file itself")
    return (found[0],)


def _config(file: Path) -> dict[str, Any]:
    """The configuration."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise LayoutError(f"{file} must hold a JSON object")
    return config


def _make_tokenizer(folder: Path, file: Path) -> None:
    """Write tokenizer.json from vocab.json and merges.txt, as transformers reads them.

    Where they are not there it is made of SentencePiece's tokenizer.model.
    """
    try:
        if all((folder / name).is_file() for name in _VOCABULARY):
            from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

            load: Callable[..., Any] = AutoTokenizer.from_pretrained
            # Never code that lies beside a checkpoint, nor a question whether to run it.
            tokenizer = load(str(folder), trust_remote_code=False)
            tokenizer.backend_tokenizer.save(str(file))
        else:
            make_tokenizer(folder).save(str(file))
    except Exception as error:  # transformers raises whatever its readers do
        raise LayoutError(
            f"no {_TOKENIZER} can be made of the tokenizer's files ({error}): put one beside them"
        ) from error


def main(arguments: list[str]) -> int:
    """Arrange `arguments[0]` in `arguments[1]`; returns the exit status."""
    # What is said here is shown to people where it fails; that torch is missing is not why.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    source, destination = map(Path, arguments)
    try:
        arrange(source, destination)
    except (LayoutError, OSError) as error:
        print(f"specops.models.layout: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
