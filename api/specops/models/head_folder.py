"""Reads and writes converted draft heads, and tells heads' checkpoints from models."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from specops.models.errors import ModelError

NGRAMS = "ngrams.npy"  # a table of n-grams, alone or with a head or draft model
HEAD_MANIFEST = "head.json"
HEAD_GRAPH = "head.onnx"
FUSION_GRAPH = "fusion.onnx"
_EAGLE = (  # the architectures of EAGLE-3 heads, in lower case
    *("llamaforcausallmeagle3", "llamaforcausallmeeagle3", "eagle3llamaforcausallm"),
    "llamaeagle3draftmodel",
    *("eagle3speculator", "eagle3draftmodel", "qwen3eagle3model"),
    *("eagle3qwen2_5vlforcausallm", "eagle3qwen3vlforcausallm"),
)
# In names of heads' architectures, in lower case, those included that cannot be run.
_HEADS = ("eagle", "medusa", "speculator", "draftmodel", "dflash", "mtp")
_LAYER, _OWN, _ARCHITECTURES = "transformer_layer_config", "eagle_config", "architectures"
_TARGETS_NAME, _ROWS = "llamaforcausallm", "draft_vocab_size"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def is_head_checkpoint(source: Path) -> bool:
    """Return whether a folder is the checkpoint of a head and not of a model.

    Raises:
        ModelError: its config.json is damaged.
    """
    file = source / "config.json"
    if not file.is_file():
        return False
    try:
        settings = settings_of_head(json.loads(file.read_text(encoding="utf-8")))
    except _DAMAGED as error:
        raise ModelError(f"{file} is damaged ({error}): download it again") from error
    names = str(settings.get(_ARCHITECTURES)).lower()
    return _ROWS in settings or any(part in names for part in _HEADS)


def is_eagle(name: str, *, says_rows: bool) -> bool:
    """Return whether a head with this architecture is an EAGLE-3 head.

    Those of EAGLE's authors have the name of the target's, and say how many tokens they guess.
    """
    name = name.lower()
    return name in _EAGLE or (name == _TARGETS_NAME and says_rows)


def settings_of_head(config: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a head's config.json side by side, whichever layout it has.

    Settings of the layer itself are in `transformer_layer_config` in one layout, some others in
    `eagle_config`.

    Raises:
        TypeError: what should hold settings is something else.
    """
    if not isinstance(config, dict) or not all(
        isinstance(config.get(name) or {}, dict) for name in (_LAYER, _OWN)
    ):
        raise TypeError("settings must be JSON objects")
    given = {key: value for key, value in config.items() if value is not None}
    layer = {key: value for key, value in given.pop(_LAYER, {}).items() if value is not None}
    if layer:  # then programs take this for granted
        given.setdefault("norm_before_residual", True)
        given.setdefault(_ARCHITECTURES, [f"{config.get('speculators_model_type', '')}speculator"])
        layer.pop(_ARCHITECTURES, None)  # the target's
    return {**given.pop(_OWN, {}), **given, **layer}


@dataclass(frozen=True, slots=True)
class EagleFolder:
    """A head that was converted for its target.

    Attributes:
        path: the folder.
        layers: the target's layers whose inputs it reads.
        tokens: the token ids that it can draft, in the order of its output rows.
    """

    path: Path
    layers: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def graphs(self) -> list[Path]:
        """The file of the layer's graph; after it, the one that joins the states of several
        layers, if there is one."""
        return [file for name in (HEAD_GRAPH, FUSION_GRAPH) if (file := self.path / name).is_file()]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the manifest of a conversion, whose checksums were compared."""
        content = json.loads((path / HEAD_MANIFEST).read_text(encoding="utf-8"))
        return cls(path, *(tuple(content[key]) for key in ("layers", "tokens")))

    def write(self) -> None:
        """Write the manifest into the folder."""
        content = {key: value for key, value in asdict(self).items() if key != "path"}
        (self.path / HEAD_MANIFEST).write_text(json.dumps(content) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MtpBlock:
    """A model's own draft head, which was converted with it.

    It reads the model's last hidden states, and guesses the model's first tokens.

    Attributes:
        graph: the file of its graph, in the model's folder.
    """

    graph: Path

    @property
    def path(self) -> Path:
        """The model's folder."""
        return self.graph.parent
