"""The GPT-2 family: norms first, GELU, weights stored transposed.

Tensor names are those of transformers' GPT2LMHeadModel.
"""

from __future__ import annotations

from specops.models.convert.families.layer_norm_decoder import LayerNormDecoder, StoredNames
from specops.models.convert.model_config import ModelConfig

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


class GPT2(LayerNormDecoder):
    """GPT-2 in all sizes, DistilGPT-2 and what else calls itself GPT2LMHeadModel."""

    name = "gpt2"
    conv1d = True
    ignored_tensors = ("*.attn.bias", "*.attn.masked_bias")  # the causal mask, as a buffer
    sizes = ("n_embd", "n_layer", "n_head", "n_positions")
    names = StoredNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        attention_output="attn.c_proj",
        feed_forward_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
    )

    def __init__(self, config: ModelConfig) -> None:
        if config.text("activation_function", "gelu_new") not in _TANH_GELU:
            raise config.error("activation_function", f"must be one of {', '.join(_TANH_GELU)}")
        config.require_flag("scale_attn_weights", True)
        config.require_flag("scale_attn_by_inverse_layer_idx", False)
        config.require_flag("add_cross_attention", False)
        super().__init__(
            config,
            feed_forward_size=config.integer("n_inner", 4 * config.integer("n_embd")),
            epsilon=config.number("layer_norm_epsilon", 1e-5),
        )

    def activation(self, name: str, x: str) -> str:
        """GELU."""
        return self.graph.gelu_tanh(name, x)
