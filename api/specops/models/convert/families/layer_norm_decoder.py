"""GPT-2 and OPT: learned positions, layer norms, biases, as many key heads as query heads.

Tensor names follow transformers' GPT2LMHeadModel and OPTForCausalLM.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from specops.models.convert.checkpoint import HEAD, Checkpoint
from specops.models.convert.families.family import Family, Shapes
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.rope import HEAD_DIM_MULTIPLE

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function
_QKV = ("blk.attn_qkv", "blk.attn_q", "blk.attn_k", "blk.attn_v")
_PROJECT_IN = "model.decoder.project_in.weight"
_PROJECT_OUT = "model.decoder.project_out.weight"


class LayerNormDecoder(Family):
    """Builds layers of attention and feed-forward, with norms before or after each part.

    Args:
        config: of the model.
        feed_forward_size: numbers between the two products.
        epsilon: of the norms.
    """

    # The keys in config.json of width, layers, heads and positions.
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    names: ClassVar[Mapping[str, str]]  # see `Family.gguf_tensors`; q, k and v may be one tensor
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
        self.qkv = [stored for part, stored in self.names.items() if part in _QKV]
        self._tied = config.flag("tie_word_embeddings", True)
        if self._tied:  # some checkpoints store a tied head too
            self.ignored_tensors = (*self.ignored_tensors, HEAD)

    @classmethod
    def gguf_tensors(cls) -> Mapping[str, str]:
        """These are the family's own names for them, too."""
        return cls.names

    def tensors(self) -> Shapes:
        """Both tables, the norms, and weight and bias of every product."""
        names, hidden, wide = self.names, self.shape.hidden_size, self.feed_forward_size
        table = (self.shape.vocab_size, self.embedding_size)
        shapes: Shapes = {
            f"{names['token_embd']}.weight": table,
            f"{names['position_embd']}.weight": (
                self.shape.context_length + self.first_position,
                hidden,
            ),
        }
        if not self._tied:
            shapes[HEAD] = table
        for norm in self._norms():
            shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        products = [
            *((part, 3 * hidden // len(self.qkv), hidden) for part in self.qkv),
            (names["blk.attn_output"], hidden, hidden),
            (names["blk.ffn_up"], wide, hidden),
            (names["blk.ffn_down"], hidden, wide),
        ]
        for index in range(self.shape.num_layers):
            for part, outputs, inputs in products:
                name = f"{self._layer(index)}.{part}"
                weight = (inputs, outputs) if self.transposed else (outputs, inputs)
                shapes |= {f"{name}.weight": weight, f"{name}.bias": (outputs,)}
        return shapes

    def build(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Fuses each sum with the residual and the norm that follows it."""
        self.graph, self.checkpoint = graph, checkpoint
        # The first norm comes before the first attention or after it. Norms of attention and
        # feed-forward alternate.
        norms = self._norms()
        names = self.names
        table = checkpoint.matrix_rows(f"{names['position_embd']}.weight", self.first_position)
        tokens, positions = self.build_embedding(), graph.learned_positions(table)
        if self.norm_before:
            x, residual = self._add_norm(next(norms), tokens, positions)
        else:
            x = residual = graph.add("tokens_and_positions", tokens, positions)
        for index in range(self.shape.num_layers):
            name, layer = f"layers.{index}", self._layer(index)
            heads = [f"{layer}.{part}" for part in self.qkv]
            x = graph.attention(index, self._linear(f"{name}.qkv", x, *heads))
            output = f"{layer}.{names['blk.attn_output']}"
            x = self._linear(f"{name}.attention_output", x, output)
            x, residual = self._add_norm(next(norms), x, residual)
            x = self._linear(f"{name}.up", x, f"{layer}.{names['blk.ffn_up']}")
            x = graph.activation(self.activation, f"{name}.activation", x)
            x = self._linear(f"{name}.down", x, f"{layer}.{names['blk.ffn_down']}")
            x, residual = self._add_norm(next(norms), x, residual)
        self.build_head(x)

    def build_embedding(self) -> str:
        """The token embeddings [batch, sequence, hidden], without positions."""
        return self.graph.embedding(self.checkpoint.matrix(f"{self.names['token_embd']}.weight"))

    def build_head(self, x: str) -> None:
        """The logits from the output of the last norm."""
        stored = f"{self.names['token_embd']}.weight" if self._tied else HEAD
        self.graph.head(x, self.checkpoint.matrix(stored))

    def _norms(self) -> Iterator[str]:
        """The stored names of the norms in the order of the forward pass."""
        for index in range(self.shape.num_layers):
            yield f"{self._layer(index)}.{self.names['blk.attn_norm']}"
            yield f"{self._layer(index)}.{self.names['blk.ffn_norm']}"
        if self.norm_before:
            yield self.names["output_norm"]

    def _layer(self, index: int) -> str:
        """The first part of the names of a layer's tensors."""
        return f"{self.names['blk']}.{index}"

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


class GPT2(LayerNormDecoder, architectures="GPT2LMHeadModel", gguf="gpt2"):
    """GPT-2 in all sizes, DistilGPT-2 and every other GPT2LMHeadModel."""

    name = "gpt2"
    activation = "gelu_tanh"
    transposed = True
    ignored_tensors = ("*.attn.bias", "*.attn.masked_bias")  # the causal mask, as a buffer
    sizes = ("n_embd", "n_layer", "n_head", "n_positions")
    names: ClassVar = {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk": "transformer.h",
        "blk.attn_norm": "ln_1",
        "blk.attn_qkv": "attn.c_attn",
        "blk.attn_output": "attn.c_proj",
        "blk.ffn_norm": "ln_2",
        "blk.ffn_up": "mlp.c_fc",
        "blk.ffn_down": "mlp.c_proj",
    }
    gguf_integers: ClassVar = {
        "n_embd": "{arch}.embedding_length",
        "n_layer": "{arch}.block_count",
        "n_head": "{arch}.attention.head_count",
        "n_positions": "{arch}.context_length",
        "n_inner": "{arch}.feed_forward_length",
    }
    gguf_numbers: ClassVar = {"layer_norm_epsilon": "{arch}.attention.layer_norm_epsilon"}

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
    names: ClassVar = {
        "token_embd": "model.decoder.embed_tokens",
        "position_embd": "model.decoder.embed_positions",
        "output_norm": "model.decoder.final_layer_norm",
        "blk": "model.decoder.layers",
        "blk.attn_norm": "self_attn_layer_norm",
        "blk.attn_q": "self_attn.q_proj",
        "blk.attn_k": "self_attn.k_proj",
        "blk.attn_v": "self_attn.v_proj",
        "blk.attn_output": "self_attn.out_proj",
        "blk.ffn_norm": "final_layer_norm",
        "blk.ffn_up": "fc1",
        "blk.ffn_down": "fc2",
    }

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
