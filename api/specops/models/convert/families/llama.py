"""The Llama family: RMS norm, rotary grouped-query attention, SiLU-gated feed-forward.

Tensor names are those of transformers' LlamaForCausalLM. Families that differ in what is stored,
not in how a block is drawn, override `layer_tensors`, `_qkv` and `_gate_and_up`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.checkpoint import Checkpoint, Matrix
from specops.models.convert.families.family import Family
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.rope import rotary_table

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_OPTIONAL_BIASES = {
    "attention_bias": tuple(f"self_attn.{part}_proj" for part in "qkvo"),
    "mlp_bias": tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}


class Llama(Family):
    """Llama 1 to 3, TinyLlama, SmolLM and what else calls itself LlamaForCausalLM."""

    name = "llama"
    default_context_length = 2048
    optional_biases = True  # whether attention_bias and mlp_bias mean what they do for Llama
    partial_rotary = False  # whether the family may rotate a part of each head
    window: int | None = None  # positions that one sees, itself included; None: all before it

    def __init__(self, config: ModelConfig) -> None:
        self._biased: dict[str, bool] = {}  # by the name of a projection
        for key, parts in _OPTIONAL_BIASES.items():
            biased = config.flag(key, False)
            if biased and not self.optional_biases:
                raise config.error(key, "is true; biases cannot be exported for this family")
            self._biased |= dict.fromkeys(parts, biased)
        if config.text("hidden_act", "silu") != "silu":
            raise config.error("hidden_act", "must be 'silu' to be exported for this family")
        hidden = config.integer("hidden_size")
        heads = config.integer("num_attention_heads")
        self.shape = ModelShape(
            hidden_size=hidden,
            num_layers=config.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.integer("num_key_value_heads", heads),
            head_dim=config.integer("head_dim", hidden // heads),
            vocab_size=config.integer("vocab_size"),
            context_length=config.integer("max_position_embeddings", self.default_context_length),
        )
        if heads % self.shape.num_kv_heads:
            raise config.error("num_key_value_heads", f"must divide num_attention_heads, {heads}")
        self.feed_forward_size = config.integer("intermediate_size")
        self._epsilon = config.number("rms_norm_eps", 1e-6)
        self._tied = config.flag("tie_word_embeddings", False)
        self._rotary = rotary_table(
            config, self.shape.head_dim, self.shape.context_length, partial=self.partial_rotary
        )
        # old checkpoints store the rotary frequencies, and a tied head is sometimes stored twice
        self.ignored_tensors = ("rotary_emb.inv_freq", *([_HEAD] if self._tied else []))

    @property
    def query_size(self) -> int:
        """Outputs of the query projection."""
        return self.shape.num_heads * self.shape.head_dim

    @property
    def key_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.shape.num_kv_heads * self.shape.head_dim

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, named below `model.layers.{index}.`."""
        hidden, wide = self.shape.hidden_size, self.feed_forward_size
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (self.query_size, hidden),
            "self_attn.k_proj.weight": (self.key_size, hidden),
            "self_attn.v_proj.weight": (self.key_size, hidden),
            "self_attn.o_proj.weight": (hidden, self.query_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        biased = [part for part, present in self._biased.items() if present]
        return shapes | {f"{part}.bias": shapes[f"{part}.weight"][:1] for part in biased}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Embedding, final norm, head unless tied, and those of every layer."""
        table = (self.shape.vocab_size, self.shape.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: table,
            _FINAL_NORM: (self.shape.hidden_size,),
        }
        if not self._tied:
            shapes[_HEAD] = table
        for index in range(self.shape.num_layers):
            for part, shape in self.layer_tensors().items():
                shapes[f"model.layers.{index}.{part}"] = shape
        return shapes

    def draw(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Each sum with the residual is fused with the norm that follows it."""
        rotary = graph.rotary_table(*self._rotary)
        residual = graph.embedding(checkpoint.matrix(_EMBEDDING))
        first_norm = checkpoint.vector("model.layers.0.input_layernorm.weight")
        x = graph.rms_norm("layers.0.input_norm", residual, first_norm, self._epsilon)
        for index in range(self.shape.num_layers):
            stored = f"model.layers.{index}"
            last = index + 1 == self.shape.num_layers
            x = self._attention(graph, checkpoint, index, x, rotary)
            norm = checkpoint.vector(f"{stored}.post_attention_layernorm.weight")
            x, residual = graph.add_rms_norm(
                f"layers.{index}.feed_forward_norm", x, residual, norm, self._epsilon
            )
            x = self._feed_forward(graph, checkpoint, index, x)
            next_norm = _FINAL_NORM if last else f"model.layers.{index + 1}.input_layernorm.weight"
            next_name = "final_norm" if last else f"layers.{index + 1}.input_norm"
            x, residual = graph.add_rms_norm(
                next_name, x, residual, checkpoint.vector(next_norm), self._epsilon
            )
        graph.head(x, checkpoint.matrix(_EMBEDDING if self._tied else _HEAD))

    def _attention(
        self,
        graph: DecoderGraph,
        checkpoint: Checkpoint,
        index: int,
        x: str,
        rotary: tuple[str, str],
    ) -> str:
        name, stored = f"layers.{index}", f"model.layers.{index}.self_attn"
        weight, bias = self._qkv(checkpoint, stored)
        x = graph.attention(index, x, weight, bias, rotary=rotary, window=self.window)
        output = checkpoint.matrix(f"{stored}.o_proj.weight")
        bias = self._bias(checkpoint, index, "self_attn.o_proj")
        return graph.linear(f"{name}.attention_output", x, output, bias)

    def _feed_forward(self, graph: DecoderGraph, checkpoint: Checkpoint, index: int, x: str) -> str:
        # gate and up apart: side by side in one product, splitting its result costs more
        name, stored = f"layers.{index}", f"model.layers.{index}.mlp"
        gate_weight, up_weight = self._gate_and_up(checkpoint, stored)
        gate_bias, up_bias, down_bias = (
            self._bias(checkpoint, index, part) for part in _OPTIONAL_BIASES["mlp_bias"]
        )
        gate = graph.linear(f"{name}.gate", x, gate_weight, gate_bias)
        up = graph.linear(f"{name}.up", x, up_weight, up_bias)
        x = graph.gated_silu(f"{name}.gated", gate, up)
        down_weight = checkpoint.matrix(f"{stored}.down_proj.weight")
        return graph.linear(f"{name}.down", x, down_weight, down_bias)

    def _bias(self, checkpoint: Checkpoint, index: int, part: str) -> NDArray[np.float32] | None:
        """The bias of one of a layer's projections, if it has one."""
        if not self._biased[part]:
            return None
        return checkpoint.vector(f"model.layers.{index}.{part}.bias")

    def _qkv(
        self, checkpoint: Checkpoint, stored: str
    ) -> tuple[Matrix, NDArray[np.float32] | None]:
        """Query, key and value projection on top of each other, and their biases if any."""
        weight = checkpoint.matrix(*(f"{stored}.{part}_proj.weight" for part in "qkv"))
        if not self._biased["self_attn.q_proj"]:
            return weight, None
        return weight, checkpoint.vectors(*(f"{stored}.{part}_proj.bias" for part in "qkv"))

    def _gate_and_up(self, checkpoint: Checkpoint, stored: str) -> tuple[Matrix, Matrix]:
        return (
            checkpoint.matrix(f"{stored}.gate_proj.weight"),
            checkpoint.matrix(f"{stored}.up_proj.weight"),
        )
