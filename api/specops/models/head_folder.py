"""A draft head's folder: a small graph, and a manifest that says which target it reads and how."""

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
    """Whether what is to draft is a head's folder, not a model."""
    return isinstance(source, Path) and (source / HEAD_MANIFEST).is_file()


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """What a head's manifest says.

    Attributes:
        path: the folder.
        target: the name of the model that it was made for.
        vocab_size: that model's.
        hidden_size: that model's.
        tokens: those that it can guess, in the order of its table.
        calibration: for each guess in a row a factor and a summand: the logit of the probability
            that it is right follows from the logit of how sure it is.
    """

    path: Path
    target: str
    vocab_size: int
    hidden_size: int
    tokens: tuple[int, ...]
    calibration: tuple[tuple[float, float], ...]

    @property
    def graph(self) -> Path:
        """The file of its graph."""
        return self.path / HEAD_GRAPH

    @classmethod
    def read(cls, path: Path) -> HeadFolder:
        """Read a head's manifest.

        Raises:
            ModelError: it does not say what it must.
        """
        try:
            found = json.loads((path / HEAD_MANIFEST).read_text(encoding="utf-8"))
            head = cls(
                path=path,
                target=str(found["target"]),
                vocab_size=int(found["vocab_size"]),
                hidden_size=int(found["hidden_size"]),
                tokens=tuple(map(int, found["tokens"])),
                calibration=tuple((float(a), float(b)) for a, b in found["calibration"]),
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
