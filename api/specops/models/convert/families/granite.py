"""The Granite family: Llama with four multipliers.

Tensor names are those of transformers' GraniteForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder
from specops.models.convert.model_config import ModelConfig


class Granite(GatedDecoder):
    """Granite 3.0 to 3.3, without experts."""

    name = "granite"
    defaults: ClassVar = {"max_position_embeddings": 2048}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = config.number("embedding_multiplier", 1.0)
        self.residual_scale = config.number("residual_multiplier", 1.0)
        self.attention_scale = config.number("attention_multiplier", 1.0)
        self.logit_scale = 1 / config.number("logits_scaling", 1.0)
