"""Llama and its close relatives: each is a few settings of `GatedDecoder`.

Tensor names are those of transformers' classes.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.family import Shapes
from specops.models.convert.families.gated_decoder import GatedDecoder, LayerAttention, Norms
from specops.models.convert.model_config import ModelConfig


class Llama(GatedDecoder):
    """Llama 1 to 3, TinyLlama, SmolLM 1 and 2, and every other LlamaForCausalLM."""

    name = "llama"
    defaults: ClassVar = {"max_position_embeddings": 2048}


class Mistral(GatedDecoder):
    """Mistral 7B, Nemo, Small: Llama, some of them with attention over a sliding window."""

    name = "mistral"
    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
    optional_biases = ()
    windowed = True


class Qwen2(GatedDecoder):
    """Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

    name = "qwen2"
    defaults: ClassVar = {"max_position_embeddings": 32768}
    optional_biases = ()  # those of q, k and v are always there

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)
        self.biased = [f"self_attn.{part}_proj" for part in "qkv"]


class Qwen3(GatedDecoder):
    """Qwen3 from 0.6B to 32B, without experts: Llama with a norm of every query and key head."""

    name = "qwen3"
    defaults: ClassVar = {"max_position_embeddings": 32768, "head_dim": 128}
    optional_biases = ("attention_bias",)
    head_norms = True

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("use_sliding_window", False)
        super().__init__(config)


class SmolLM3(GatedDecoder):
    """SmolLM3: Llama, but some layers do not rotate queries and keys."""

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
        rotates = config.list_of(int, "no_rope_layers", layers)  # 1 means that the layer rotates
        if rotates is None:
            interval = config.integer("no_rope_layer_interval", 4)
            rotates = [int((index + 1) % interval != 0) for index in range(layers)]
        self.layers = [LayerAttention("" if turns else None) for turns in rotates]


class Granite(GatedDecoder):
    """Granite 3.0 to 3.3, without experts: Llama with four multipliers."""

    name = "granite"
    defaults: ClassVar = {"max_position_embeddings": 2048}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = config.number("embedding_multiplier", 1.0)
        self.residual_scale = config.number("residual_multiplier", 1.0)
        self.attention_scale = config.number("attention_multiplier", 1.0)
        self.logit_scale = 1 / config.number("logits_scaling", 1.0)


class OLMo2(GatedDecoder):
    """OLMo 2 from 1B to 32B: norms of the outputs of attention and feed-forward, not of the inputs.

    All query heads share one norm, and all key heads.
    """

    name = "olmo2"
    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    optional_biases = ("attention_bias",)
    attention_norms = Norms("", "post_attention_layernorm")
    feed_forward_norms = Norms("", "post_feedforward_layernorm")
    width_norms = True


class Phi3(GatedDecoder):
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and attention over a sliding window.

    Dropout is not drawn: it does nothing after training.
    """

    name = "phi3"
    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    optional_biases = ()
    windowed = partial_rotary = True

    def projection_tensors(self) -> Shapes:
        """Query, key and value are one tensor; gate and up are one tensor."""
        hidden = self.shape.hidden_size
        return {
            "self_attn.qkv_proj.weight": (self.query_size + 2 * self.key_size, hidden),
            "mlp.gate_up_proj.weight": (2 * self.feed_forward_size, hidden),
        }

    def queries_keys_values(self, index: int, x: str) -> list[str]:
        """One product with the fused tensor."""
        return [self.linear(index, "self_attn.qkv_proj", x)]

    def gate_and_up(self, index: int, x: str) -> list[str]:
        """Two products, each with a half of the fused tensor."""
        stored, wide = f"{self.layer(index)}.mlp.gate_up_proj.weight", self.feed_forward_size
        rows = self.checkpoint.matrix_rows
        return [
            self.graph.linear(f"layers.{index}.{part}", x, rows(stored, start, stop))
            for part, start, stop in (("gate", 0, wide), ("up", wide, 2 * wide))
        ]
