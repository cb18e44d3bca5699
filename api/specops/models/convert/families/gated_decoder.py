"""What Llama and its relatives share: RMS norms, rotary grouped-query attention, a gate.

Tensor names are transformers'. A family says in class attributes where its norms stand, and in its
constructor what its config.json says about scales and about each layer's attention; families whose
projections are stored in another form override `projection_tensors` and what reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.families.family import Family
from specops.models.convert.graph import DecoderGraph, HeadNorms
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.rope import (
    HEAD_DIM_MULTIPLE,
    LARGEST_HEAD_DIM,
    Rotary,
    rotary,
)

Shapes = dict[str, tuple[int, ...]]
Float = NDArray[np.float32]

_HEAD = "lm_head.weight"
_BIASES = {
    "attention_bias": tuple(f"self_attn.{part}_proj" for part in "qkvo"),
    "mlp_bias": tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}


class Norms(NamedTuple):
    """The norms of a part of a layer: of what goes in, and of what comes out; empty where none."""

    before: str
    after: str = ""


class LayerAttention(NamedTuple):
    """What may differ between layers: which table rotates, if any, and how far back one sees."""

    rotary: str | None = ""
    window: int | None = None


class GatedDecoder(Family):
    """Draws layers of attention and gated feed-forward."""

    defaults: ClassVar[Mapping[str, Any]] = {}  # of keys that a config.json may leave out
    optional_biases: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    windowed = False  # whether all layers may look back over a window only
    partial_rotary = False  # whether the family may rotate a part of each head
    activation = ("hidden_act", "silu")  # the key, and the one function that is drawn
    attention_norms = Norms("input_layernorm")
    feed_forward_norms = Norms("post_attention_layernorm")
    head_norms = False  # whether each head of queries and keys has a norm
    width_norms = False  # whether all heads of them have one together
    stem = "model"  # what names of tensors begin with, but for the head's

    def __init__(self, config: ModelConfig) -> None:
        config = config.with_defaults(self.defaults)
        self.biased = self._biases(config)  # the projections that have one
        key, function = self.activation
        if config.text(key, function) != function:
            raise config.error(key, f"must be '{function}' to be exported for this family")
        self.shape = _shape(config)
        self.feed_forward_size = config.integer("intermediate_size")
        self._epsilon = config.number("rms_norm_eps", 1e-6)
        self._tied = config.flag("tie_word_embeddings", False)
        self.embedding_scale = self.residual_scale = self.logit_scale = 1.0
        self.attention_scale: float | None = None
        self.rotaries = self.rotary_tables(config)
        window = config.optional_integer("sliding_window") if self.windowed else None
        self.layers = [LayerAttention(window=window)] * self.shape.num_layers
        # old checkpoints store the rotary frequencies, and a tied head is sometimes stored twice
        self.ignored_tensors = ("*rotary_emb.inv_freq", *([_HEAD] if self._tied else []))

    def rotary_tables(self, config: ModelConfig) -> dict[str, Rotary]:
        """The tables that layers name."""
        shape = self.shape
        partial = self.partial_rotary
        return {"": rotary(config, shape.head_dim, shape.context_length, partial=partial)}

    @property
    def query_size(self) -> int:
        """Outputs of the query projection."""
        return self.shape.num_heads * self.shape.head_dim

    @property
    def key_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.shape.num_kv_heads * self.shape.head_dim

    # -- the tensors --------------------------------------------------------------------------

    def projection_tensors(self) -> Shapes:
        """The weights of one layer's products into attention and up, by their names in it."""
        hidden, wide = self.shape.hidden_size, self.feed_forward_size
        return {
            "self_attn.q_proj.weight": (self.query_size, hidden),
            "self_attn.k_proj.weight": (self.key_size, hidden),
            "self_attn.v_proj.weight": (self.key_size, hidden),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
        }

    def tensors(self) -> Shapes:
        """Embedding, final norm, head unless tied, and those of every layer."""
        table = (self.shape.vocab_size, self.shape.hidden_size)
        shapes: Shapes = {self._embedding: table, self._final_norm: table[1:]}
        if not self._tied:
            shapes[_HEAD] = table
        for index in range(self.shape.num_layers):
            for part, shape in self._layer_tensors().items():
                shapes[f"{self.layer(index)}.{part}"] = shape
        return shapes

    def _layer_tensors(self) -> Shapes:
        hidden = self.shape.hidden_size
        shapes = self.projection_tensors() | {
            "self_attn.o_proj.weight": (hidden, self.query_size),
            "mlp.down_proj.weight": (hidden, self.feed_forward_size),
        }
        shapes |= {f"{part}.bias": shapes[f"{part}.weight"][:1] for part in self.biased}
        for norm in (*self.attention_norms, *self.feed_forward_norms):
            if norm:
                shapes[f"{norm}.weight"] = (hidden,)
        if self.head_norms or self.width_norms:
            queries, keys = self.query_size, self.key_size
            if self.head_norms:
                queries = keys = self.shape.head_dim
            shapes["self_attn.q_norm.weight"] = (queries,)
            shapes["self_attn.k_norm.weight"] = (keys,)
        return shapes

    # -- the drawing --------------------------------------------------------------------------

    def draw(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Each sum with the residual is fused with the norm that follows it, if one does."""
        self.graph, self.checkpoint = graph, checkpoint
        tables = {name: graph.rotary(name, table) for name, table in self.rotaries.items()}
        x = graph.embedding(checkpoint.matrix(self._embedding))
        x = residual = graph.scaled("embedding.multiplied", x, self.embedding_scale)
        norms = self._norms_before()
        if norms[0]:
            first = self.norm(norms[0])
            x = graph.rms_norm("layers.0.input_norm", residual, first, self._epsilon)
        for index, layer in enumerate(self.layers):
            name = f"layers.{index}"
            x = graph.attention(
                index,
                *self.queries_keys_values(index, x),
                rotary=None if layer.rotary is None else tables[layer.rotary],
                window=layer.window,
                scale=self.attention_scale,
                head_norms=self._head_norms(index),
            )
            x = self.linear(index, "self_attn.o_proj", x)
            after = self._stored(index, self.attention_norms.after)
            x = self._come_out(f"{name}.attention", x, after)
            x, residual = self._add(f"{name}.feed_forward_norm", x, residual, norms[2 * index + 1])
            x = self._feed_forward(index, x)
            after = self._stored(index, self.feed_forward_norms.after)
            x = self._come_out(f"{name}.feed_forward", x, after)
            last = index + 1 == self.shape.num_layers
            name = "final_norm" if last else f"layers.{index + 1}.input_norm"
            x, residual = self._add(name, x, residual, norms[2 * index + 2])
        graph.head(x, checkpoint.matrix(self._embedding if self._tied else _HEAD))

    def norm(self, stored: str) -> Float:
        """What an RMS norm multiplies with."""
        return self.checkpoint.vector(stored)

    def queries_keys_values(self, index: int, x: str) -> list[str]:
        """The operands of attention: one tensor, or three."""
        name, stored = f"layers.{index}", f"{self.layer(index)}.self_attn"
        if not self.width_norms:  # on top of each other: one product is faster than three
            weight = self.checkpoint.matrix(*(f"{stored}.{part}_proj.weight" for part in "qkv"))
            bias = None
            if "self_attn.q_proj" in self.biased:
                bias = self.checkpoint.vectors(*(f"{stored}.{part}_proj.bias" for part in "qkv"))
            return [self.graph.linear(f"{name}.qkv", x, weight, bias)]
        found = [self.linear(index, f"self_attn.{part}_proj", x) for part in "qkv"]
        for place, part in enumerate("qk"):
            norm = self.norm(f"{stored}.{part}_norm.weight")
            called = f"{name}.{part}_norm"
            found[place] = self.graph.rms_norm(called, found[place], norm, self._epsilon)
        return found

    def gate_and_up(self, index: int, x: str) -> list[str]:
        """The two products of the feed-forward."""
        # apart: side by side in one product, splitting its result costs more
        return [self.linear(index, f"mlp.{part}_proj", x) for part in ("gate", "up")]

    def _feed_forward(self, index: int, x: str) -> str:
        gate, up = self.gate_and_up(index, x)
        name, graph = f"layers.{index}.gated", self.graph
        activate = graph.silu if self.activation[1] == "silu" else graph.gelu_tanh
        x = graph.multiply(name, activate(f"{name}.{self.activation[1]}", gate), up)
        return self.linear(index, "mlp.down_proj", x)

    def linear(self, index: int, part: str, x: str) -> str:
        """One product with a stored weight, and its bias if it has one."""
        stored = f"{self.layer(index)}.{part}"
        bias = self.checkpoint.vector(f"{stored}.bias") if part in self.biased else None
        _, _, name = part.removesuffix("_proj").partition(".")
        weight = self.checkpoint.matrix(f"{stored}.weight")
        return self.graph.linear(f"layers.{index}.{name}", x, weight, bias)

    def _come_out(self, name: str, x: str, norm: str) -> str:
        """What a part adds to the residual: normalized, scaled, or as it is."""
        if norm:
            x = self.graph.rms_norm(f"{name}.after", x, self.norm(norm), self._epsilon)
        return self.graph.scaled(f"{name}.scaled", x, self.residual_scale)

    def _add(self, name: str, x: str, residual: str, norm: str) -> tuple[str, str]:
        """The input of the next part, and what goes around it."""
        if not norm:
            total = self.graph.add(f"{name}.residual", x, residual)
            return total, total
        weight = self.norm(norm)
        if norm == self._final_norm:
            weight = weight * np.float32(self.logit_scale)
        return self.graph.add_rms_norm(name, x, residual, weight, self._epsilon)

    def _norms_before(self) -> list[str]:
        """The stored names of the norms before every part and before the head; empty where none."""
        parts = [
            self._stored(index, norms.before)
            for index in range(self.shape.num_layers)
            for norms in (self.attention_norms, self.feed_forward_norms)
        ]
        return [*parts, self._final_norm]

    def _head_norms(self, index: int) -> HeadNorms | None:
        if not self.head_norms:
            return None
        stored = f"{self.layer(index)}.self_attn"
        queries, keys = (self.norm(f"{stored}.{part}_norm.weight") for part in "qk")
        return HeadNorms((queries, keys), self._epsilon)

    # -- names and settings -------------------------------------------------------------------

    @property
    def _embedding(self) -> str:
        return f"{self.stem}.embed_tokens.weight"

    @property
    def _final_norm(self) -> str:
        return f"{self.stem}.norm.weight"

    def layer(self, index: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"{self.stem}.layers.{index}"

    def _stored(self, index: int, norm: str) -> str:
        return f"{self.layer(index)}.{norm}.weight" if norm else ""

    def _biases(self, config: ModelConfig) -> list[str]:
        biased: list[str] = []
        for key, parts in _BIASES.items():
            if config.flag(key, False):
                if key not in self.optional_biases:
                    raise config.error(key, "is true; biases cannot be exported for this family")
                biased += parts
        return biased


def _shape(config: ModelConfig) -> ModelShape:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    shape = ModelShape(
        hidden_size=hidden,
        num_layers=config.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // heads),
        vocab_size=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings"),
    )
    if heads % shape.num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    if shape.head_dim % HEAD_DIM_MULTIPLE or shape.head_dim > LARGEST_HEAD_DIM:
        raise config.error(
            "head_dim",
            f"is {shape.head_dim}; attention needs a multiple of {HEAD_DIM_MULTIPLE}, up to "
            f"{LARGEST_HEAD_DIM}",
        )
    return shape
