"""The Qwen2 family: Llama with biases on the query, key and value projections.

Tensor names are those of transformers' Qwen2ForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder
from specops.models.convert.model_config import ModelConfig


class Qwen2(GatedDecoder):
    """Qwen2 and Qwen2.5, base and instruct."""

    name = "qwen2"
    defaults: ClassVar = {"max_position_embeddings": 32768}
    optional_biases = ()  # it always has those of q, k and v

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)
        self.biased = [f"self_attn.{part}_proj" for part in "qkv"]
