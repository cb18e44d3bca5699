"""A draft head with random weights over a target's true output rows: it is mostly wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specops.heads.target_rows import output_rows
from specops.models.head_folder import HeadFolder
from specops.runtime.sampling import Floats
from tests.head_export import write_head


def random_weights(rows: Floats, seed: int = 0) -> dict[str, Floats]:
    """Weights of the layers by name, for the output rows [V, size] of a table."""
    rng, size = np.random.default_rng(seed), rows.shape[1]
    shapes = {
        "mix": (size, 2 * size),
        "gate": (2 * size, size),
        "up": (2 * size, size),
        "down": (size, 2 * size),
    }
    weights = {
        f"{name}.weight": (rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in ("token_norm", "state_norm", "inner_norm", "last_norm"):
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)
    other = rng.normal(size=(1, size)).astype(np.float32) * rows.std()
    return weights | {"table": np.concatenate([rows, other])}


def make_random_head(folder: Path, graph: Path, *, vocab: int, size: int) -> HeadFolder:
    """Write one for the target whose exported graph this is; it can guess every third token."""
    folder.mkdir(parents=True)
    tokens = tuple(range(0, vocab, 3))
    head = HeadFolder(folder, "target", vocab, size, tokens, ((1.0, 0.0), (0.5, 3.0)))
    write_head(head, random_weights(output_rows(graph, tokens, size)))
    return head
