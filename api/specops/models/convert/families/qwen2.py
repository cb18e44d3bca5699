"""The Qwen2 family: Llama with biases on the query, key and value projections.

Tensor names are those of transformers' Qwen2ForCausalLM.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.checkpoint import Checkpoint, Matrix
from specops.models.convert.families.llama import Llama
from specops.models.convert.model_config import ModelConfig


class Qwen2(Llama):
    """Qwen2 and Qwen2.5, base and instruct."""

    name = "qwen2"
    default_context_length = 32768
    optional_biases = False  # it always has those of q, k and v

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Llama's and the three biases."""
        sizes = {"q": self.query_size, "k": self.key_size, "v": self.key_size}
        biases = {f"self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
        return {**super().layer_tensors(), **biases}

    def _qkv(
        self, checkpoint: Checkpoint, stored: str
    ) -> tuple[Matrix, NDArray[np.float32] | None]:
        weight, _ = super()._qkv(checkpoint, stored)
        return weight, checkpoint.vectors(*(f"{stored}.{part}_proj.bias" for part in "qkv"))
