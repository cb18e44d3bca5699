"""The Llama family: RMS norm, rotary grouped-query attention, SiLU-gated feed-forward, no biases.

Tensor names are those of transformers' LlamaForCausalLM.
"""

from __future__ import annotations

from specops.export.checkpoint import Checkpoint
from specops.export.families.family import Family
from specops.export.graph import DecoderGraph
from specops.export.model_config import ModelConfig, ModelShape
from specops.export.rope import rotary_table

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


class Llama(Family):
    """Llama 1 to 3, TinyLlama, SmolLM and what else calls itself LlamaForCausalLM."""

    name = "llama"

    def __init__(self, config: ModelConfig) -> None:
        for key in ("attention_bias", "mlp_bias"):
            if config.flag(key, False):
                raise config.error(key, "is true; biases cannot be exported for this family")
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
            context_length=config.integer("max_position_embeddings", 2048),
        )
        if heads % self.shape.num_kv_heads:
            raise config.error("num_key_value_heads", f"must divide num_attention_heads, {heads}")
        self._feed_forward = config.integer("intermediate_size")
        self._epsilon = config.number("rms_norm_eps", 1e-6)
        self._tied = config.flag("tie_word_embeddings", False)
        self._rotary = rotary_table(config, self.shape.head_dim, self.shape.context_length)
        # old checkpoints store the rotary frequencies, and a tied head is sometimes stored twice
        self.ignored_tensors = ("rotary_emb.inv_freq", *([_HEAD] if self._tied else []))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Embedding, final norm, head unless tied, and nine tensors a layer."""
        hidden, wide = self.shape.hidden_size, self._feed_forward
        queries = self.shape.num_heads * self.shape.head_dim
        keys = self.shape.num_kv_heads * self.shape.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: (self.shape.vocab_size, hidden),
            _FINAL_NORM: (hidden,),
        }
        if not self._tied:
            shapes[_HEAD] = (self.shape.vocab_size, hidden)
        for index in range(self.shape.num_layers):
            for part, shape in layer.items():
                shapes[f"model.layers.{index}.{part}.weight"] = shape
        return shapes

    def draw(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Each sum with the residual is fused with the norm that follows it."""
        rotary = graph.rotary_table(*self._rotary)
        residual = graph.embedding(checkpoint.matrix(_EMBEDDING))
        first_norm = checkpoint.vector("model.layers.0.input_layernorm.weight")
        x = graph.rms_norm("layers.0.input_norm", residual, first_norm, self._epsilon)
        for index in range(self.shape.num_layers):
            stored = f"model.layers.{index}"
            x = self._attention(graph, checkpoint, index, x, rotary)
            norm = checkpoint.vector(f"{stored}.post_attention_layernorm.weight")
            x, residual = graph.add_rms_norm(
                f"layers.{index}.feed_forward_norm", x, residual, norm, self._epsilon
            )
            x = self._feed_forward_block(graph, checkpoint, index, x)
            last = index + 1 == self.shape.num_layers
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
        heads = checkpoint.matrix(*(f"{stored}.{part}_proj.weight" for part in "qkv"))
        x = graph.attention(index, graph.linear(f"{name}.qkv", x, heads), rotary)
        output = checkpoint.matrix(f"{stored}.o_proj.weight")
        return graph.linear(f"{name}.attention_output", x, output)

    def _feed_forward_block(
        self, graph: DecoderGraph, checkpoint: Checkpoint, index: int, x: str
    ) -> str:
        # gate and up apart: side by side in one product, splitting its result costs more
        name, stored = f"layers.{index}", f"model.layers.{index}.mlp"
        gate = graph.linear(f"{name}.gate", x, checkpoint.matrix(f"{stored}.gate_proj.weight"))
        up = graph.linear(f"{name}.up", x, checkpoint.matrix(f"{stored}.up_proj.weight"))
        x = graph.gated_silu(f"{name}.gated", gate, up)
        return graph.linear(f"{name}.down", x, checkpoint.matrix(f"{stored}.down_proj.weight"))
