"""Relatives of Llama with layer norms: rotary grouped-query attention, some of them without a gate.

Tensor names are those of transformers' classes.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import (
    QKV,
    GatedDecoder,
    Norms,
)
from specops.models.convert.model_config import ModelConfig


class Cohere2(GatedDecoder, architectures="Cohere2ForCausalLM"):
    """Command R7B and Command A: attention and feed-forward beside each other, norms without bias.

    Layers with a window rotate pairs of neighbours; the others do not rotate.
    """

    name = "cohere2"
    defaults: ClassVar = {
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    optional_biases = ("attention_bias",)
    epsilon = ("layer_norm_eps", 1e-5)
    feed_forward_norms = Norms("")
    layer_norms = parallel = interleaved = True
    norm_biases = False
    must_be_false = ("use_qk_norm",)
    full_layer_every = 4
    full_table = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.logit_scale = config.number("logit_scale", 0.0625)


class Starcoder2(GatedDecoder, architectures="Starcoder2ForCausalLM"):
    """StarCoder2 from 3B to 15B: layer norms, biases, a feed-forward without a gate."""

    name = "starcoder2"
    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    optional_biases = ()
    windowed = layer_norms = True
    activation = ("hidden_act", "gelu_pytorch_tanh")
    epsilon = ("norm_epsilon", 1e-5)
    up = ("mlp.c_fc",)
    down = "mlp.c_proj"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.flag("use_bias", True):
            self.biased = [*QKV, self.output, *self.up, self.down]


class Phi(GatedDecoder, architectures="PhiForCausalLM"):
    """Phi-1, 1.5 and 2: attention and feed-forward beside each other, biases, also of the head."""

    name = "phi"
    defaults: ClassVar = {"max_position_embeddings": 2048, "partial_rotary_factor": 0.5}
    optional_biases = ()
    partial_rotary = layer_norms = parallel = head_bias = True
    activation = ("hidden_act", "gelu_new")
    epsilon = ("layer_norm_eps", 1e-5)
    feed_forward_norms = Norms("")
    final_norm = "final_layernorm"
    output = "self_attn.dense"
    up = ("mlp.fc1",)
    down = "mlp.fc2"
    must_be_false = ("qk_layernorm",)
    always_biased = (*QKV, output, *up, down)
