"""Qwen3.5: most layers have the gated delta rule, the others gated attention."""

from typing import ClassVar

import numpy as np

from specops.models.convert.families.family import Config, Shapes
from specops.models.convert.families.gated_decoder import FULL, Order, all_but_each
from specops.models.convert.families.hybrid import (
    CHANNELS_MULTIPLE,
    LINEAR,
    VALUES_MULTIPLE,
    Hybrid,
)
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.model_config import ModelConfig
from specops.runtime.kernels import GATED_DELTA
from specops.runtime.layer_shapes import GatedDelta

_RECURRENT = "{arch}.attention.recurrent_layers"


class Qwen35(
    Hybrid,
    architectures="Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration",
    model_types="qwen3_5_text qwen3_5",
    gguf="qwen35",
):
    """Qwen3.5 without experts.

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
    head_norms = partial_rotary = has_mtp = offset_norms = True
    query_parts = 2
    kernel_size = ("linear_conv_kernel_dim", 4)
    gguf_integers: ClassVar = {
        "linear_conv_kernel_dim": "{arch}.ssm.conv_kernel",
        "linear_num_key_heads": "{arch}.ssm.group_count",
        "linear_num_value_heads": "{arch}.ssm.time_step_rank",
        "linear_key_head_dim": "{arch}.ssm.state_size",
    }
    gguf_names: ClassVar = {
        "blk.ffn_norm": "",
        "blk.post_attention_norm": "post_attention_layernorm",
        "blk.attn_qkv": "linear_attn.in_proj_qkv",
        "blk.attn_gate": "linear_attn.in_proj_z",
        "blk.ssm_alpha": "linear_attn.in_proj_a",
        "blk.ssm_beta": "linear_attn.in_proj_b",
        "blk.ssm_conv1d": "linear_attn.conv1d",
        "blk.ssm_norm": "linear_attn.norm",
        "blk.ssm_out": "linear_attn.out_proj",
        "blk.ssm_a": "linear_attn.A_log",
        "blk.ssm_dt.bias": "linear_attn.dt_bias",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        config = self.config
        config.require_flag("attn_output_gate", True)
        self._delta = delta = GatedDelta(
            config.integer("linear_num_key_heads", 16),
            config.integer("linear_num_value_heads", 32),
            config.integer("linear_key_head_dim", 128),
            config.integer("linear_value_head_dim", 128),
        )
        self.check_size("linear_key_head_dim", delta.key_size, CHANNELS_MULTIPLE)
        self.check_size("linear_value_head_dim", delta.value_size, VALUES_MULTIPLE)
        if delta.value_heads % delta.key_heads:
            problem = f"must be a multiple of linear_num_key_heads, {delta.key_heads}"
            raise config.error("linear_num_value_heads", problem)
        self.check_state(
            ("linear_num_value_heads", delta.value_heads),
            ("linear_value_head_dim", delta.key_size * delta.value_size),
        )
        # In a GGUF value head j belongs to key head j % key heads, not to j // values per key.
        self._tiled = config.flag("linear_value_heads_tiled", False)

    def usual_kinds(self) -> list[str]:
        """Attention in every fourth layer, or as config.json says."""
        every = self.config.integer("full_attention_interval", 4)
        return all_but_each(every, self.shape.num_layers, LINEAR)

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """Which layers have attention, and the size of the others' values."""
        values, kinds = metadata.integer("{arch}.ssm.time_step_rank"), None
        if _RECURRENT in metadata:
            recurrent = metadata.listed(_RECURRENT, bool)
            kinds = [LINEAR if state else FULL for state in recurrent]
        return {
            "layer_types": kinds,
            "full_attention_interval": metadata.integer("{arch}.full_attention_interval", 4),
            "linear_value_head_dim": metadata.integer("{arch}.ssm.inner_size") // max(1, values),
            "linear_value_heads_tiled": True,
        }

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
            "conv1d.weight": (channels, 1, self._kernel_size),
            "A_log": (delta.value_heads,),
            "dt_bias": (delta.value_heads,),
            "norm.weight": (delta.value_size,),
            "out_proj.weight": (hidden, values),
        }
        return {f"linear_attn.{part}": shape for part, shape in parts.items()}

    def row_orders(self) -> list[Order]:
        """The rows of gates are left out."""
        keys = np.arange(self.key_size)
        return [self._query_rows(0), keys, keys]

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
        x = graph.recurrence(
            GATED_DELTA,
            f"{name}.delta",
            [self.convolution(index, "linear_attn.conv1d", mixed), gate, a, b],
            {
                "decay": self.decay(index, "linear_attn"),
                "bias": read(f"{stored}.dt_bias"),
                "norm": read(f"{stored}.norm.weight"),
            },
            self._delta,
            key_heads=self._delta.key_heads,
            epsilon=self._epsilon,
            tiled=int(self._tiled),
        )
        return self.linear(index, "linear_attn.out_proj", x)

    def _query_rows(self, half: int) -> Order:
        """The stored rows of queries (0) or of their gates (1)."""
        size = self.shape.head_dim
        heads = np.arange(self.shape.num_heads)[:, None] * 2 * size
        return (heads + half * size + np.arange(size)).reshape(-1)
