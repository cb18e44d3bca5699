"""Reads and writes draft heads' folders, and tells heads' checkpoints from models.

A head that is published as an EAGLE-3 checkpoint is converted for its target (`EagleFolder`). One
that `specops draft make` wrote is a small graph and a manifest that names its target.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from specops.models.folder import ModelError

HEAD_MANIFEST = "head.json"
HEAD_GRAPH = "head.onnx"
FUSION_GRAPH = "fusion.onnx"
EAGLE = (  # the architectures of EAGLE-3 heads, in lower case
    *("llamaforcausallmeagle3", "llamaforcausallmeeagle3", "eagle3llamaforcausallm"),
    "llamaeagle3draftmodel",
    *("eagle3speculator", "eagle3draftmodel", "qwen3eagle3model"),
)
# In names of heads' architectures, in lower case, those included that cannot be run.
_HEADS = ("eagle", "medusa", "speculator", "draftmodel", "dflash", "mtp")
_LAYER, _ARCHITECTURES = "transformer_layer_config", "architectures"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def is_head(source: object) -> TypeGuard[Path]:
    """Return whether a draft is a head's folder and not a model."""
    return isinstance(source, Path) and (source / HEAD_MANIFEST).is_file()


def is_head_checkpoint(source: Path) -> bool:
    """Return whether a folder is the checkpoint of a head and not of a model."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        names = str(settings_of_head(config)[_ARCHITECTURES]).lower()
    except _DAMAGED:
        return False
    return any(part in names for part in _HEADS)


def settings_of_head(config: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a head's config.json side by side, whichever layout it has.

    Settings of the layer itself are in `transformer_layer_config` in one layout, some others in
    `eagle_config`.
    """
    given = {key: value for key, value in config.items() if value is not None}
    layer = {key: value for key, value in given.pop(_LAYER, {}).items() if value is not None}
    if layer:  # then this is what programs take for granted
        given.setdefault("norm_before_residual", True)
        given.setdefault(_ARCHITECTURES, [f"{config.get('speculators_model_type', '')}speculator"])
        layer.pop(_ARCHITECTURES, None)  # the target's
    return {**given.pop("eagle_config", {}), **given, **layer}


@dataclass(frozen=True, slots=True)
class EagleFolder:
    """A head that was converted for its target.

    Attributes:
        path: the folder.
        layers: the target's layers whose inputs it reads.
        tokens: the token ids that it can draft, in the order of its output rows.
        calibration: see `HeadFolder`; empty: nothing is known of it.
    """

    path: Path
    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    calibration: tuple[tuple[float, float], ...]

    @property
    def graphs(self) -> list[Path]:
        """The file of the layer's graph; behind it, the one that joins the states of several
        layers, if there is one."""
        return [file for name in (HEAD_GRAPH, FUSION_GRAPH) if (file := self.path / name).is_file()]

    @classmethod
    def read(cls, path: Path) -> EagleFolder:
        """Read the manifest of a conversion, whose checksums were compared."""
        content = json.loads((path / HEAD_MANIFEST).read_text(encoding="utf-8"))
        for key in ("layers", "tokens"):
            content[key] = tuple(content[key])
        content["calibration"] = tuple((a, b) for a, b in content["calibration"])
        return cls(path=path, **content)

    def write(self) -> None:
        """Write the manifest into the folder."""
        _write(self)


@dataclass(frozen=True, slots=True)
class MtpBlock:
    """A model's own draft head, which was converted with it.

    It reads the model's last hidden states, and guesses the model's first tokens.

    Attributes:
        graph: the file of its graph, in the model's folder.
        calibration: nothing is known.
    """

    graph: Path
    calibration: tuple[tuple[float, float], ...] = ()

    @property
    def path(self) -> Path:
        """The model's folder."""
        return self.graph.parent


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A head's manifest.

    Attributes:
        path: the folder.
        target: the name of the head's target.
        vocab_size: the target's vocabulary.
        hidden_size: the size of the target's hidden states.
        tokens: the token ids that the head can draft, in the order of its table.
        calibration: for each draft token in a row a factor and a summand. They turn the logit of
            the head's confidence into the logit of the probability that the token is accepted.
    """

    path: Path
    target: str
    vocab_size: int
    hidden_size: int
    tokens: tuple[int, ...]
    calibration: tuple[tuple[float, float], ...]

    @property
    def graph(self) -> Path:
        """The file of the head's graph."""
        return self.path / HEAD_GRAPH

    @classmethod
    def read(cls, path: Path) -> HeadFolder:
        """Read a head's manifest.

        Raises:
            ModelError: the manifest lacks a field, or a field is not valid.
        """
        try:
            content = json.loads((path / HEAD_MANIFEST).read_text(encoding="utf-8"))
            head = cls(
                path=path,
                target=str(content["target"]),
                vocab_size=int(content["vocab_size"]),
                hidden_size=int(content["hidden_size"]),
                tokens=tuple(map(int, content["tokens"])),
                calibration=tuple((float(a), float(b)) for a, b in content["calibration"]),
            )
            if not head.calibration or not all(0 <= one < head.vocab_size for one in head.tokens):
                raise ValueError("no guess, or a token that the target does not have")
        except _DAMAGED as error:
            raise ModelError(
                f"{path / HEAD_MANIFEST} cannot be used ({error!r}): make another head with "
                "`specops draft make`, in another folder"
            ) from error
        return head

    def write(self) -> None:
        """Write the manifest into the folder."""
        _write(self)


def _write(head: EagleFolder | HeadFolder) -> None:
    content = {key: value for key, value in asdict(head).items() if key != "path"}
    (head.path / HEAD_MANIFEST).write_text(json.dumps(content) + "\n", encoding="utf-8")
