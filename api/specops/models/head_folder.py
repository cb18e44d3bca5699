"""Reads and writes a draft head's folder: a small graph, and a manifest that names its target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeGuard

from specops.models.folder import ModelError

HEAD_MANIFEST = "head.json"
HEAD_GRAPH = "head.onnx"
EPSILON = 1e-5  # of the norms in its graph
_DAMAGED = (OSError, ValueError, KeyError, TypeError)


def is_head(source: object) -> TypeGuard[Path]:
    """Return whether a draft is a head's folder and not a model."""
    return isinstance(source, Path) and (source / HEAD_MANIFEST).is_file()


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
                f"{path / HEAD_MANIFEST} cannot be used ({error!r}): make the head again with "
                "`specops draft make`"
            ) from error
        return head

    def write(self) -> None:
        """Write the manifest into the folder."""
        content = {key: value for key, value in asdict(self).items() if key != "path"}
        text = json.dumps(content) + "\n"
        (self.path / HEAD_MANIFEST).write_text(text, encoding="utf-8")
