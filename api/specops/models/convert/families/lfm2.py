"""LFM2 and LFM2.5: most layers have a gated short convolution."""

from typing import ClassVar

from specops.models.convert.families.family import Config, Shapes
from specops.models.convert.families.gated_decoder import FULL, Norms
from specops.models.convert.families.hybrid import CHANNELS_MULTIPLE, Hybrid
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.model_config import ModelConfig

_CONV = "conv"


class LFM2(Hybrid, architectures="Lfm2ForCausalLM", gguf="lfm2"):
    """LFM2 and LFM2.5 without experts."""

    name = "lfm2"
    defaults: ClassVar = {
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }
    must_be_false = ("conv_bias",)
    optional_biases = ()
    attention_norms = Norms("operator_norm")
    feed_forward_norms = Norms("ffn_norm")
    head_norms = True
    query_key_norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    epsilon = ("norm_eps", 1e-5)
    final_norm = "embedding_norm"
    output, down = "self_attn.out_proj", "feed_forward.w2"
    up = ("feed_forward.w1", "feed_forward.w3")
    other = _CONV
    kernel_size = ("conv_L_cache", 3)
    gguf_integers: ClassVar = {"conv_L_cache": "{arch}.shortconv.l_cache"}
    gguf_names: ClassVar = {
        "token_embd_norm": "model.embedding_norm",
        **{f"blk.shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
    }

    def __init__(self, config: ModelConfig) -> None:
        if "tie_embedding" in config:  # transformers' first name of the key wins there, too
            config = config.replaced(tie_word_embeddings=config.flag("tie_embedding", True))
        config = config.with_defaults({"intermediate_size": 12288})
        super().__init__(config.replaced(intermediate_size=_feed_forward_size(config)))
        if self.shape.hidden_size % CHANNELS_MULTIPLE:
            raise config.error("hidden_size", f"must be a multiple of {CHANNELS_MULTIPLE}")

    def usual_kinds(self) -> list[str]:
        """The kinds in an older list, or attention in all layers."""
        full, layers = self.config.list_of(int, "full_attn_idxs"), range(self.shape.num_layers)
        return [FULL if full is None or index in full else _CONV for index in layers]

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """A file says the width as it is, too."""
        settings = super().gguf_settings(metadata, tensors, config)
        return settings | {"block_auto_adjust_ff_dim": False}

    def other_tensors(self) -> Shapes:
        """A gated short convolution."""
        hidden = self.shape.hidden_size
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, self._kernel_size),
            "conv.out_proj.weight": (hidden, hidden),
        }

    def mix_otherwise(self, index: int, x: str) -> str:
        """The convolution."""
        x = self.linear(index, "conv.in_proj", x)
        x = self.convolution(index, "conv.conv", x)
        return self.linear(index, "conv.out_proj", x)


def _feed_forward_size(config: ModelConfig) -> int:
    """The width, which most published files give 1.5 times too large."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return size
