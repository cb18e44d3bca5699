"""The OLMo 2 family: norms of what parts give, not of what they get; and of all queries and keys.

Tensor names are those of transformers' Olmo2ForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder, Norms


class OLMo2(GatedDecoder):
    """OLMo 2 from 1B to 32B."""

    name = "olmo2"
    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    optional_biases = ("attention_bias",)
    attention_norms = Norms("", "post_attention_layernorm")
    feed_forward_norms = Norms("", "post_feedforward_layernorm")
    width_norms = True
