"""Families in which some layers have no attention but a state of a fixed size."""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.family import Shapes
from specops.models.convert.families.gated_decoder import FULL, GatedDecoder, Norms
from specops.models.convert.model_config import ModelConfig

_CONV = "conv"
_CHANNELS_MULTIPLE = 16  # the kernel's vectors
_MOST_TAPS = 8


class LFM2(GatedDecoder, architectures="Lfm2ForCausalLM"):
    """LFM2 and LFM2.5 without experts: most layers have a gated short convolution, no attention."""

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

    def __init__(self, config: ModelConfig) -> None:
        if "tie_embedding" in config:  # transformers' first name of the key wins there, too
            config = config.replaced(tie_word_embeddings=config.flag("tie_embedding", True))
        config = config.with_defaults({"intermediate_size": 12288})
        super().__init__(config.replaced(intermediate_size=_feed_forward_size(config)))
        self._taps = config.integer("conv_L_cache", 3)
        if not 1 <= self._taps <= _MOST_TAPS:
            raise config.error("conv_L_cache", f"must be 1 to {_MOST_TAPS}")
        if self.shape.hidden_size % _CHANNELS_MULTIPLE:
            raise config.error("hidden_size", f"must be a multiple of {_CHANNELS_MULTIPLE}")
        self._kinds = _kinds(config, self.shape.num_layers)

    def layer_tensors(self, index: int) -> Shapes:
        """A convolution in the place of attention, but in a few layers."""
        layer, hidden = super().layer_tensors(index), self.shape.hidden_size
        if self._kinds[index] == FULL:
            return layer
        layer = {part: shape for part, shape in layer.items() if not part.startswith("self_attn")}
        return layer | {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, self._taps),
            "conv.out_proj.weight": (hidden, hidden),
        }

    def mix(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """Attention or a convolution."""
        if self._kinds[index] == FULL:
            return super().mix(index, x, rotary, window)
        weight = self.checkpoint.vector(f"{self.layer(index)}.conv.conv.weight")
        x = self.linear(index, "conv.in_proj", x)
        weight = weight.reshape(self.shape.hidden_size, self._taps)
        x = self.graph.short_convolution(f"layers.{index}.convolution", x, weight)
        return self.linear(index, "conv.out_proj", x)


def _feed_forward_size(config: ModelConfig) -> int:
    """The width, which most published files give as 1.5 times what it is."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return size


def _kinds(config: ModelConfig, layers: int) -> list[str]:
    """Which layers have attention."""
    kinds = config.list_of(str, "layer_types", layers)
    if kinds is None:
        full = config.list_of(int, "full_attn_idxs")
        kinds = [FULL if full is None or index in full else _CONV for index in range(layers)]
    for kind in kinds:
        if kind not in (FULL, _CONV):
            raise config.error("layer_types", f"is {kind}; supported are {FULL}, {_CONV}")
    if FULL not in kinds:
        raise config.error("layer_types", "has no layer with attention, and the engine needs one")
    return kinds
