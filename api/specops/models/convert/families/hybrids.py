"""Families in which some layers are recurrent, with a state of a fixed size, or convolve."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from specops.models.convert.families.family import Shapes
from specops.models.convert.families.gated_decoder import (
    FULL,
    Float,
    GatedDecoder,
    LayerAttention,
    Norms,
    Order,
    text_config,
)
from specops.models.convert.families.relatives import Granite
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.rope import Rotary
from specops.runtime.layer_shapes import GatedDelta, StateSpace

_CONV, _LINEAR = "conv", "linear_attention"
# The kernels' vectors, and their limits.
_CHANNELS_MULTIPLE, _VALUES_MULTIPLE = 16, 32
_MOST_TAPS, _LARGEST_HEAD = 8, 256
_MOST_HEADS, _LARGEST_STATE = 1024, 1 << 15


class _Hybrid(GatedDecoder):
    """Some layers have attention, the others a recurrence or a convolution in its place."""

    _kinds: list[str]

    @abstractmethod
    def other_tensors(self) -> Shapes:
        """What the other layers have in the place of attention, by the names in a layer."""

    @abstractmethod
    def mix_otherwise(self, index: int, x: str) -> str:
        """What they compute there."""

    def layer_tensors(self, index: int) -> Shapes:
        """The tensors of a layer of either kind."""
        layer = super().layer_tensors(index)
        if self._is_full(index):
            return layer
        layer = {part: shape for part, shape in layer.items() if not part.startswith("self_attn")}
        return layer | self.other_tensors()

    def mix(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """Attention, or what is in its place."""
        if self._is_full(index):
            return super().mix(index, x, rotary, window)
        return self.mix_otherwise(index, x)

    def _is_full(self, index: int) -> bool:
        """Whether a layer has attention; the one after the last, an MTP block's, has."""
        return index >= len(self._kinds) or self._kinds[index] == FULL


class LFM2(_Hybrid, architectures="Lfm2ForCausalLM"):
    """LFM2 and LFM2.5 without experts: most layers have a gated short convolution."""

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
        self._taps = _taps(config, "conv_L_cache", 3)
        if self.shape.hidden_size % _CHANNELS_MULTIPLE:
            raise config.error("hidden_size", f"must be a multiple of {_CHANNELS_MULTIPLE}")
        full = config.list_of(int, "full_attn_idxs")
        layers = range(self.shape.num_layers)
        usual = [FULL if full is None or index in full else _CONV for index in layers]
        self._kinds = _kinds(config, usual, _CONV)

    def other_tensors(self) -> Shapes:
        """A gated short convolution."""
        hidden = self.shape.hidden_size
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, self._taps),
            "conv.out_proj.weight": (hidden, hidden),
        }

    def mix_otherwise(self, index: int, x: str) -> str:
        """The convolution."""
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


class Qwen35(
    _Hybrid,
    architectures="Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration",
    model_types="qwen3_5_text qwen3_5",
):
    """Qwen3.5 without experts: most layers have the gated delta rule, the others gated attention.

    Also the language model of those that see images: the tokens of a text have the same position
    on all rotary axes.
    """

    name = "qwen3_5"
    defaults: ClassVar = {
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
    }
    optional_biases = ()
    head_norms = True
    partial_rotary = True
    has_mtp = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config := text_config(config) if "text_config" in config else config)
        config.require_flag("attn_output_gate", True)
        self._taps = _taps(config, "linear_conv_kernel_dim", 4)
        self._delta = delta = GatedDelta(
            config.integer("linear_num_key_heads", 16),
            config.integer("linear_num_value_heads", 32),
            config.integer("linear_key_head_dim", 128),
            config.integer("linear_value_head_dim", 128),
        )
        for key, size, multiple in (
            ("linear_key_head_dim", delta.key_size, _CHANNELS_MULTIPLE),
            ("linear_value_head_dim", delta.value_size, _VALUES_MULTIPLE),
        ):
            if size % multiple or size > _LARGEST_HEAD:
                raise config.error(key, f"must be a multiple of {multiple}, up to {_LARGEST_HEAD}")
        if delta.value_heads % delta.key_heads:
            problem = f"must be a multiple of linear_num_key_heads, {delta.key_heads}"
            raise config.error("linear_num_value_heads", problem)
        _check_heads(config, "linear_num_value_heads", delta.value_heads)
        _check_state(config, "linear_value_head_dim", delta.key_size * delta.value_size)
        # In a GGUF value head j belongs to key head j % key heads, not to j // values per key.
        self._tiled = config.flag("linear_value_heads_tiled", False)
        every = config.integer("full_attention_interval", 4)
        layers = self.shape.num_layers
        usual = [_LINEAR if number % every else FULL for number in range(1, layers + 1)]
        self._kinds = _kinds(config, usual, _LINEAR)
        self.ignored_tensors += ("*visual.*",)

    def projection_tensors(self) -> Shapes:
        """Each query head has as many rows again, for the gate of its output."""
        shapes, query = super().projection_tensors(), "self_attn.q_proj.weight"
        return shapes | {query: (2 * self.query_size, self.shape.hidden_size)}

    def other_tensors(self) -> Shapes:
        """The gated delta rule."""
        hidden, delta = self.shape.hidden_size, self._delta
        values = delta.value_heads * delta.value_size
        channels = values + 2 * delta.key_heads * delta.key_size
        parts: Shapes = {
            "in_proj_qkv.weight": (channels, hidden),
            "in_proj_z.weight": (values, hidden),
            "in_proj_a.weight": (delta.value_heads, hidden),
            "in_proj_b.weight": (delta.value_heads, hidden),
            "conv1d.weight": (channels, 1, self._taps),
            "A_log": (delta.value_heads,),
            "dt_bias": (delta.value_heads,),
            "norm.weight": (delta.value_size,),
            "out_proj.weight": (hidden, values),
        }
        return {f"linear_attn.{part}": shape for part, shape in parts.items()}

    def norm(self, stored: str) -> Float:
        """The checkpoint stores the weights minus 1."""
        return super().norm(stored) + np.float32(1)

    def queries_keys_values(self, index: int, x: str) -> list[str]:
        """The rows of gates are left out."""
        stored = f"{self.layer(index)}.self_attn"
        weight = self.checkpoint.matrix(*(f"{stored}.{part}_proj.weight" for part in "qkv"))
        keys = np.arange(self.key_size)
        rows = weight.reordered([self._query_rows(0), keys, keys])
        return [self.graph.linear(f"layers.{index}.qkv", x, rows)]

    def attend(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """Attention, times the sigmoid of a gate for each of its numbers."""
        name, graph = f"layers.{index}.attention_gate", self.graph
        stored = self.checkpoint.matrix(f"{self.layer(index)}.self_attn.q_proj.weight")
        gate = graph.linear(name, x, stored.reordered([self._query_rows(1)]))
        attended = super().attend(index, x, rotary, window)
        opened = graph.activation("sigmoid", f"{name}.sigmoid", gate)
        return graph.multiply(f"{name}.gated", attended, opened)

    def mix_otherwise(self, index: int, x: str) -> str:
        """The gated delta rule."""
        name, stored = f"layers.{index}", f"{self.layer(index)}.linear_attn"
        graph, read = self.graph, self.checkpoint.vector
        mixed = self.linear(index, "linear_attn.in_proj_qkv", x)
        gate = self.linear(index, "linear_attn.in_proj_z", x)
        few = self.checkpoint.matrix(*(f"{stored}.in_proj_{part}.weight" for part in "ab"))
        few_products = graph.linear(f"{name}.in_proj_ab", x, few, least_bits=8)
        a, b = graph.split(f"{name}.ab", few_products, [self._delta.value_heads] * 2)
        weight = read(f"{stored}.conv1d.weight").reshape(-1, self._taps)
        mixed = graph.short_convolution(f"{name}.convolution", mixed, weight)
        weights = {
            "decay": _decay(read(f"{stored}.A_log")),
            "bias": read(f"{stored}.dt_bias"),
            "norm": read(f"{stored}.norm.weight"),
        }
        x = graph.gated_delta(
            f"{name}.delta",
            [mixed, gate, a, b],
            weights,
            self._delta,
            epsilon=self._epsilon,
            tiled=self._tiled,
        )
        return self.linear(index, "linear_attn.out_proj", x)

    def _query_rows(self, half: int) -> Order:
        """The stored rows of queries (0) or of their gates (1)."""
        size = self.shape.head_dim
        heads = np.arange(self.shape.num_heads)[:, None] * 2 * size
        return (heads + half * size + np.arange(size)).reshape(-1)


class GraniteHybrid(
    _Hybrid, Granite, architectures="GraniteMoeHybridForCausalLM", model_types="granitemoehybrid"
):
    """Granite 4.0 without experts: most layers of the H models have Mamba-2."""

    name = "granitemoehybrid"
    defaults: ClassVar = {**Granite.defaults, "num_local_experts": 8}
    optional_biases = ("attention_bias",)
    must_be_false = ("mamba_proj_bias",)

    def __init__(self, config: ModelConfig) -> None:
        # A GGUF has the two halves of the feed-forward's first product as two tensors.
        self._fused = config.flag("fused_feed_forward", True)
        self._rotates = config.text("position_embedding_type", "none") == "rope"
        if self._fused:
            wide = config.integer("shared_intermediate_size", 1024)
            config = config.replaced(intermediate_size=wide)
            self.down = "shared_mlp.output_linear"
        super().__init__(config := config.with_defaults(self.defaults))
        config.require("num_local_experts", 0)
        config.require("mamba_n_groups", 1)  # of more groups the gated norm is another one
        config.require("time_step_limit", [0, float("inf")])
        if not self._rotates:
            self.layers = [LayerAttention(None)] * self.shape.num_layers
        self._taps = _taps(config, "mamba_d_conv", 4)
        self._has_bias = config.flag("mamba_conv_bias", True)
        heads = config.integer("mamba_n_heads", 128)
        inner = config.integer("mamba_expand", 2) * self.shape.hidden_size
        size = inner // heads
        config.require("mamba_d_head", size, "auto")
        state_size = config.integer("mamba_d_state", 256)
        self._space = StateSpace(heads, 1, size, state_size)
        if size * heads != inner or size % _VALUES_MULTIPLE:
            problem = f"must divide {inner} into multiples of {_VALUES_MULTIPLE}"
            raise config.error("mamba_n_heads", problem)
        if state_size % _CHANNELS_MULTIPLE or state_size > _LARGEST_HEAD:
            problem = f"must be a multiple of {_CHANNELS_MULTIPLE}, up to {_LARGEST_HEAD}"
            raise config.error("mamba_d_state", problem)
        _check_heads(config, "mamba_n_heads", heads)
        _check_state(config, "mamba_d_state", size * state_size)
        if kinds := config.list_of(str, "layer_types", self.shape.num_layers):
            known = {"mamba": _LINEAR, "attention": FULL}  # the names in published files
            config = config.replaced(layer_types=[known.get(kind, kind) for kind in kinds])
        self._kinds = _kinds(config, [_LINEAR] * self.shape.num_layers, _LINEAR)

    def rotary_tables(self, config: ModelConfig) -> dict[str, Rotary]:
        """None without rotation."""
        return super().rotary_tables(config) if self._rotates else {}

    def projection_tensors(self) -> Shapes:
        """Both halves of the feed-forward's first product are one tensor."""
        shapes, hidden = super().projection_tensors(), self.shape.hidden_size
        if not self._fused:
            return shapes
        shapes = {part: shape for part, shape in shapes.items() if not part.startswith("mlp.")}
        return shapes | {"shared_mlp.input_linear.weight": (2 * self.feed_forward_size, hidden)}

    def other_tensors(self) -> Shapes:
        """Mamba-2."""
        hidden, space = self.shape.hidden_size, self._space
        inner, channels = self._sizes()
        parts: Shapes = {
            "in_proj.weight": (inner + channels + space.heads, hidden),
            "conv1d.weight": (channels, 1, self._taps),
            **({"conv1d.bias": (channels,)} if self._has_bias else {}),
            **dict.fromkeys(("A_log", "D", "dt_bias"), (space.heads,)),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        }
        return {f"mamba.{part}": shape for part, shape in parts.items()}

    def gate_and_up(self, index: int, x: str) -> list[str]:
        """Two products, each with a half of the fused tensor."""
        if not self._fused:
            return super().gate_and_up(index, x)
        return self.halves(index, x, "shared_mlp.input_linear")

    def mix_otherwise(self, index: int, x: str) -> str:
        """Mamba-2."""
        name, stored = f"layers.{index}", f"{self.layer(index)}.mamba"
        graph, read = self.graph, self.checkpoint.vector
        inner, channels = self._sizes()
        gate, mixed, dt = (
            graph.linear(
                f"{name}.mamba_{part}",
                x,
                self.checkpoint.matrix_rows(f"{stored}.in_proj.weight", start, stop),
                least_bits=8 if part == "dt" else 0,
            )
            for part, start, stop in (
                ("gate", 0, inner),
                ("mixed", inner, inner + channels),
                ("dt", inner + channels, None),
            )
        )
        weight = read(f"{stored}.conv1d.weight").reshape(-1, self._taps)
        bias = read(f"{stored}.conv1d.bias") if self._has_bias else None
        mixed = graph.short_convolution(f"{name}.convolution", mixed, weight, bias)
        weights = {
            "decay": _decay(read(f"{stored}.A_log")),
            "bias": read(f"{stored}.dt_bias"),
            "skip": read(f"{stored}.D"),
        }
        x = graph.state_space(f"{name}.states", [mixed, gate, dt], weights, self._space)
        x = graph.rms_norm(f"{name}.mamba_norm", x, read(f"{stored}.norm.weight"), self._epsilon)
        x = self.linear(index, "mamba.out_proj", x)
        return self._part_output(f"{name}.mamba", x, index, self.attention_norms)

    def _sizes(self) -> tuple[int, int]:
        """Numbers of a token's values, and of what is convolved: values, B and C."""
        inner = self._space.heads * self._space.size
        return inner, inner + 2 * self._space.state_size


def _decay(logarithms: Float) -> Float:
    """The decay of states, from the checkpoint's `A_log`."""
    return -np.exp(logarithms.astype(np.float64)).astype(np.float32)


def _taps(config: ModelConfig, key: str, usual: int) -> int:
    """The number of tokens that a convolution reads."""
    taps = config.integer(key, usual)
    if not 1 <= taps <= _MOST_TAPS:
        raise config.error(key, f"must be 1 to {_MOST_TAPS}")
    return taps


def _check_heads(config: ModelConfig, key: str, heads: int) -> None:
    if heads > _MOST_HEADS:
        raise config.error(key, f"must be at most {_MOST_HEADS}")


def _check_state(config: ModelConfig, key: str, numbers: int) -> None:
    """Check a size by the resulting number of values in each head's state."""
    if numbers > _LARGEST_STATE:
        raise config.error(
            key, f"makes a head's state {numbers} numbers; at most {_LARGEST_STATE} are supported"
        )


def _kinds(config: ModelConfig, usual: list[str], other: str) -> list[str]:
    """The kinds of layers: those of config.json, or else the usual ones; some have attention."""
    kinds = config.list_of(str, "layer_types", len(usual)) or usual
    for kind in kinds:
        if kind not in (FULL, other):
            raise config.error("layer_types", f"is {kind}; supported are {FULL}, {other}")
    if FULL not in kinds:
        raise config.error("layer_types", "has no layer with attention, and the engine needs one")
    return kinds
