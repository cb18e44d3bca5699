"""The Gemma 3 family: norms before and after each part, local and global layers, scaled embedding.

Tensor names are those of transformers' Gemma3ForCausalLM. Of the multimodal models, the language
model is exported.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from specops.models.convert.families.gated_decoder import (
    FULL,
    SLIDING,
    Float,
    GatedDecoder,
    Norms,
    text_config,
)
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.rope import Rotary, plain_rotary, rotary

_LOCAL_TABLE = "local_"


class Gemma3(GatedDecoder, architectures="Gemma3ForCausalLM", model_types="gemma3_text"):
    """Gemma 3 of 270M and 1B, and the language models of 4B to 27B."""

    name = "gemma3"
    defaults: ClassVar = {  # published configs leave these keys out
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    optional_biases = ("attention_bias",)
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    attention_norms = Norms("input_layernorm", "post_attention_layernorm")
    feed_forward_norms = Norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
    head_norms = True
    must_be_false = ("use_bidirectional_attention",)
    full_layer_every = 6
    local_table = _LOCAL_TABLE

    def __init__(self, config: ModelConfig) -> None:
        config = config.with_defaults(self.defaults)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if key in config:
                raise config.error(key, "must be absent to be exported for this family")
        super().__init__(config)
        self.embedding_scale = self.shape.hidden_size**0.5
        self.attention_scale = config.number("query_pre_attn_scalar") ** -0.5

    def rotary_tables(self, config: ModelConfig) -> dict[str, Rotary]:
        """One table for global layers and one for local layers; only the global one is scaled."""
        size, positions = self.shape.head_dim, self.shape.context_length
        given = config.section("rope_parameters")
        wide, narrow = (config.with_defaults({"rope_theta": theta}) for theta in (1e6, 1e4))
        if given is None:
            return {
                "": rotary(wide, size, positions),
                _LOCAL_TABLE: plain_rotary(
                    size, positions, config.number("rope_local_base_freq", 1e4)
                ),
            }
        return {  # transformers 5 has a section for each kind of layer
            "": rotary(wide, size, positions, scaling=given.section(FULL)),
            _LOCAL_TABLE: rotary(narrow, size, positions, scaling=given.section(SLIDING)),
        }

    def norm(self, stored: str) -> Float:
        """The checkpoint stores the weights minus 1."""
        return super().norm(stored) + np.float32(1)


class Gemma3Multimodal(Gemma3, architectures="Gemma3ForConditionalGeneration"):
    """The language model of Gemma3ForConditionalGeneration."""

    stem = "language_model.model"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(text_config(config))
        self.ignored_tensors += ("*vision_tower.*", "*multi_modal_projector.*")
