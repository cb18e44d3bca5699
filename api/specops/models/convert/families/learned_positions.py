"""GPT-2 and OPT: learned positions, layer norms, biases, a feed-forward without a gate.

Tensor names follow transformers' GPT2LMHeadModel and OPTForCausalLM.
"""

from typing import ClassVar

from specops.models.convert.families.family import Shapes
from specops.models.convert.families.gated_decoder import QKV, GatedDecoder, Norms
from specops.models.convert.model_config import ModelConfig

_PROJECT_IN = "model.decoder.project_in.weight"
_PROJECT_OUT = "model.decoder.project_out.weight"


class GPT2(GatedDecoder, architectures="GPT2LMHeadModel", gguf="gpt2"):
    """GPT-2 in all sizes, DistilGPT-2 and every other GPT2LMHeadModel."""

    name = "gpt2"
    sizes = ("n_embd", "n_layer", "n_head", "n_positions", "n_inner")
    defaults: ClassVar = {"tie_word_embeddings": True}
    must_be_false = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    optional_biases = ()
    activation = ("activation_function", "gelu_new")
    attention_norms, feed_forward_norms = Norms("ln_1"), Norms("ln_2")
    layer_norms = transposed = True
    epsilon = ("layer_norm_epsilon", 1e-5)
    positions = ("wpe", 0)
    stem, embedding, stack, final_norm = "transformer", "wte", "h", "ln_f"
    qkv, output = ("attn.c_attn",), "attn.c_proj"
    up, down = ("mlp.c_fc",), "mlp.c_proj"
    always_biased = (*qkv, output, *up, down)
    gguf_integers: ClassVar = {
        "n_embd": "{arch}.embedding_length",
        "n_layer": "{arch}.block_count",
        "n_head": "{arch}.attention.head_count",
        "n_positions": "{arch}.context_length",
        "n_inner": "{arch}.feed_forward_length",
    }

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("scale_attn_weights", True)
        super().__init__(config.with_defaults({"n_inner": 4 * config.integer("n_embd")}))
        # The causal mask, as a buffer.
        self.ignored_tensors += ("*.attn.bias", "*.attn.masked_bias")


class OPT(GatedDecoder, architectures="OPTForCausalLM"):
    """OPT from 125m to 66b.

    The 350m has its norms after the sums. Its embedding and head are narrower than its layers,
    with a projection between.
    """

    name = "opt"
    sizes = (*GatedDecoder.sizes[:-1], "ffn_dim")
    defaults: ClassVar = {"tie_word_embeddings": True}
    must_be_false = ("_remove_final_layer_norm",)
    optional_biases = ()
    activation = ("activation_function", "relu")
    attention_norms, feed_forward_norms = Norms("self_attn_layer_norm"), Norms("final_layer_norm")
    layer_norms = True
    epsilon = ("", 1e-5)  # torch's default; OPT's config has no key for it
    positions = ("embed_positions", 2)  # the rows before were meant for padding
    stem, final_norm = "model.decoder", "final_layer_norm"
    output, up, down = "self_attn.out_proj", ("fc1",), "fc2"
    always_biased = (*QKV, output, *up, down)

    def __init__(self, config: ModelConfig) -> None:
        config.require_flag("enable_bias", True)
        config.require_flag("layer_norm_elementwise_affine", True)
        super().__init__(config)
        self.post_norm = not config.flag("do_layer_norm_before", True)
        self.embedding_size = config.integer("word_embed_proj_dim", self.shape.hidden_size)
        self._projected = self.embedding_size != self.shape.hidden_size

    def tensors(self) -> Shapes:
        """All tensors, with the projections if the embedding is narrower than the layers."""
        shapes, narrow, wide = super().tensors(), self.embedding_size, self.shape.hidden_size
        if self._projected:
            shapes |= {_PROJECT_IN: (wide, narrow), _PROJECT_OUT: (narrow, wide)}
        return shapes

    def embedded(self) -> str:
        """The token embeddings, widened if need be."""
        x = super().embedded()
        if self._projected:
            x = self.graph.linear("project_in", x, self.checkpoint.matrix(_PROJECT_IN))
        return x

    def write_logits(self, x: str) -> None:
        """The logits, after a projection if need be."""
        if self._projected:
            x = self.graph.linear("project_out", x, self.checkpoint.matrix(_PROJECT_OUT))
        super().write_logits(x)
