"""The Phi-3 family: Llama with fused projections and attention over a sliding window.

Tensor names are those of transformers' Phi3ForCausalLM. Dropout is not drawn: it does nothing
after training.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder, Shapes


class Phi3(GatedDecoder):
    """Phi-3 and Phi-3.5 Mini and Medium, Phi-4 and Phi-4 Mini."""

    name = "phi3"
    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    optional_biases = ()
    windowed = partial_rotary = True

    def projection_tensors(self) -> Shapes:
        """Query, key and value in one tensor; gate and up in one."""
        hidden = self.shape.hidden_size
        return {
            "self_attn.qkv_proj.weight": (self.query_size + 2 * self.key_size, hidden),
            "mlp.gate_up_proj.weight": (2 * self.feed_forward_size, hidden),
        }

    def queries_keys_values(self, index: int, x: str) -> list[str]:
        """One product of one tensor."""
        return [self.linear(index, "self_attn.qkv_proj", x)]

    def gate_and_up(self, index: int, x: str) -> list[str]:
        """The halves of a tensor."""
        stored, wide = f"{self.layer(index)}.mlp.gate_up_proj.weight", self.feed_forward_size
        rows = self.checkpoint.matrix_rows
        return [
            self.graph.linear(f"layers.{index}.{part}", x, rows(stored, start, stop))
            for part, start, stop in (("gate", 0, wide), ("up", wide, 2 * wide))
        ]
