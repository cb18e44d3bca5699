"""Writes a checkpoint as NNCF rounds it best: int4 with AWQ and scale estimation, over a text.

Runs in an environment of its own: `python -m bench.peers.nncf_model CHECKPOINT MODEL_XML TEXTS`.
TEXTS is a file of JSON, lists of token ids. The graph is that of `bench.peers.openvino_model`, with
its weights as they come; NNCF leaves embedding and head at 8 bits, as we do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
from openvino import opset13 as ops
from safetensors import safe_open

from bench.peers.openvino_model import Llama, Node

GROUP = 32


class _Unrounded(Llama):
    """Weights in float32: NNCF is to choose their codes."""

    def table(self, name: str) -> Node:
        return ops.constant(self._read(name).astype(np.float32))

    def product_weights(self, name: str) -> Node:
        return ops.constant(self._read(name).astype(np.float32))


def inputs(text: list[int]) -> dict[str, Any]:
    """What the graph takes for a whole text."""
    places = np.arange(len(text), dtype=np.int64)
    return {
        "input_ids": np.array([text], np.int64),
        "attention_mask": np.ones((1, len(text)), np.int64),
        "position_ids": places[None],
        "beam_idx": np.zeros(1, np.int32),
        "logit_positions": places,
    }


def main(checkpoint: Path, destination: Path, texts: Path) -> None:
    """Write the model's two files."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    with safe_open(checkpoint / "model.safetensors", framework="np") as tensors:
        names = set(tensors.keys())

        def read(name: str) -> Any:
            tied = name == "lm_head.weight" and name not in names
            return tensors.get_tensor("model.embed_tokens.weight" if tied else name)

        model = _Unrounded(config, read).model()
    rounded = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=GROUP,
        ratio=1.0,
        awq=True,
        scale_estimation=True,
        dataset=nncf.Dataset(json.loads(texts.read_text(encoding="utf-8")), inputs),
    )
    ov.save_model(rounded, destination)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
