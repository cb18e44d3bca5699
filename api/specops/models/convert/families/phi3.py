"""The Phi-3 family: Llama with fused projections and attention over a sliding window.

Tensor names are those of transformers' Phi3ForCausalLM. Dropout is not drawn: it does nothing
after training.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.checkpoint import Checkpoint, Matrix
from specops.models.convert.families.llama import Llama
from specops.models.convert.model_config import ModelConfig

_LONG_ROPE = ("longrope", "su", "yarn")  # transformers reads all three as longrope


class Phi3(Llama):
    """Phi-3 Mini and Medium with a context of 4k."""

    name = "phi3"
    default_context_length = 4096
    optional_biases = False

    partial_rotary = True

    def __init__(self, config: ModelConfig) -> None:
        for key in ("rope_parameters", "rope_scaling"):
            scaling = config.section(key)
            kind = "default" if scaling is None else _kind(scaling)
            if kind in _LONG_ROPE:
                raise config.error(
                    key,
                    f"asks for {kind} scaling, which takes other frequencies for long prompts "
                    "than for short ones and cannot be exported; use the model with a 4k context",
                )
        super().__init__(config)
        self.window = config.optional_integer("sliding_window")

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Query, key and value in one tensor; gate and up in one."""
        hidden, wide = self.shape.hidden_size, self.feed_forward_size
        return {
            "input_layernorm.weight": (hidden,),
            "self_attn.qkv_proj.weight": (self.query_size + 2 * self.key_size, hidden),
            "self_attn.o_proj.weight": (hidden, self.query_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_up_proj.weight": (2 * wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }

    def _qkv(
        self, checkpoint: Checkpoint, stored: str
    ) -> tuple[Matrix, NDArray[np.float32] | None]:
        return checkpoint.matrix(f"{stored}.qkv_proj.weight"), None

    def _gate_and_up(self, checkpoint: Checkpoint, stored: str) -> tuple[Matrix, Matrix]:
        name, wide = f"{stored}.gate_up_proj.weight", self.feed_forward_size
        return checkpoint.matrix_rows(name, 0, wide), checkpoint.matrix_rows(name, wide, 2 * wide)


def _kind(scaling: ModelConfig) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))
