"""The OPT family: ReLU, positions from the third row of their table on, norms first or last.

Tensor names are those of transformers' OPTForCausalLM. The 350m normalizes after the sums, and its
embedding and head are narrower than its layers, with a projection between.
"""

from __future__ import annotations

from specops.models.convert.families.layer_norm_decoder import LayerNormDecoder, StoredNames
from specops.models.convert.model_config import ModelConfig

_PROJECT_IN = "model.decoder.project_in.weight"
_PROJECT_OUT = "model.decoder.project_out.weight"


class OPT(LayerNormDecoder):
    """OPT from 125m to 66b."""

    name = "opt"
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

    def activation(self, name: str, x: str) -> str:
        """ReLU."""
        return self.graph.relu(name, x)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The projections where the embedding is narrower than the layers, and all the rest."""
        shapes = super().tensors()
        if self._projected:
            shapes[_PROJECT_IN] = (self.shape.hidden_size, self.embedding_size)
            shapes[_PROJECT_OUT] = (self.embedding_size, self.shape.hidden_size)
        return shapes

    def draw_embedding(self) -> str:
        """The tokens, widened if need be."""
        x = super().draw_embedding()
        if self._projected:
            x = self.graph.linear("project_in", x, self.checkpoint.matrix(_PROJECT_IN))
        return x

    def draw_head(self, x: str) -> None:
        """The logits, narrowed before if need be."""
        if self._projected:
            x = self.graph.linear("project_out", x, self.checkpoint.matrix(_PROJECT_OUT))
        super().draw_head(x)

    @property
    def _projected(self) -> bool:
        return self.embedding_size != self.shape.hidden_size
