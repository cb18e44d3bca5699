"""GPT-2 and OPT: learned positions, layer norms, biases, as many key heads as query heads.

Tensor names are those of transformers' GPT2LMHeadModel and OPTForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from specops.models.convert.checkpoint import HEAD, Checkpoint
from specops.models.convert.families.family import Family, Shapes
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.rope import HEAD_DIM_MULTIPLE

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function
_PROJECT_IN = "model.decoder.project_in.weight"
_PROJECT_OUT = "model.decoder.project_out.weight"


class StoredNames(NamedTuple):
    """The names of a checkpoint's parts, without `.weight` and `.bias`.

    `layer` holds `{}` for the index; the names after it are relative to it. `qkv` is one fused
    tensor or three.
    """

    embedding: str
    positions: str
    final_norm: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]
    attention_output: str
    feed_forward_norm: str
    up: str
    down: str


class LayerNormDecoder(Family):
    """Builds layers of attention and feed-forward, with norms before or after each part."""

    # The keys in config.json of width, layers, heads and positions.
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    names: ClassVar[StoredNames]
    activation: ClassVar[str]
    transposed = False  # True: weights are stored [inputs, outputs]
    first_position = 0  # the row of the position table for the first token
    norm_before = True  # False: a norm follows each sum, and its result is the next residual

    def __init__(self, config: ModelConfig, feed_forward_size: int, epsilon: float) -> None:
        """The two values have other keys, or none, in each family's config.json."""
        width, layers, number, context = self.sizes
        hidden, heads = config.integer(width), config.integer(number)
        head_dim, rest = divmod(hidden, heads)
        if rest or head_dim % HEAD_DIM_MULTIPLE:
            raise config.error(
                width,
                f"is {hidden}; attention of {heads} heads needs a multiple of "
                f"{heads * HEAD_DIM_MULTIPLE}",
            )
        self.shape = ModelShape(
            hidden_size=hidden,
            num_layers=config.layers(layers),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            vocab_size=config.integer("vocab_size"),
            context_length=config.integer(context),
        )
        self.feed_forward_size = feed_forward_size
        self.embedding_size = hidden
        self._epsilon = epsilon
        self._tied = config.flag("tie_word_embeddings", True)
        if self._tied:  # some checkpoints store a tied head too
            self.ignored_tensors = (*self.ignored_tensors, HEAD)

    def tensors(self) -> Shapes:
        """Both tables, the norms, and weight and bias of every product."""
        names, hidden, wide = self.names, self.shape.hidden_size, self.feed_forward_size
        table = (self.shape.vocab_size, self.embedding_size)
        shapes: Shapes = {
            f"{names.embedding}.weight": table,
            f"{names.positions}.weight": (self.shape.context_length + self.first_position, hidden),
        }
        if not self._tied:
            shapes[HEAD] = table
        for norm in self._norms():
            shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        products = [
            *((part, 3 * hidden // len(names.qkv), hidden) for part in names.qkv),
            (names.attention_output, hidden, hidden),
            (names.up, wide, hidden),
            (names.down, hidden, wide),
        ]
        for index in range(self.shape.num_layers):
            for part, outputs, inputs in products:
                name = f"{names.layer.format(index)}.{part}"
                weight = (inputs, outputs) if self.transposed else (outputs, inputs)
                shapes |= {f"{name}.weight": weight, f"{name}.bias": (outputs,)}
        return shapes

    def build(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Fuses each sum with the residual and the norm that follows it."""
        self.graph, self.checkpoint = graph, checkpoint
        # The first norm stands before the first attention or after it. Norms of attention and
        # feed-forward alternate.
        norms = self._norms()
        table = checkpoint.matrix_rows(f"{self.names.positions}.weight", self.first_position)
        tokens, positions = self.build_embedding(), graph.learned_positions(table)
        if self.norm_before:
            x, residual = self._add_norm(next(norms), tokens, positions)
        else:
            x = residual = graph.add("tokens_and_positions", tokens, positions)
        for index in range(self.shape.num_layers):
            name, layer = f"layers.{index}", self.names.layer.format(index)
            heads = [f"{layer}.{part}" for part in self.names.qkv]
            x = graph.attention(index, self._linear(f"{name}.qkv", x, *heads))
            output = f"{layer}.{self.names.attention_output}"
            x = self._linear(f"{name}.attention_output", x, output)
            x, residual = self._add_norm(next(norms), x, residual)
            x = self._linear(f"{name}.up", x, f"{layer}.{self.names.up}")
            x = graph.activation(self.activation, f"{name}.activation", x)
            x = self._linear(f"{name}.down", x, f"{layer}.{self.names.down}")
            x, residual = self._add_norm(next(norms), x, residual)
        self.build_head(x)

    def build_embedding(self) -> str:
        """The token embeddings [batch, sequence, hidden], without positions."""
        return self.graph.embedding(self.checkpoint.matrix(f"{self.names.embedding}.weight"))

    def build_head(self, x: str) -> None:
        """The logits from the output of the last norm."""
        stored = f"{self.names.embedding}.weight" if self._tied else HEAD
        self.graph.head(x, self.checkpoint.matrix(stored))

    def _norms(self) -> Iterator[str]:
        """The stored names of the norms in the order of the forward pass."""
        for index in range(self.shape.num_layers):
            layer = self.names.layer.format(index)
            yield f"{layer}.{self.names.attention_norm}"
            yield f"{layer}.{self.names.feed_forward_norm}"
        if self.norm_before:
            yield self.names.final_norm

    def _add_norm(self, stored: str, x: str, residual: str) -> tuple[str, str]:
        """The normalized sum, and the next residual."""
        weight, bias = (self.checkpoint.vector(f"{stored}.{kind}") for kind in ("weight", "bias"))
        x, total = self.graph.add_norm(
            stored, x, residual, weight, epsilon=self._epsilon, bias=bias
        )
        return x, total if self.norm_before else x

    def _linear(self, name: str, x: str, *stored: str) -> str:
        """One product with the stacked weights and biases of the `stored` parts."""
        weight = self.checkpoint.matrix(
            *(f"{part}.weight" for part in stored), transposed=self.transposed
        )
        bias = self.checkpoint.vectors(*(f"{part}.bias" for part in stored))
        return self.graph.linear(name, x, weight, bias)


class GPT2(LayerNormDecoder, architectures="GPT2LMHeadModel"):
    """GPT-2 in all sizes, DistilGPT-2 and every other GPT2LMHeadModel."""

    name = "gpt2"
    activation = "gelu_tanh"
    transposed = True
    ignored_tensors = ("*.attn.bias", "*.attn.masked_bias")  # the causal mask, as a buffer
    sizes = ("n_embd", "n_layer", "n_head", "n_positions")
    names = StoredNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        attention_output="attn.c_proj",
        feed_forward_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
    )

    def __init__(self, config: ModelConfig) -> None:
        if config.text("activation_function", "gelu_new") not in _TANH_GELU:
            raise config.error("activation_function", f"must be one of {', '.join(_TANH_GELU)}")
        config.require_flag("scale_attn_weights", True)
        config.require_flag("scale_attn_by_inverse_layer_idx", False)
        config.require_flag("add_cross_attention", False)
        super().__init__(
            config,
            feed_forward_size=config.integer("n_inner", 4 * config.integer("n_embd")),
            epsilon=config.number("layer_norm_epsilon", 1e-5),
        )


class OPT(LayerNormDecoder, architectures="OPTForCausalLM"):
    """OPT from 125m to 66b.

    The 350m has its norms after the sums. Its embedding and head are narrower than its layers,
    with a projection between.
    """

    name = "opt"
    activation = "relu"
    first_position = 2  # the rows before it were meant for padding
    names = StoredNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output="self_attn.out_proj",
        feed_forward_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    )

    def __init__(self, config: ModelConfig) -> None:
        if config.text("activation_function", "relu") != "relu":
            raise config.error(
                "activation_function", "must be 'relu' to be exported for this family"
            )
        config.require_flag("enable_bias", True)
        config.require_flag("layer_norm_elementwise_affine", True)
        config.require_flag("_remove_final_layer_norm", False)
        super().__init__(
            config,
            feed_forward_size=config.integer("ffn_dim"),
            epsilon=1e-5,  # torch's default; OPT's config has no key for it
        )
        self.norm_before = config.flag("do_layer_norm_before", True)
        self.embedding_size = config.integer("word_embed_proj_dim", self.shape.hidden_size)
        self._projected = self.embedding_size != self.shape.hidden_size

    def tensors(self) -> Shapes:
        """All tensors, with the projections if the embedding is narrower than the layers."""
        shapes = super().tensors()
        if self._projected:
            shapes[_PROJECT_IN] = (self.shape.hidden_size, self.embedding_size)
            shapes[_PROJECT_OUT] = (self.embedding_size, self.shape.hidden_size)
        return shapes

    def build_embedding(self) -> str:
        """The token embeddings, widened if need be."""
        x = super().build_embedding()
        if self._projected:
            x = self.graph.linear("project_in", x, self.checkpoint.matrix(_PROJECT_IN))
        return x

    def build_head(self, x: str) -> None:
        """The logits, after a projection if need be."""
        if self._projected:
            x = self.graph.linear("project_out", x, self.checkpoint.matrix(_PROJECT_OUT))
        super().build_head(x)
