"""Brings a checkpoint of another layout into the layout that the converter reads.

A configuration next to the weights becomes config.json. A tokenizer of vocabulary and merges, or
SentencePiece's, becomes tokenizer.json. The weights stay in their place. This runs in a child
process, whose memory is freed when it ends: `python -m specops.models.layout SOURCE DEST`.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.models import hub
from specops.models.contract import MANIFEST
from specops.models.errors import ModelError
from specops.models.folder import ADAPTER, ADAPTER_ADVICE, GENAI_CONFIG, TOKENIZER_ADVICE
from specops.models.gguf_files import SUFFIX, files_of, is_gguf
from specops.models.paths import indexed
from specops.models.progress import every
from specops.models.sentencepiece import make_tokenizer
from specops.text.files import BYTE_PAIRS, SENTENCEPIECE, TOKENIZER, TOOLS_TEMPLATE

_SUFFIXES = (".pt", ".pth", ".bin")
_WEIGHT_SUFFIXES = (*_SUFFIXES, ".safetensors", ".safetensors.index.json", SUFFIX, ".onnx")
_HUB_WEIGHTS = "pytorch_model.bin"
_SAFETENSORS = "model*.safetensors*"
_WEIGHTS = (_SAFETENSORS, "pytorch_model*")  # as transformers names them
_PIECE = 4 << 20
_REPORT_SECONDS = 5.0
_COPIED = (".json", ".jinja", ".txt")  # files that a converted folder may need


@dataclass(frozen=True, slots=True)
class Parts:
    """The files of a checkpoint.

    Attributes:
        folder: where they are.
        config: the file with the configuration.
        state_dicts: the files with weights that torch saved; empty if there are safetensors.
        shards: the files of a GGUF, which has everything in it; empty for other checkpoints.
        depends_on: another model's files on which the conversion also depends.
    """

    folder: Path
    config: Path
    state_dicts: tuple[Path, ...]
    shards: tuple[Path, ...] = ()
    depends_on: tuple[Path, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether the converter can read the checkpoint as it is."""
        plain = not self.state_dicts and (self.folder / TOKENIZER).is_file()
        return bool(self.shards) or plain

    @property
    def freely_named(self) -> tuple[Path, ...]:
        """The files whose names do not matter."""
        return self.shards or self.state_dicts

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the converted model depends on, in a fixed order."""
        if self.shards:
            return self.shards
        weights = self.state_dicts or self.folder.glob(_SAFETENSORS)
        texts = (file for file in self.folder.iterdir() if file.suffix in _COPIED)
        named = (self.folder / name for name in (SENTENCEPIECE, TOOLS_TEMPLATE))
        candidates = {self.config, *named, *weights, *texts, *self.depends_on}
        candidates.discard(self.folder / hub.MANIFEST)
        return tuple(sorted(file for file in candidates if file.is_file()))

    def digest(self, report: Callable[[int], None] = lambda percent: None) -> str:
        """`sha256:` and a digest of all files' content: equal digests, equal models.

        Reads every byte: a fine-tune has the names, shapes and sizes of its base model. `report` is
        called now and then with how many percent are read.
        """
        total = sum(file.stat().st_size for file in self.files)
        done, due = 0, every(_REPORT_SECONDS)
        whole = hashlib.sha256()
        for file in self.files:
            digest = hashlib.sha256()
            with file.open("rb", buffering=0) as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
                    done += len(piece)
                    if due():
                        report(100 * done // total)
            name = "" if file in self.freely_named else file.name
            whole.update(f"{name}\0".encode() + digest.digest())
        return f"sha256:{whole.hexdigest()}"


def parts_of(source: Path, *, tokenizer: bool = True) -> Parts:
    """Find weights, configuration and tokenizer.

    Args:
        source: a checkpoint's folder, a file that torch saved (`name.pt` goes with `name.json` or
            `config.json`), or a GGUF or one of its shards.
        tokenizer: whether there must be one.

    Raises:
        ModelError: a part is missing or ambiguous.
    """
    if is_gguf(source):
        return Parts(source.parent, source, (), files_of(source))
    if (source / ADAPTER).is_file() and not any(map(any, map(source.glob, _WEIGHTS))):
        raise ModelError(f"{source} {ADAPTER_ADVICE}")
    folder, state_dicts = source, list[Path]()
    if source.is_file() and source.suffix in _SUFFIXES:
        folder, state_dicts = source.parent, [source]
    elif not source.is_dir():
        what = "it is another kind of file" if source.is_file() else "it does not exist"
        raise ModelError(
            f"{source} contains no model: {what}. A model or draft is a folder, a .pt or .gguf "
            "file or org/name on the hub"
        )
    elif not any(source.glob(_SAFETENSORS)) or _only_an_index(source):
        state_dicts = _state_dicts(source)
    config = folder / hub.CONFIG
    if state_dicts and (own := state_dicts[0].with_suffix(".json")).is_file():
        config = own
    if not config.is_file():
        raise ModelError(f"{source} has no configuration: {config} is missing")
    if tokenizer and not hub.has_tokenizer({path.name for path in folder.iterdir()}):
        raise ModelError(f"{folder} has no tokenizer: {TOKENIZER_ADVICE}")
    return Parts(folder, config, tuple(state_dicts))


def holds_model(folder: Path) -> bool:
    """Whether anything of a model is in a folder: a description of one, or weights.

    Other files say nothing: a table of n-grams may come with a tokenizer, or with some JSON.
    """
    names = {path.name for path in folder.iterdir()}
    described = names & {hub.CONFIG, MANIFEST, GENAI_CONFIG}
    return bool(described) or any(name.endswith(_WEIGHT_SUFFIXES) for name in names)


def _only_an_index(folder: Path) -> bool:
    """Whether safetensors left only an index behind, next to torch's weights."""
    names = {path.name for path in folder.iterdir()}
    return _HUB_WEIGHTS in names and not any(name.endswith(".safetensors") for name in names)


def normalize(source: Path, destination: Path) -> None:
    """Write everything that the converter reads, except the weights, into the folder `destination`.

    Raises:
        ModelError: the checkpoint's layout is not known.
    """
    parts = parts_of(source)
    destination.mkdir(parents=True, exist_ok=True)
    for file in (*parts.folder.iterdir(), parts.folder / TOOLS_TEMPLATE):
        if file.is_file() and file.suffix in _COPIED:
            copy = destination / file.relative_to(parts.folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    try:
        config = json.loads(parts.config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{parts.config} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{parts.config} must hold a JSON object")
    (destination / hub.CONFIG).write_text(json.dumps(config, indent=2), "utf-8")
    if not (destination / TOKENIZER).is_file():
        _make_tokenizer(parts.folder, destination / TOKENIZER)


def _state_dicts(folder: Path) -> list[Path]:
    if (folder / _HUB_WEIGHTS).is_file():  # an index next to it belongs to other files
        return [folder / _HUB_WEIGHTS]
    index = folder / f"{_HUB_WEIGHTS}.index.json"
    if index.is_file():
        return indexed(index)
    paths = [path for path in sorted(folder.glob("*")) if path.suffix in (".pt", ".pth")]
    if not paths:
        if found := sorted(folder.glob("*.gguf")):
            raise ModelError(f"{folder} is a folder: name the GGUF file itself, {found[0]}")
        raise ModelError(
            f"{folder} contains no model: no specops.json, no genai_config.json, and no "
            "config.json with safetensors or a `.pt` file"
        )
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths)
        raise ModelError(f"{folder} contains several state dicts ({listed}): name the file itself")
    return paths


def _make_tokenizer(folder: Path, file: Path) -> None:
    """Write tokenizer.json from vocab.json and merges.txt, or else from tokenizer.model."""
    try:
        if all((folder / name).is_file() for name in BYTE_PAIRS):
            from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

            load: Callable[..., Any] = AutoTokenizer.from_pretrained
            # Never run code that comes with a checkpoint, and never ask whether to run it.
            load(str(folder), trust_remote_code=False).backend_tokenizer.save(str(file))
        else:
            make_tokenizer(folder).save(str(file))
    except Exception as error:  # transformers raises all that its readers raise
        raise ModelError(
            f"no {TOKENIZER} can be made of the tokenizer's files ({error}): put one beside them"
        ) from error


def main(arguments: list[str]) -> int:
    """Arrange `arguments[0]` in `arguments[1]`; return the exit status."""
    # If this fails, people read its output; they need not read that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    source, destination = map(Path, arguments)
    try:
        normalize(source, destination)
    except (ModelError, OSError) as error:
        print(f"specops.models.layout: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
