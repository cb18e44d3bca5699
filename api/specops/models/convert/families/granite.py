"""Granite 3 and 4: Llama with four multipliers; most layers of the H models have Mamba-2."""

from typing import ClassVar

from specops.models.convert.families.family import Config, Shapes
from specops.models.convert.families.gated_decoder import FULL, GatedDecoder
from specops.models.convert.families.hybrid import (
    CHANNELS_MULTIPLE,
    LINEAR,
    VALUES_MULTIPLE,
    Hybrid,
)
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.rope import Rotary
from specops.runtime.kernels import STATE_SPACE
from specops.runtime.layer_shapes import StateSpace


class Granite(GatedDecoder, architectures="GraniteForCausalLM", gguf="granite"):
    """Granite 3.0 to 3.3, without experts."""

    name = "granite"
    defaults: ClassVar = {"max_position_embeddings": 2048, "position_embedding_type": "rope"}
    gguf_interleaved = True
    gguf_numbers: ClassVar = {
        "logits_scaling": "{arch}.logit_scale",
        "embedding_multiplier": "{arch}.embedding_scale",
        "residual_multiplier": "{arch}.residual_scale",
        "attention_multiplier": "{arch}.attention.scale",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = self.config.number("embedding_multiplier", 1.0)
        self.residual_scale = self.config.number("residual_multiplier", 1.0)
        self.attention_scale = self.config.number("attention_multiplier", 1.0)
        self.logit_scale = 1 / self.config.number("logits_scaling", 1.0)

    def rotary_tables(self, config: ModelConfig) -> dict[str, Rotary]:
        """None without rotation."""
        rotates = config.text("position_embedding_type") == "rope"
        return super().rotary_tables(config) if rotates else {}

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """Whether attention rotates, and the usual scale of its scores."""
        usual = config["head_dim"] ** -0.5 if config["head_dim"] else 1.0
        rotates = metadata.flag("{arch}.rope.scaling.finetuned", True)
        return {
            "position_embedding_type": "rope" if rotates else "none",
            "attention_multiplier": config["attention_multiplier"] or usual,
        }


class GraniteHybrid(
    Hybrid,
    Granite,
    architectures="GraniteMoeHybridForCausalLM",
    model_types="granitemoehybrid",
    gguf="granitehybrid",
):
    """Granite 4.0 without experts."""

    name = "granitemoehybrid"
    defaults: ClassVar = {
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "position_embedding_type": "none",
        "shared_intermediate_size": 1024,
    }
    optional_biases = ("attention_bias",)
    must_be_false = ("mamba_proj_bias",)
    kernel_size = ("mamba_d_conv", 4)
    gguf_integers: ClassVar = {
        "mamba_n_heads": "{arch}.ssm.time_step_rank",
        "mamba_d_state": "{arch}.ssm.state_size",
        "mamba_n_groups": "{arch}.ssm.group_count",
        "mamba_d_conv": "{arch}.ssm.conv_kernel",
    }
    gguf_names: ClassVar = {
        **{f"blk.ssm_{part}": f"mamba.{part}" for part in ("conv1d", "norm")},
        **{f"blk.ssm_{part}": f"mamba.{part}_proj" for part in ("in", "out")},
        "blk.ssm_a": "mamba.A_log",
        "blk.ssm_d": "mamba.D",
        "blk.ssm_dt.bias": "mamba.dt_bias",
    }

    def __init__(self, config: ModelConfig) -> None:
        config = config.with_defaults(self.defaults)
        # A GGUF has the two halves of the feed-forward's first product as two tensors.
        if config.flag("fused_feed_forward", True):
            config = config.replaced(intermediate_size=config.integer("shared_intermediate_size"))
            self.fused_gate = True
            self.up, self.down = ("shared_mlp.input_linear",), "shared_mlp.output_linear"
        if kinds := config.list_of(str, "layer_types", config.layers("num_hidden_layers")):
            known = {"mamba": LINEAR, "attention": FULL}  # the names in published files
            config = config.replaced(layer_types=[known.get(kind, kind) for kind in kinds])
        super().__init__(config)
        config.require("num_local_experts", 0)
        config.require("mamba_n_groups", 1)  # of more groups the gated norm is another one
        config.require("time_step_limit", [0, float("inf")])
        self._has_bias = config.flag("mamba_conv_bias", True)
        heads = config.integer("mamba_n_heads", 128)
        inner = config.integer("mamba_expand", 2) * self.shape.hidden_size
        size = inner // heads
        config.require("mamba_d_head", size, "auto")
        state_size = config.integer("mamba_d_state", 256)
        self._space = StateSpace(heads, 1, size, state_size)
        if size * heads != inner or size % VALUES_MULTIPLE:
            problem = f"must divide {inner} into multiples of {VALUES_MULTIPLE}"
            raise config.error("mamba_n_heads", problem)
        self.check_size("mamba_d_state", state_size, CHANNELS_MULTIPLE)
        self.check_state(("mamba_n_heads", heads), ("mamba_d_state", size * state_size))

    def usual_kinds(self) -> list[str]:
        """No attention."""
        return [LINEAR] * self.shape.num_layers

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """The form of the layers without attention, too."""
        inner = metadata.integer("{arch}.ssm.inner_size")
        return super().gguf_settings(metadata, tensors, config) | {
            "mamba_expand": inner // max(1, config["hidden_size"]),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "num_local_experts": 0,
            "fused_feed_forward": False,
        }

    def other_tensors(self) -> Shapes:
        """Mamba-2."""
        hidden, space = self.shape.hidden_size, self._space
        inner, channels = self._sizes()
        parts: Shapes = {
            "in_proj.weight": (inner + channels + space.heads, hidden),
            "conv1d.weight": (channels, 1, self._kernel_size),
            **({"conv1d.bias": (channels,)} if self._has_bias else {}),
            **dict.fromkeys(("A_log", "D", "dt_bias"), (space.heads,)),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        }
        return {f"mamba.{part}": shape for part, shape in parts.items()}

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
        bias = read(f"{stored}.conv1d.bias") if self._has_bias else None
        x = graph.recurrence(
            STATE_SPACE,
            f"{name}.states",
            [self.convolution(index, "mamba.conv1d", mixed, bias), gate, dt],
            {
                "decay": self.decay(index, "mamba"),
                "bias": read(f"{stored}.dt_bias"),
                "skip": read(f"{stored}.D"),
            },
            self._space,
            state_size=self._space.state_size,
        )
        x = graph.norm(f"{name}.mamba_norm", x, read(f"{stored}.norm.weight"), self._epsilon)
        x = self.linear(index, "mamba.out_proj", x)
        return self._part_output(f"{name}.mamba", x, index, self.attention_norms)

    def _sizes(self) -> tuple[int, int]:
        """Sizes of a token's values, and of the convolution's input: values, B and C."""
        inner = self._space.heads * self._space.size
        return inner, inner + 2 * self._space.state_size
