"""Gemma 4 without experts: two kinds of attention, shared keys and values, embeddings per layer."""

from typing import Any, ClassVar

import numpy as np

from specops.models.convert.families.family import Config, Shapes
from specops.models.convert.families.gated_decoder import (
    FULL,
    LOCAL,
    SLIDING,
    check_head_dim,
    text_config,
)
from specops.models.convert.families.gemma import Gemma
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.rope import Rotary, rotary

_BY_LAYER = "per_layer_config"
_ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_SHARED = ("k_proj", "v_proj", "k_norm")  # published files have them in layers that read others'
_TABLE, _PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
_TABLE_NORM = "per_layer_projection_norm"
_GATE, _UP = "per_layer_input_gate", "per_layer_projection"
_NORM_AFTER = "post_per_layer_input_norm"
_NOTHING_TURNS = 1e29  # a divisor of frequencies


class Gemma4(
    Gemma,
    architectures="Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    model_types="gemma4_text gemma4",
    gguf="gemma4",
):
    """Gemma 4 E2B, E4B and 31B.

    Layers without a window have larger heads. The last layers read the keys and values of the last
    earlier layer of their kind. Each layer adds its part of the token's row in a separate table.
    """

    name = "gemma4"
    defaults: ClassVar = {
        **Gemma.defaults,
        "vocab_size": 262_144,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "rope_parameters": _ROPE,
        "hidden_size_per_layer_input": 256,
    }
    optional_biases = ()
    head_norms = True
    full_layer_every = 6
    local_table = LOCAL
    gguf_numbers: ClassVar = {"final_logit_softcapping": "{arch}.final_logit_softcapping"}
    gguf_keys = (
        *(f"{{arch}}.attention.{part}_length_swa" for part in ("key", "value")),
        *(f"{{arch}}.rope.{key}_swa" for key in ("freq_base", "dimension_count")),
    )
    gguf_names: ClassVar = {
        "per_layer_token_embd": f"model.{_TABLE}",
        "per_layer_model_proj": f"model.{_PROJECTION}",
        "per_layer_proj_norm": f"model.{_TABLE_NORM}",
        "blk.layer_output_scale.weight": "layer_scalar",
        "blk.inp_gate": _GATE,
        "blk.proj": _UP,
        "blk.post_norm": _NORM_AFTER,
    }

    def __init__(self, config: ModelConfig) -> None:
        config = text_config(config)
        sized = config.numbered(_BY_LAYER)
        super().__init__(config if sized is None else _together(config, sized))
        config, shape, layers = self.config, self.shape, self.shape.num_layers
        if config.text("use_bidirectional_attention", "vision") != "vision":  # of images alone
            raise config.error("use_bidirectional_attention", "must be 'vision' or absent")
        self.attention_scale = 1.0
        self.logit_softcap = config.factor("final_logit_softcapping")
        self._per_layer = config.count("hidden_size_per_layer_input")
        self._table_rows = config.integer("vocab_size_per_layer_input", shape.vocab_size)
        if self._table_rows < shape.vocab_size:
            raise config.error("vocab_size_per_layer_input", f"is below {shape.vocab_size}")
        self._keys_are_values = config.flag("attention_k_eq_v", False)
        self._full_kv_heads = shape.num_kv_heads
        if self._keys_are_values or sized is not None:
            self._full_kv_heads = config.integer("num_global_key_value_heads", shape.num_kv_heads)
            if shape.num_heads % self._full_kv_heads:
                raise config.error(
                    "num_global_key_value_heads",
                    f"must divide num_attention_heads, {shape.num_heads}",
                )
        self._wide = config.flag("use_double_wide_mlp", False)
        kinds = [layer.window is None for layer in self.layers]
        if sized and kinds != [index in sized for index in range(layers)]:
            raise config.error(_BY_LAYER, f"must have the layers of the type {FULL}, and no others")
        if not kinds[-1]:
            raise config.error("layer_types", f"must end with {FULL}")
        self._own = layers - config.count("num_kv_shared_layers")  # layers with their own keys
        if not {*kinds[self._own :]} <= {*kinds[: max(self._own, 0)]}:
            raise config.error(
                "num_kv_shared_layers",
                f"is {layers - self._own} of {layers}: their kinds need layers with keys before",
            )
        self._sources = [*range(self._own)]  # the layers whose keys and values each one reads
        for kind in kinds[self._own :]:
            self._sources.append(self._own - 1 - kinds[: self._own][::-1].index(kind))
        self._written: dict[int, tuple[str, str]] = {}  # keys and values by layer, in the graph
        self._inputs = ""  # of all layers, in the graph
        self.ignored_tensors += tuple(
            f"*layers.{index}.self_attn.{part}.weight"
            for index in range(self._own, layers)
            for part in _SHARED
        )

    def rotary_tables(self, config: ModelConfig) -> dict[str, Rotary]:
        """One table for each kind of layer."""
        positions, given = self.shape.context_length, config.section("rope_parameters")
        if given is None:
            raise config.error("rope_parameters", "is missing")
        given = given.with_defaults(_ROPE)
        self._full_size = config.integer("global_head_dim")
        check_head_dim(config, "global_head_dim", self._full_size)
        sizes = {FULL: ("", self._full_size), SLIDING: (LOCAL, self.shape.head_dim)}
        return {
            name: rotary(config, size, positions, scaling=given.section(kind))
            for kind, (name, size) in sizes.items()
        }

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """The kinds of layers, the sharing of the last ones, and the rotation of full ones."""
        kinds, size = config.get("layer_types") or [], config["head_dim"]
        if len(kinds) != config["num_hidden_layers"] or {*kinds} != {FULL, SLIDING}:
            key = "{arch}.attention.sliding_window_pattern"
            raise metadata.error(key, "must list layers of both kinds")
        local_size = metadata.integer("{arch}.attention.key_length_swa")
        for key, expected in {
            "{arch}.rope.dimension_count_swa": local_size,
            "{arch}.rope.dimension_count": size,
        }.items():
            if metadata.integer(key, expected) != expected:
                raise metadata.error(key, f"must be {expected}, the size of a head")
        # Frequencies are divided by 1, or by a number so large that nothing turns.
        scaling = config["rope_scaling"] or {"factors": [1.0] * (size // 2)}
        divisors = scaling.get("factors", [])
        turning = sum(divisor == 1 for divisor in divisors)
        still = sum(divisor >= _NOTHING_TURNS for divisor in divisors[turning:])
        if turning + still != size // 2:
            raise metadata.error("{arch}.rope.freq_base", "has other factors than Gemma 4's")
        rotations = {
            kind: {**usual, "rope_theta": metadata.number(key, usual["rope_theta"])}
            for key, (kind, usual) in zip(
                ("{arch}.rope.freq_base", "{arch}.rope.freq_base_swa"), _ROPE.items(), strict=True
            )
        }
        rotations[FULL]["partial_rotary_factor"] = 2 * turning / max(size, 1)
        heads = metadata.per_layer("{arch}.attention.head_count_kv")
        kv_heads = dict(zip(kinds, heads, strict=True))
        widths = metadata.per_layer("{arch}.feed_forward_length")
        table = tensors.get("per_layer_token_embd.weight")
        return {
            "head_dim": local_size,
            "global_head_dim": size,
            "num_key_value_heads": kv_heads[SLIDING],
            "num_global_key_value_heads": kv_heads[FULL],
            "attention_k_eq_v": f"blk.{kinds.index(FULL)}.attn_v.weight" not in tensors,
            "num_kv_shared_layers": metadata.integer("{arch}.attention.shared_kv_layers", 0),
            "intermediate_size": widths[0],
            "use_double_wide_mlp": widths[0] != widths[-1],
            "hidden_size_per_layer_input": metadata.integer(
                "{arch}.embedding_length_per_layer_input", 0
            ),
            "vocab_size_per_layer_input": table.shape[0] if table else None,
            "rope_parameters": rotations,
            "rope_scaling": None,
        }

    def heads(self, index: int) -> tuple[int, int]:
        """Layers without a window have their own."""
        if self.layers[index].window is None:
            return self._full_kv_heads, self._full_size
        return self.shape.num_kv_heads, self.shape.head_dim

    def _parts(self, index: int) -> str:
        """Which of q, k and v a layer has projections for."""
        if index >= self._own:
            return "q"
        return "qk" if self._keys_are_values and self.layers[index].window is None else "qkv"

    def tensors(self) -> Shapes:
        """The table of the layers' own rows, too."""
        shapes, hidden, width = super().tensors(), self.shape.hidden_size, self._per_layer
        if width:
            together = width * self.shape.num_layers
            shapes |= {
                f"{self.stem}.{_TABLE}.weight": (self._table_rows, together),
                f"{self.stem}.{_PROJECTION}.weight": (together, hidden),
                f"{self.stem}.{_TABLE_NORM}.weight": (width,),
            }
        return shapes

    def feed_forward_width(self, index: int) -> int:
        """Layers that share another's keys may be twice as wide."""
        return self.feed_forward_size * (2 if self._wide and index >= self._own else 1)

    def layer_tensors(self, index: int) -> Shapes:
        """Not all layers have keys or values; each has its own input, and a factor."""
        layer, hidden = super().layer_tensors(index), self.shape.hidden_size
        for part in {*"qkv"}.difference(self._parts(index)):
            layer.pop(f"self_attn.{part}_proj.weight")
            layer.pop(f"self_attn.{part}_norm.weight", None)
        if self._per_layer:
            layer |= {
                f"{_GATE}.weight": (self._per_layer, hidden),
                f"{_UP}.weight": (hidden, self._per_layer),
                f"{_NORM_AFTER}.weight": (hidden,),
            }
        return layer | {"layer_scalar": (1,)}

    # -- the graph ----------------------------------------------------------------------------

    def read_embeddings(self, x: str) -> None:
        """The rows of the layers' own table, and a projection of `x`, which is normalized."""
        width, layers, graph = self._per_layer, self.shape.num_layers, self.graph
        if not width:
            return
        half = np.float32(2**-0.5)  # both are added and multiplied by it
        rows = graph.rows_on_disk(
            "per_layer.rows", self.checkpoint.matrix(f"{self.stem}.{_TABLE}.weight")
        )
        rows = graph.scaled("per_layer.scaled", rows, width**0.5 * half)
        projection = self.checkpoint.matrix(f"{self.stem}.{_PROJECTION}.weight")
        projected = graph.linear("per_layer.projection", x, projection)
        # transformers divides by the hidden size's root first: the norm undoes all but epsilon.
        epsilon = self._epsilon * self.shape.hidden_size
        weight = self.norm(f"{self.stem}.{_TABLE_NORM}") * half
        projected = graph.part_norm("per_layer.normed", projected, layers, weight, epsilon)
        self._inputs = graph.add("per_layer.inputs", projected, rows)

    def mix(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """Attention with norms of queries, keys and values; the values' have no weight."""
        graph, name, stored = self.graph, f"layers.{index}", f"{self.layer(index)}.self_attn"
        (kv_heads, size), parts = self.heads(index), self._parts(index)
        widths = [size * self.shape.num_heads, size * kv_heads, size * kv_heads][: len(parts)]
        weight = self.checkpoint.matrix(*(f"{stored}.{part}_proj.weight" for part in parts))
        values = size * kv_heads if "v" in parts else 0
        found = [graph.linear(f"{name}.qkv", x, weight, value_size=values)]
        if parts != "q":
            found = graph.split(f"{name}.projections", found[0], widths)
            norms = {"keys": self.norm(f"{stored}.k_norm"), "values": np.ones(size, np.float32)}
            keys, normed_values = (
                graph.head_norm(f"{name}.{kind}", item, widths[1], norms[kind], self._epsilon)
                for kind, item in (("keys", found[1]), ("values", found[-1]))
            )
            self._written[index] = keys, normed_values
        norm = self.norm(f"{stored}.q_norm")
        queries = graph.head_norm(f"{name}.queries", found[0], widths[0], norm, self._epsilon)
        x = graph.attention(
            index,
            queries,
            *self._written[self._sources[index]],
            rotary=rotary,
            window=window,
            scale=self.attention_scale,
            kv_heads=kv_heads,
            head_dim=size,
        )
        x = self.linear(index, self.output, x)
        return self._part_output(f"{name}.attention", x, index, self.attention_norms)

    def end_layer(self, index: int, name: str, x: str, residual: str, norm: str) -> tuple[str, str]:
        """Adds the contribution of the layer's own input, and multiplies the sum by a number."""
        graph, layer, stored = self.graph, f"layers.{index}", self.layer(index)
        total = graph.add(f"{layer}.fed", x, residual)
        if self._inputs:
            gate, up = (self.checkpoint.matrix(f"{stored}.{part}.weight") for part in (_GATE, _UP))
            x = graph.linear(f"{layer}.own.gate", total, gate)
            x = graph.activation("gelu_tanh", f"{layer}.own.gated.gelu", x)
            start, stop = index * self._per_layer, (index + 1) * self._per_layer
            given = graph.part(f"{layer}.own", self._inputs, start, stop)
            x = graph.multiply(f"{layer}.own.gated", x, given)
            x = graph.linear(f"{layer}.own.up", x, up)
            after = self.norm(f"{stored}.{_NORM_AFTER}")
            x = graph.norm(f"{layer}.own.after", x, after, self._epsilon)
            total = graph.add(f"{layer}.own.added", total, x)
        (scalar,) = self.checkpoint.vector(f"{stored}.layer_scalar")
        total = graph.scaled(f"{layer}.multiplied", total, float(scalar))
        return self._normalized(name, total, norm), total


def _together(config: ModelConfig, by_layer: dict[int, ModelConfig]) -> ModelConfig:
    """The sizes of layers without a window under the keys that published files have for them.

    transformers writes them by layer, since 5.24 at the latest.
    """
    usual = config.with_defaults(Gemma4.defaults)
    heads = {name: usual.integer(name) for name in ("head_dim", "num_key_value_heads")}
    sizes = {tuple(part.integer(name, heads[name]) for name in heads) for part in by_layer.values()}
    sizes = sizes or {tuple(heads.values())}  # it names no layer where all have the same
    if len(sizes) != 1:
        raise config.error(_BY_LAYER, "must have the same sizes for all layers that it names")
    ((size, kv_heads),) = sizes
    return config.replaced(global_head_dim=size, num_global_key_value_heads=kv_heads)
