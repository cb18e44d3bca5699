"""What Llama and its relatives share: norms, rotary grouped-query attention, a gate.

Tensor names are transformers'. A family sets class attributes, for example the places of its
norms. Its constructor reads scales and the attention of each layer from config.json. Some relatives
have layer norms, or no gate.

A family with `has_mtp` may have an MTP block: one more layer of its kind, with full attention,
after a product that joins the embedding of a token with the state before it. Methods get the index
`num_layers` for that layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specops.models.contract import NEXT_STATES, STATES
from specops.models.convert.checkpoint import HEAD, HEAD_BIAS, MTP, Checkpoint, Matrix
from specops.models.convert.families.family import Family, Shapes
from specops.models.convert.graph import DecoderGraph, HeadNorms
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.rope import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    Rotary,
    plain_rotary,
    rotary,
)

Float = NDArray[np.float32]
Order = NDArray[np.int64]

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FUNCTIONS = {  # the graph's names of them
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
FULL, SLIDING = "full_attention", "sliding_attention"
LOCAL = "local_"  # the rotary table of layers with a window, if it is another one
_MTP_FC = f"{MTP}fc.weight"
_MTP_NORMS = _MTP_EMBEDDING, _MTP_STATE, _MTP_FINAL = (
    f"{MTP}pre_fc_norm_embedding",
    f"{MTP}pre_fc_norm_hidden",
    f"{MTP}norm",
)


class Norms(NamedTuple):
    """The norms of a part's input and output; an empty name if there is none."""

    before: str
    after: str = ""


class LayerAttention(NamedTuple):
    """What may differ between layers: the rotary table, None for no rotation, and the window."""

    rotary: str | None = ""
    window: int | None = None


class GatedDecoder(Family):
    """Builds layers of attention and gated feed-forward.

    Args of methods:
        index: number of the layer, from 0.
        x: name of the layer's normalized input [batch, sequence, hidden].
        residual: name of the sum that runs past the layers, of the same shape.
        rotary: names of the tables of cosines and sines; None: nothing is rotated.
        window: tokens that a token sees; None: all before it.
    """

    # The keys of width, layers, heads, positions and the feed-forward's width.
    sizes = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        "intermediate_size",
    )
    defaults: ClassVar[Mapping[str, Any]] = {}  # of keys that a config.json may leave out
    must_be_false: ClassVar[tuple[str, ...]] = ()  # flags of unsupported features
    optional_biases: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    always_biased: ClassVar[tuple[str, ...]] = ()  # projections
    windowed = False  # whether `sliding_window` applies to all layers
    # Or to all but every Nth, if config.json does not list them:
    full_layer_every: int | None = None
    local_table = ""  # the rotary table of layers with a window
    full_table: str | None = ""  # the other layers' table; None: they do not rotate
    partial_rotary = False  # whether the family may rotate a part of each head
    activation = ("hidden_act", "silu")  # the key, and the one function that is supported
    attention_norms = Norms("input_layernorm")
    feed_forward_norms = Norms("post_attention_layernorm")
    head_norms = False  # whether each head of queries and keys has a norm
    width_norms = False  # whether all query heads have one norm together, and all key heads
    layer_norms = False  # whether norms subtract the mean, too
    norm_biases = True  # whether such norms have biases
    head_bias = False
    parallel = False  # whether attention and feed-forward read the same norm's output
    epsilon = ("rms_norm_eps", 1e-6)  # the key, and its default
    # Learned positions, in place of rotations: the table, and the row of the first position.
    positions: tuple[str, int] | None = None
    post_norm = False  # whether each norm follows a sum, and its result is the next residual
    transposed = False  # whether the layers' weights are stored [inputs, outputs]
    stem = "model"  # the first part of all tensor names but the head's
    embedding, stack = "embed_tokens", "layers"  # the table of tokens, and what all layers are in
    final_norm = "norm"
    qkv: ClassVar[tuple[str, ...]] = QKV  # or one tensor with all three
    query_key_norms = ("self_attn.q_norm", "self_attn.k_norm")
    output, down = "self_attn.o_proj", "mlp.down_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one product has no gate
    fused_gate = False  # whether the one tensor of `up` has both, the gate first
    gguf_names: ClassVar[Mapping[str, str]] = {}  # in addition to `gguf_tensors`; empty: none
    _factors: str | None = None  # of queries, in the graph

    def __init__(self, config: ModelConfig) -> None:
        self.config = config = text_config(config).with_defaults(self.defaults)
        attention, feed_forward = self.qkv, (*self.up, self.down)
        if config.flag("attention_output_bias", True):  # not in any config.json: see Checkpoint
            attention = (*attention, self.output)
        biases = {"attention_bias": attention, "mlp_bias": feed_forward}
        for flag in (*self.must_be_false, *(biases.keys() - {*self.optional_biases})):
            config.require_flag(flag, False)
        biases["use_bias"] = (*attention, *feed_forward)
        self.biased = list(self.always_biased)  # the projections with a bias
        for flag in self.optional_biases:
            self.biased += biases[flag] if config.flag(flag, False) else ()
        key, function = self.activation
        if _FUNCTIONS.get(config.text(key, function)) != _FUNCTIONS[function]:
            raise config.error(key, f"must be '{function}' to be exported for this family")
        self.shape = shape = _shape(config, self.sizes)
        self.query_size = shape.num_heads * shape.head_dim
        self.key_size = shape.num_kv_heads * shape.head_dim
        self.embedding_size = shape.hidden_size
        self.feed_forward_size = config.integer(self.sizes[-1])
        self._epsilon = config.number(*self.epsilon)
        self._tied = config.flag("tie_word_embeddings", False)
        self._embedding = f"{self.stem}.{self.embedding}"
        self._final_norm = f"{self.stem}.{self.final_norm}"
        self.embedding_scale = self.residual_scale = self.logit_scale = 1.0
        self.attention_scale: float | None = None
        self.attention_softcap: float | None = None
        self.logit_softcap: float | None = None
        self.query_factors: Float | None = None  # one for each position
        self.rotaries = self.rotary_tables(config)
        self.layers = [LayerAttention("" if self.rotaries else None)] * shape.num_layers
        if (self.windowed or self.full_layer_every) and "sliding_window" in config:
            local = LayerAttention(self.local_table, config.integer("sliding_window"))
            self.layers = [local] * shape.num_layers
            if self.full_layer_every:
                full = LayerAttention(self.full_table)
                kinds = layer_kinds(config, shape.num_layers, SLIDING)
                if kinds is None:
                    every = config.integer("sliding_window_pattern", self.full_layer_every)
                    kinds = all_but_each(every, shape.num_layers, SLIDING)
                self.layers = [local if kind == SLIDING else full for kind in kinds]
        # Old checkpoints store the rotary frequencies, and some store a tied head too.
        self.ignored_tensors = ("*rotary_emb.inv_freq", *([HEAD] if self._tied else []))

    def rotary_tables(self, config: ModelConfig) -> dict[str, Rotary]:
        """The rotary tables by the names that `LayerAttention` uses; none: nothing rotates.

        Layers with a window may have their own. transformers 5 has a section of `rope_parameters`
        for either kind; in older files only the rotation of the other layers is scaled.
        """
        size, positions = self.shape.head_dim, self.shape.context_length
        if self.positions:
            return {}
        if not self.local_table:
            return {"": rotary(config, size, positions, partial=self.partial_rotary)}
        given, theta = config.section("rope_parameters"), config.number("rope_theta")
        if given is None or not (FULL in given or SLIDING in given):
            theta = (given or config).number("rope_theta", theta)
            local = plain_rotary(size, positions, config.number("rope_local_base_freq", theta))
            return {"": rotary(config, size, positions), LOCAL: local}
        other = config.replaced(rope_theta=config.number("rope_local_base_freq", theta))
        return {
            "": rotary(config, size, positions, scaling=given.section(FULL)),
            LOCAL: rotary(other, size, positions, scaling=given.section(SLIDING)),
        }

    def layer(self, index: int) -> str:
        """The first part of the names of a layer's tensors."""
        if index == self.shape.num_layers:
            return f"{MTP}layers.0"
        return f"{self.stem}.{self.stack}.{index}"

    def heads(self, index: int) -> tuple[int, int]:
        """Number of a layer's heads of keys and values, and the size of all its heads."""
        del index  # all layers have the same ones
        return self.shape.num_kv_heads, self.shape.head_dim

    def feed_forward_width(self, index: int) -> int:
        """Number of a layer's values that a feed-forward gates."""
        del index  # all layers have the same
        return self.feed_forward_size

    # -- the tensors --------------------------------------------------------------------------

    @classmethod
    def gguf_tensors(cls) -> Mapping[str, str]:
        """As llama.cpp names the tensors of most relatives."""
        attention = ("blk.attn_q", "blk.attn_k", "blk.attn_v")
        found = {
            "token_embd": f"{cls.stem}.{cls.embedding}",
            "position_embd": f"{cls.stem}.{cls.positions[0]}" if cls.positions else "",
            "output_norm": f"{cls.stem}.{cls.final_norm}",
            "output": "lm_head",
            "blk": f"{cls.stem}.{cls.stack}",
            "blk.attn_norm": cls.attention_norms.before,
            "blk.post_attention_norm": cls.attention_norms.after,
            **dict(zip(attention if len(cls.qkv) > 1 else ("blk.attn_qkv",), cls.qkv, strict=True)),
            **dict(zip(("blk.attn_q_norm", "blk.attn_k_norm"), cls.query_key_norms, strict=True)),
            "blk.attn_output": cls.output,
            "blk.ffn_norm": cls.feed_forward_norms.before,
            "blk.post_ffw_norm": cls.feed_forward_norms.after,
            **dict(zip(("blk.ffn_up", "blk.ffn_gate"), reversed(cls.up), strict=False)),
            "blk.ffn_down": cls.down,
        }
        return {theirs: ours for theirs, ours in {**found, **cls.gguf_names}.items() if ours}

    def tensors(self) -> Shapes:
        """Embedding, final norm, head unless tied, and the tensors of every layer."""
        table = (self.shape.vocab_size, self.embedding_size)
        shapes: Shapes = {f"{self._embedding}.weight": table}
        if self.positions:
            name, first = self.positions
            rows = first + self.shape.context_length
            shapes[f"{self.stem}.{name}.weight"] = (rows, self.shape.hidden_size)
        if not self.post_norm:
            shapes |= self._norm_shapes(self._final_norm)
        if not self._tied:
            shapes[HEAD] = table
        if self.head_bias:
            shapes[HEAD_BIAS] = table[:1]
        for index in range(self.shape.num_layers):
            shapes |= self._stored_layer(index)
        return shapes

    def mtp_tensors(self) -> Shapes:
        """The product, the three norms and the layer of an MTP block."""
        hidden = self.shape.hidden_size
        shapes = {_MTP_FC: (hidden, 2 * hidden), **self._stored_layer(self.shape.num_layers)}
        for norm in _MTP_NORMS:
            shapes |= self._norm_shapes(norm)
        return shapes

    def _stored_layer(self, index: int) -> Shapes:
        layer = self.layer_tensors(index)
        return {f"{self.layer(index)}.{part}": shape for part, shape in layer.items()}

    def layer_tensors(self, index: int) -> Shapes:
        """The tensors of a layer, by their names in it."""
        hidden, wide = self.shape.hidden_size, self.feed_forward_width(index)
        kv_heads, size = self.heads(index)
        queries, keys = self.shape.num_heads * size, kv_heads * size
        rows = [self.query_parts * queries, keys, keys]
        parts = dict(zip(self.qkv, rows if len(self.qkv) > 1 else [sum(rows)], strict=True))
        parts |= dict.fromkeys(self.up, 2 * wide if self.fused_gate else wide)
        layer: Shapes = {f"{part}.weight": (height, hidden) for part, height in parts.items()}
        layer |= {
            f"{self.output}.weight": (hidden, queries),
            f"{self.down}.weight": (hidden, wide),
        }
        layer |= {f"{part}.bias": layer[f"{part}.weight"][:1] for part in self.biased}
        for norm in filter(None, (*self.attention_norms, *self.feed_forward_norms)):
            layer |= self._norm_shapes(norm)
        if self.head_norms or self.width_norms:
            sizes = (size, size) if self.head_norms else (queries, keys)
            norms = zip(self.query_key_norms, sizes, strict=True)
            layer |= {f"{norm}.weight": (size,) for norm, size in norms}
        return {name: shape[::-1] for name, shape in layer.items()} if self.transposed else layer

    def _norm_shapes(self, norm: str) -> Shapes:
        kinds = ("weight", "bias") if self.layer_norms and self.norm_biases else ("weight",)
        return {f"{norm}.{kind}": (self.shape.hidden_size,) for kind in kinds}

    # -- the graph ----------------------------------------------------------------------------

    def build(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Fuses each sum with the residual and the norm that follows it, if there is one."""
        self.graph, self.checkpoint = graph, checkpoint
        tables = {name: graph.rotary(name, table) for name, table in self.rotaries.items()}
        x = residual = self.embedded()
        first = "" if self.post_norm else self._stored(0, self.attention_norms.before)
        if self.positions:
            table, row = self.positions
            rows = checkpoint.matrix_rows(f"{self.stem}.{table}.weight", row)
            positions = graph.learned_positions(rows)
            x, residual = self._add("layers.0.input_norm", x, positions, first)
        elif first:
            x = self._normalized("layers.0.input_norm", residual, first)
        if self.query_factors is not None:
            self._factors = graph.position_factors("query_factors", self.query_factors)
        self.read_embeddings(residual)
        for index, layer in enumerate(self.layers):
            rotary = None if layer.rotary is None else tables[layer.rotary]
            x, residual = self._layer(index, x, residual, rotary, layer.window)
            name, norm = "final_norm", self._final_norm
            if index + 1 < self.shape.num_layers:
                name = f"layers.{index + 1}.input_norm"
                norm = self._stored(index + 1, self.attention_norms.before)
            if self.post_norm:
                norm = self._stored(index, self.feed_forward_norms.before)
            x, residual = self.end_layer(index, name, x, residual, norm)
        self.write_logits(x)

    def embedded(self) -> str:
        """The tokens' scaled embeddings [batch, sequence, hidden]."""
        x = self.graph.embedding(self.checkpoint.matrix(f"{self._embedding}.weight"))
        return self.graph.scaled("embedding.multiplied", x, self.embedding_scale)

    def write_logits(self, x: str) -> None:
        """The logits, from the output of the last norm."""
        bias = self.checkpoint.vector(HEAD_BIAS) if self.head_bias else None
        self.graph.head(x, self._head(), bias, self.logit_softcap)

    def read_embeddings(self, x: str) -> None:
        """Called with the tokens' scaled embeddings, before the first layer."""

    def end_layer(self, index: int, name: str, x: str, residual: str, norm: str) -> tuple[str, str]:
        """The next layer's input, under its `name` and with its `norm`, and the next residual.

        `x` is what the feed-forward of layer `index` gave.

        Args:
            name: of the next input.
            norm: stored name of its norm; empty: none.
        """
        del index  # all layers end in the same way
        return self._add(name, x, residual, norm)

    def build_mtp(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """The state is the target's after its final norm, for further guesses the block's own.

        The embedding comes first in the joined vector. Embedding and output rows are the target's.
        """
        self.graph, self.checkpoint, index = graph, checkpoint, self.shape.num_layers
        rotary = None
        if self.full_table is not None:
            rotary = graph.rotary(self.full_table, self.rotaries[self.full_table])
        token = self._normalized("token_norm", self.embedded(), _MTP_EMBEDDING)
        state = self._normalized("state_norm", STATES, _MTP_STATE)
        both = graph.concatenate("both", [token, state])
        x = residual = graph.linear("fc", both, checkpoint.matrix(_MTP_FC))
        if self.attention_norms.before:
            first = f"{self.layer(index)}.{self.attention_norms.before}"
            x = self._normalized(f"layers.{index}.input_norm", residual, first)
        x, residual = self._layer(index, x, residual, rotary, None)
        x, _ = self._add("final_norm", x, residual, _MTP_FINAL)
        graph.head(x, self._head())
        graph.also_takes(STATES, self.shape.hidden_size)
        graph.also_gives(NEXT_STATES, x, self.shape.hidden_size)

    def _layer(
        self, index: int, x: str, residual: str, rotary: tuple[str, str] | None, window: int | None
    ) -> tuple[str, str]:
        """What a layer adds to the residual, and the residual that this is added to."""
        attended = self.mix(index, x, rotary, window)
        if self.parallel:
            fed = self._feed_forward(index, x)
            return self.graph.add(f"layers.{index}.both", attended, fed), residual
        norms = self.attention_norms if self.post_norm else self.feed_forward_norms
        name, norm = f"layers.{index}.feed_forward_norm", self._stored(index, norms.before)
        x, residual = self._add(name, attended, residual, norm)
        return self._feed_forward(index, x), residual

    def _head(self) -> Matrix:
        """The output rows."""
        return self.checkpoint.matrix(f"{self._embedding}.weight" if self._tied else HEAD)

    def mix(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """The part of a layer in which a token sees those before it: attention."""
        x = self.linear(index, self.output, self.attend(index, x, rotary, window))
        return self._part_output(f"layers.{index}.attention", x, index, self.attention_norms)

    def attend(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """Attention, before the product of its output."""
        stored, head_norms = self.layer(index), None
        operands = self.queries_keys_values(index, x)
        if self.head_norms:
            queries, keys = (self.norm(f"{stored}.{norm}") for norm in self.query_key_norms)
            head_norms = HeadNorms((queries, keys), self._epsilon)
        return self.graph.attention(
            index,
            *operands,
            rotary=rotary,
            window=window,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            head_norms=head_norms,
        )

    def _feed_forward(self, index: int, x: str) -> str:
        name, function = f"layers.{index}", self.activation[1]
        opened, *others = self.gate_and_up(index, x)
        x = self.graph.activation(_FUNCTIONS[function], f"{name}.gated.{function}", opened)
        for other in others:
            x = self.graph.multiply(f"{name}.gated", x, other)
        x = self.linear(index, self.down, x)
        return self._part_output(f"{name}.feed_forward", x, index, self.feed_forward_norms)

    def _stored(self, index: int, norm: str) -> str:
        return f"{self.layer(index)}.{norm}" if norm else ""

    def norm(self, stored: str) -> Float:
        """The weight of the norm with this stored name."""
        weight = self.checkpoint.vector(f"{stored}.weight")
        return weight + np.float32(1) if self.offset_norms else weight

    def _norm_bias(self, stored: str, weight: Float) -> Float | None:
        """The bias of a layer norm; None for an RMS norm."""
        if not self.layer_norms:
            return None
        if not self.norm_biases:
            return np.zeros_like(weight)
        return self.checkpoint.vector(f"{stored}.bias")

    def _normalized(self, name: str, x: str, stored: str) -> str:
        weight = self.norm(stored)
        return self.graph.norm(name, x, weight, self._epsilon, self._norm_bias(stored, weight))

    def queries_keys_values(self, index: int, x: str) -> list[str]:
        """The operands of attention: one tensor with all three, or three tensors."""
        name, layer = f"layers.{index}", self.layer(index)
        if not self.width_norms and self._factors is None:
            # Stacked weights: one product is faster than three.
            weight = self.checkpoint.matrix(
                *(f"{layer}.{part}.weight" for part in self.qkv), transposed=self.transposed
            )
            bias = None
            if self.qkv[0] in self.biased:
                bias = self.checkpoint.vectors(*(f"{layer}.{part}.bias" for part in self.qkv))
            if orders := self.row_orders():
                weight = weight.reordered(orders)
                bias = bias if bias is None else bias[stacked(orders)]
            return [self.graph.linear(f"{name}.qkv", x, weight, bias)]
        found = [self.linear(index, part, x) for part in self.qkv]
        for place, part in enumerate("qk" if self.width_norms else ""):
            norm = self.norm(f"{layer}.{self.query_key_norms[place]}")
            found[place] = self.graph.norm(f"{name}.{part}_norm", found[place], norm, self._epsilon)
        if self._factors is not None:
            found[0] = self.graph.multiply(f"{name}.q.scaled", found[0], self._factors)
        return found

    def row_orders(self) -> list[Order]:
        """The stored rows of queries, keys and values, as attention reads them; empty: as they are.

        It rotates the halves of a head.
        """
        if not self.interleaved:
            return []
        shape, rotated = self.shape, 2 * len(self.rotaries[""].table.frequencies)
        head = np.arange(shape.head_dim)
        head[:rotated] = head[:rotated].reshape(-1, 2).T.reshape(-1)
        queries, keys = (
            (np.arange(heads)[:, None] * shape.head_dim + head).reshape(-1)
            for heads in (shape.num_heads, shape.num_kv_heads)
        )
        return [queries, keys, np.arange(self.key_size)]

    def gate_and_up(self, index: int, x: str) -> list[str]:
        """The products of the feed-forward that read `x`; the first one is activated."""
        # Two products: splitting the result of one costs more.
        if not self.fused_gate:
            return [self.linear(index, part, x) for part in self.up]
        stored, wide = f"{self.layer(index)}.{self.up[0]}.weight", self.feed_forward_size
        rows = self.checkpoint.matrix_rows
        return [
            self.graph.linear(f"layers.{index}.{part}", x, rows(stored, start, stop))
            for part, start, stop in (("gate", 0, wide), ("up", wide, 2 * wide))
        ]

    def linear(self, index: int, part: str, x: str) -> str:
        """One product with a stored weight, and its bias if it has one.

        Args:
            part: the weight's stored name within the layer.
        """
        stored = f"{self.layer(index)}.{part}"
        bias = self.checkpoint.vector(f"{stored}.bias") if part in self.biased else None
        weight = self.checkpoint.matrix(f"{stored}.weight", transposed=self.transposed)
        return self.graph.linear(f"layers.{index}.{part.removesuffix('_proj')}", x, weight, bias)

    def _part_output(self, name: str, x: str, index: int, norms: Norms) -> str:
        """What a part adds to the residual: its output, normalized and scaled if need be."""
        if norms.after:
            weight = self.norm(f"{self.layer(index)}.{norms.after}")
            x = self.graph.norm(f"{name}.after", x, weight, self._epsilon)
        return self.graph.scaled(f"{name}.scaled", x, self.residual_scale)

    def _add(self, name: str, x: str, residual: str, norm: str) -> tuple[str, str]:
        """The input of the next part, and the next residual."""
        if not norm:
            total = self.graph.add(f"{name}.residual", x, residual)
            return total, total
        weight = self.norm(norm)
        bias = self._norm_bias(norm, weight)
        if norm == self._final_norm:
            weight = weight * np.float32(self.logit_scale)
            bias = bias if bias is None else bias * np.float32(self.logit_scale)
        x, total = self.graph.add_norm(name, x, residual, weight, epsilon=self._epsilon, bias=bias)
        return x, x if self.post_norm else total


def text_config(config: ModelConfig) -> ModelConfig:
    """The language model's part of a multimodal model's config.json; else the whole."""
    text = config.section("text_config")
    if text is None:
        return config
    tied = "tie_word_embeddings"  # transformers ties the whole model by its own key
    return text.replaced(**{tied: config.flag(tied, False)} if tied in config else {})


def stacked(orders: list[Order]) -> Order:
    """The order of rows on top of each other."""
    starts = np.cumsum([0, *(len(order) for order in orders)])
    return np.concatenate([start + order for start, order in zip(starts, orders, strict=False)])


def layer_kinds(config: ModelConfig, layers: int, other: str) -> list[str] | None:
    """The kinds of layers that config.json lists, `FULL` and the `other`; None without a list.

    Args:
        config: of the language model.
        layers: their number.
        other: the kind that is not `FULL`.
    """
    kinds = config.list_of(str, "layer_types", layers)
    for kind in kinds or ():
        if kind not in (FULL, other):
            raise config.error("layer_types", f"is {kind}; supported are {FULL}, {other}")
    return kinds


def all_but_each(number: int, layers: int, other: str) -> list[str]:
    """Kinds of layers: the `other`, but each layer of this number is `FULL`.

    Args:
        number: the distance of two `FULL` layers.
        layers: their number.
        other: the kind of the others.
    """
    return [other if place % number else FULL for place in range(1, layers + 1)]


def _shape(config: ModelConfig, sizes: Sequence[str]) -> ModelShape:
    width, layers, number, context, _ = sizes
    hidden, heads = config.integer(width), config.integer(number)
    shape = ModelShape(
        hidden_size=hidden,
        num_layers=config.layers(layers),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // heads),
        vocab_size=config.integer("vocab_size"),
        context_length=config.integer(context),
    )
    if heads % shape.num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide {number}, {heads}")
    check_head_dim(config, "head_dim", shape.head_dim)
    return shape


def check_head_dim(config: ModelConfig, key: str, size: int) -> None:
    """Raises ExportError for a size of heads that attention does not have.

    Args:
        config: names the file in the error.
        key: that gives the size.
        size: numbers in a head.
    """
    if size % HEAD_DIM_MULTIPLE or size > MAX_HEAD_DIM:
        raise config.error(
            key,
            f"is {size}; attention needs a multiple of {HEAD_DIM_MULTIPLE}, up to {MAX_HEAD_DIM}",
        )
