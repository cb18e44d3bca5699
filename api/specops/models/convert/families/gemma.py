"""Gemma 2 and 3, and what all of Gemma share: norms around each part, a window in most layers."""

from typing import ClassVar

from specops.models.convert.families.family import Config
from specops.models.convert.families.gated_decoder import LOCAL, GatedDecoder, Norms
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.model_config import ModelConfig

_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # Gemma 2's own
_27B = (46, 62)  # layers of the models, one of each generation, with another scale of scores


class Gemma(GatedDecoder):
    """The common part."""

    defaults: ClassVar = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    }
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    attention_norms = Norms("input_layernorm", "post_attention_layernorm")
    feed_forward_norms = Norms("pre_feedforward_layernorm", "post_feedforward_layernorm")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = self.shape.hidden_size**0.5
        self.attention_scale = self.config.number("query_pre_attn_scalar") ** -0.5

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """The scale of scores, which llama.cpp knows by the number of layers."""
        size = config["head_dim"]
        if config["num_hidden_layers"] in _27B:
            size = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": size}


class Gemma2(Gemma, architectures="Gemma2ForCausalLM", gguf="gemma2"):
    """Gemma 2 from 2B to 27B: soft caps of scores and of logits."""

    name = "gemma2"
    defaults: ClassVar = {
        **Gemma.defaults,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    }
    optional_biases = ("attention_bias",)
    must_be_false = ("use_bidirectional_attention",)
    full_layer_every = 2
    offset_norms = True
    gguf_numbers: ClassVar = {key: f"{{arch}}.{key}" for key in _SOFT_CAPS}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.attention_softcap, self.logit_softcap = map(self.config.number, _SOFT_CAPS)

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """Soft caps, too, which files may leave out."""
        caps = {key: config[key] or usual for key, usual in _SOFT_CAPS.items()}
        return super().gguf_settings(metadata, tensors, config) | caps


class Gemma3(
    Gemma,
    architectures="Gemma3ForCausalLM Gemma3ForConditionalGeneration",
    model_types="gemma3_text gemma3",
    gguf="gemma3",
):
    """Gemma 3 of 270M and 1B, and the language models of 4B to 27B: norms of heads."""

    name = "gemma3"
    defaults: ClassVar = {  # published configs leave these keys out
        **Gemma.defaults,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
    }
    optional_biases = ("attention_bias",)
    head_norms = offset_norms = True
    must_be_false = ("use_bidirectional_attention",)
    full_layer_every = 6
    local_table = LOCAL
    gguf_keys = ("{arch}.rope.freq_base_swa",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for key in _SOFT_CAPS:
            if key in self.config:
                raise self.config.error(key, "must be absent to be exported for this family")

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """The base of the rotation in layers with a window, too, which files may leave out."""
        base = metadata.number("{arch}.rope.freq_base_swa", 10_000.0)
        return super().gguf_settings(metadata, tensors, config) | {"rope_local_base_freq": base}
