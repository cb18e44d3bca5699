"""Llama, and its relatives that differ from it in a setting or two.

Tensor names are those of transformers' classes for them, such as LlamaForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder, LayerAttention, Norms
from specops.models.convert.model_config import ModelConfig


class Llama(GatedDecoder):
    """Llama 1 to 3, TinyLlama, SmolLM 1 and 2 and what else calls itself LlamaForCausalLM."""

    name = "llama"
    defaults: ClassVar = {"max_position_embeddings": 2048}


class Mistral(GatedDecoder):
    """Mistral 7B, Nemo, Small: some attend over a sliding window."""

    name = "mistral"
    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
    optional_biases = ()

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        window = config.optional_integer("sliding_window")
        self.layers = [LayerAttention(window=window)] * self.shape.num_layers


class Granite(GatedDecoder):
    """Granite 3.0 to 3.3, without experts: four multipliers."""

    name = "granite"
    defaults: ClassVar = {"max_position_embeddings": 2048}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = config.number("embedding_multiplier", 1.0)
        self.residual_scale = config.number("residual_multiplier", 1.0)
        self.attention_scale = config.number("attention_multiplier", 1.0)
        self.logit_scale = 1 / config.number("logits_scaling", 1.0)


class Qwen2(GatedDecoder):
    """Qwen2 and Qwen2.5, base and instruct: biases on queries, keys and values."""

    name = "qwen2"
    defaults: ClassVar = {"max_position_embeddings": 32768}
    optional_biases = ()  # it always has those of q, k and v

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)
        self.biased = [f"self_attn.{part}_proj" for part in "qkv"]


class Qwen3(GatedDecoder):
    """Qwen3 from 0.6B to 32B, without experts: norms of every head of queries and keys."""

    name = "qwen3"
    defaults: ClassVar = {"max_position_embeddings": 32768, "head_dim": 128}
    optional_biases = ("attention_bias",)
    head_norms = True

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)


class OLMo2(GatedDecoder):
    """OLMo 2 from 1B to 32B: norms of what parts give, and of all queries and keys together."""

    name = "olmo2"
    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    optional_biases = ("attention_bias",)
    attention_norms = Norms("", "post_attention_layernorm")
    feed_forward_norms = Norms("", "post_feedforward_layernorm")
    width_norms = True


class SmolLM3(GatedDecoder):
    """SmolLM3, base and instruct: some layers rotate nothing."""

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
