"""The Qwen3 family: Llama with norms of every head of queries and keys.

Tensor names are those of transformers' Qwen3ForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder
from specops.models.convert.model_config import ModelConfig


class Qwen3(GatedDecoder):
    """Qwen3 from 0.6B to 32B, without experts."""

    name = "qwen3"
    defaults: ClassVar = {"max_position_embeddings": 32768, "head_dim": 128}
    optional_biases = ("attention_bias",)
    head_norms = True

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)
