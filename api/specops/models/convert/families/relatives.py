"""Llama and its relatives: each is a few settings of `GatedDecoder`.

Tensor names follow transformers' classes.
"""

from typing import ClassVar

import numpy as np

from specops.models.convert.families.gated_decoder import (
    LOCAL,
    QKV,
    GatedDecoder,
    LayerAttention,
    Norms,
    text_config,
)
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.rope import trained_positions


class Llama(GatedDecoder, architectures="LlamaForCausalLM", gguf="llama"):
    """Llama 1 to 3, TinyLlama, SmolLM 1 and 2, and every other LlamaForCausalLM."""

    name = "llama"
    gguf_interleaved = True
    defaults: ClassVar = {"max_position_embeddings": 2048}


class Mistral(GatedDecoder, architectures="MistralForCausalLM", gguf="llama"):
    """Mistral 7B, Nemo, Small: Llama, some of them with attention over a sliding window."""

    name = "mistral"
    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
    optional_biases = ()
    windowed = gguf_interleaved = True


class Ministral3(Mistral, architectures="Ministral3ForCausalLM", gguf="mistral3"):
    """Ministral 3: Mistral with YaRN; far queries are scaled up, as in Llama 4."""

    name = "ministral3"
    defaults: ClassVar = {
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        scaling = self.config.section("rope_parameters") or self.config.section("rope_scaling")
        beta = scaling.factor("llama_4_scaling_beta") if scaling else None
        if scaling is None or beta is None:
            return
        context = self.shape.context_length
        trained = trained_positions(context, scaling, self.config)
        if context > trained:
            times = np.arange(context, dtype=np.int64) // trained
            self.query_factors = (1 + beta * np.log1p(times)).astype(np.float32)


class Mistral3(Ministral3, architectures="Mistral3ForConditionalGeneration"):
    """The language model of Mistral Small 3.1 and 3.2 and of Ministral 3, which see images."""

    name = "mistral3"
    defaults: ClassVar = Mistral.defaults
    stem = "language_model.model"

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        newer = text.text("model_type", Mistral.name) == Ministral3.name
        super().__init__(text.with_defaults(Ministral3.defaults if newer else {}))


class Qwen2(GatedDecoder, architectures="Qwen2ForCausalLM", gguf="qwen2 qwen2vl"):
    """Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

    name = "qwen2"
    defaults: ClassVar = {"max_position_embeddings": 32768}
    optional_biases = ()
    always_biased = QKV
    must_be_false = ("use_sliding_window",)


class Qwen3(GatedDecoder, architectures="Qwen3ForCausalLM", gguf="qwen3 qwen3vl"):
    """Qwen3 from 0.6B to 32B, without experts: Llama with a norm of every query and key head."""

    name = "qwen3"
    defaults: ClassVar = {"max_position_embeddings": 32768, "head_dim": 128}
    optional_biases = ("attention_bias",)
    head_norms = True
    must_be_false = ("use_sliding_window",)
    has_mtp = True


class Qwen2VL(
    Qwen2,
    architectures="Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration",
    model_types="qwen2_vl qwen2_5_vl",
):
    """The language model of Qwen2-VL and Qwen2.5-VL; published configs do not set it apart."""

    name = "qwen2_vl"
    defaults: ClassVar = {**Qwen2.defaults, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}


class Qwen3VL(Qwen3, architectures="Qwen3VLForConditionalGeneration"):
    """The language model of Qwen3-VL, without experts."""

    name = "qwen3_vl"
    defaults: ClassVar = {
        **Qwen3.defaults,
        "max_position_embeddings": 128000,
        "rope_theta": 500_000.0,
    }


class SmolLM3(GatedDecoder, architectures="SmolLM3ForCausalLM", gguf="smollm3"):
    """SmolLM3: Llama, but some layers do not rotate queries and keys."""

    name = "smollm3"
    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }
    gguf_interleaved = True
    must_be_false = ("use_sliding_window",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        layers = self.shape.num_layers
        rotates = config.list_of(int, "no_rope_layers", layers)  # 1 means that the layer rotates
        if rotates is None:
            interval = config.integer("no_rope_layer_interval", 4)
            rotates = [int((index + 1) % interval != 0) for index in range(layers)]
        self.layers = [LayerAttention("" if turns else None) for turns in rotates]


class OLMo2(GatedDecoder, architectures="Olmo2ForCausalLM", gguf="olmo2"):
    """OLMo 2 from 1B to 32B: norms of the outputs of attention and feed-forward, not of the inputs.

    All query heads share one norm, and all key heads.
    """

    name = "olmo2"
    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    optional_biases = ("attention_bias",)
    attention_norms = Norms("", "post_attention_layernorm")
    feed_forward_norms = Norms("", "post_feedforward_layernorm")
    width_norms = True


class OLMo3(OLMo2, architectures="Olmo3ForCausalLM", gguf="olmo2"):
    """OLMo 3: OLMo 2 with a window in three layers of four; only the others scale the rotation."""

    name = "olmo3"
    defaults: ClassVar = {**OLMo2.defaults, "rope_theta": 500_000.0, "sliding_window": 4096}
    full_layer_every = 4
    local_table = LOCAL


class Exaone4(GatedDecoder, architectures="Exaone4ForCausalLM", gguf="exaone4"):
    """EXAONE 4: norms of outputs and of heads; with a window, full layers do not rotate."""

    name = "exaone4"
    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    optional_biases = ()
    attention_norms = Norms("", "post_attention_layernorm")
    feed_forward_norms = Norms("", "post_feedforward_layernorm")
    head_norms = True
    full_layer_every = 4
    full_table = None


class Ernie45(
    GatedDecoder, architectures="Ernie4_5ForCausalLM Ernie4_5_ForCausalLM", gguf="ernie4_5"
):
    """ERNIE 4.5 without experts: Llama that rotates pairs of neighbours."""

    name = "ernie4_5"
    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    optional_biases = ("use_bias",)
    interleaved = True


class GLM4(GatedDecoder, architectures="Glm4ForCausalLM", gguf="glm4"):
    """GLM-4-0414: norms around each part; pairs of neighbours in half of each head are rotated."""

    name = "glm4"
    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "attention_output_bias": False,
        "partial_rotary_factor": 0.5,
    }
    optional_biases = ("attention_bias",)
    attention_norms = Norms("input_layernorm", "post_self_attn_layernorm")
    feed_forward_norms = Norms("post_attention_layernorm", "post_mlp_layernorm")
    interleaved = partial_rotary = fused_gate = True
    up = ("mlp.gate_up_proj",)


class Phi3(GatedDecoder, architectures="Phi3ForCausalLM", gguf="phi3"):
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and attention over a sliding window.

    Dropout is left out: it does nothing after training.
    """

    name = "phi3"
    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    optional_biases = ()
    windowed = partial_rotary = fused_gate = True
    qkv = ("self_attn.qkv_proj",)
    up = ("mlp.gate_up_proj",)


# -- with layer norms, some of them without a gate -------------------------------------------------


class Cohere2(GatedDecoder, architectures="Cohere2ForCausalLM", gguf="cohere2"):
    """Command R7B and Command A: attention and feed-forward in parallel, norms without bias.

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
    gguf_numbers: ClassVar = {"logit_scale": "{arch}.logit_scale"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.logit_scale = config.number("logit_scale", 0.0625)


class Starcoder2(GatedDecoder, architectures="Starcoder2ForCausalLM", gguf="starcoder2"):
    """StarCoder2 from 3B to 15B: layer norms, biases, a feed-forward without a gate."""

    name = "starcoder2"
    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_bias": True,
    }
    optional_biases = ("use_bias",)
    windowed = layer_norms = True
    activation = ("hidden_act", "gelu_pytorch_tanh")
    epsilon = ("norm_epsilon", 1e-5)
    up = ("mlp.c_fc",)
    down = "mlp.c_proj"


class Phi(GatedDecoder, architectures="PhiForCausalLM", gguf="phi2"):
    """Phi-1, 1.5 and 2: attention and feed-forward in parallel, biases, also of the head."""

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
