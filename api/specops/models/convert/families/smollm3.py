"""The SmolLM3 family: Llama with some layers that rotate nothing.

Tensor names are those of transformers' SmolLM3ForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder, LayerAttention
from specops.models.convert.model_config import ModelConfig


class SmolLM3(GatedDecoder):
    """SmolLM3, base and instruct."""

    name = "smollm3"
    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)
        layers = self.shape.num_layers
        rotates = config.integers("no_rope_layers", layers)  # 1: rotates, whatever the name says
        if rotates is None:
            interval = config.integer("no_rope_layer_interval", 4)
            rotates = [int((index + 1) % interval != 0) for index in range(layers)]
        self.layers = [LayerAttention("" if turns else None) for turns in rotates]
