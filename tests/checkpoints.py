"""Hugging Face checkpoints with random weights of any size, written without torch.

Both transformers and the converter load such a folder: config.json, model.safetensors (or shards
with an index) and a byte-level tokenizer.json, trained on the spot. Keys of the configuration,
names of tensors, order of axes and buffers are those of published checkpoints.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from tests.random_weights import RandomWeights, Shapes, write_safetensors

Config = dict[str, Any]
ShapesOf = Callable[[Config], Shapes]

_CORPUS = ["def add(a, b):\n    return a + b\n", "The quick brown fox jumps over the lazy dog.\n"]
_MIN_VOCAB = 257  # 256 bytes and the end-of-text token
_SIZES = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 320, "context": 256}


# -- shapes from a config.json ---------------------------------------------------------------------


def _layers(layers: Iterable[Shapes]) -> Shapes:
    """The tensors of all layers, from the parts of each."""
    return {
        f"model.layers.{index}.{part}": shape
        for index, parts in enumerate(layers)
        for part, shape in parts.items()
    }


def _ends(settings: Config) -> Shapes:
    """The tensors before and behind the layers."""
    hidden = settings["hidden_size"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (settings["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return shapes


def _projections(hidden: int, queries: int, keys: int) -> Shapes:
    """Those of attention, with so many numbers of queries, and of keys or values."""
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }


def _feed_forward(hidden: int, wide: int) -> Shapes:
    return {
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }


def llama_shapes(settings: Config) -> Shapes:
    """The tensors of a Llama checkpoint with this config.json."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    head = settings.get("head_dim") or hidden // heads
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        **_projections(hidden, head * heads, head * settings["num_key_value_heads"]),
        "post_attention_layernorm.weight": (hidden,),
        **_feed_forward(hidden, settings["intermediate_size"]),
    }
    for key, part in (("attention_bias", "self_attn."), ("mlp_bias", "mlp.")):
        if settings.get(key):
            layer |= _biases(layer, [name for name in layer if name.startswith(part)])
    embedding, *behind = _ends(settings).items()
    layers = _layers([layer] * settings["num_hidden_layers"])
    return dict([embedding, *layers.items(), *behind])


def _biases(shapes: Shapes, names: Iterable[str]) -> Shapes:
    """The biases of products with these names."""
    return {name.replace(".weight", ".bias"): shapes[name][:1] for name in names}


def qwen2_shapes(settings: Config) -> Shapes:
    """Llama's, with biases on q, k and v."""
    shapes = llama_shapes(settings)
    biased = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return shapes | _biases(shapes, [name for name in shapes if name.endswith(biased)])


def phi3_shapes(settings: Config) -> Shapes:
    """Llama's, with q, k and v stacked, and gate and up stacked."""
    shapes: Shapes = {}
    for name, (*rows, columns) in llama_shapes(settings).items():
        if name.endswith("q_proj.weight"):
            heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
            fused = rows[0] + 2 * kv_heads * rows[0] // heads
            shapes[name.replace("q_proj", "qkv_proj")] = (fused, columns)
        elif name.endswith("gate_proj.weight"):
            shapes[name.replace("gate_proj", "gate_up_proj")] = (2 * rows[0], columns)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            shapes[name] = (*rows, columns)
    return shapes


def relative_shapes(settings: Config) -> Shapes:
    """Llama's, with the names, norms and biases of one of `RELATIVES`."""
    kind, hidden = settings["model_type"], settings["hidden_size"]
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    head = settings.get("head_dim") or hidden // heads
    wide = kind in ("olmo2", "olmo3")
    sizes = {"q": heads * head, "k": kv_heads * head} if wide else {"q": head, "k": head}
    shapes: Shapes = {}
    for stored, shape in llama_shapes(settings).items():
        if any(part in stored for part in _LEFT_OUT.get(kind, ())):
            continue
        name, rows = stored, shape
        for theirs, ours in _RENAMED.get(kind, {}).items():
            name = name.replace(theirs, ours)
        if name.endswith("gate_up_proj.weight"):
            rows = (2 * shape[0], hidden)
        shapes[name] = rows
        if any(part in name for part in _BIASED.get(kind, ())):
            shapes[name.replace(".weight", ".bias")] = rows[:1]
        layer, part, _ = stored.partition(".post_attention_layernorm.")
        for norm in _MORE_NORMS.get(kind, ()) if part else ():
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        if part and kind in (*_ONLY_AFTER, "gemma3_text", "qwen3"):
            for which, size in sizes.items():
                shapes[f"{layer}.self_attn.{which}_norm.weight"] = (size,)
    return shapes


_ONLY_AFTER = ("olmo2", "olmo3", "exaone4")
_GEMMA = ("gemma2", "gemma3_text")
_MORE_NORMS = {
    **dict.fromkeys(_ONLY_AFTER, ("post_feedforward_layernorm",)),
    **dict.fromkeys(_GEMMA, ("post_feedforward_layernorm", "pre_feedforward_layernorm")),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
}
_LEFT_OUT = {
    **dict.fromkeys(_ONLY_AFTER, ("input_layernorm",)),
    "cohere2": ("post_attention_layernorm",),
    "glm4": ("up_proj", "o_proj.bias"),
    "phi": ("post_attention_layernorm", "gate_proj"),
    "starcoder2": ("gate_proj",),
}
_BIASED = {"phi": ("layers", "norm", "lm_head"), "starcoder2": ("layers", "norm")}
_RENAMED = {
    "glm4": {"gate_proj": "gate_up_proj"},
    "starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
    "phi": {
        "o_proj": "dense",
        "up_proj": "fc1",
        "down_proj": "fc2",
        "model.norm": "model.final_layernorm",
    },
}


def gemma4_shapes(settings: Config) -> Shapes:
    """Layers of two kinds; the last ones have no keys and values of their own."""
    hidden, count = settings["hidden_size"], settings["num_hidden_layers"]
    width, own = settings["hidden_size_per_layer_input"], count - settings["num_kv_shared_layers"]
    layers = list[Shapes]()
    shapes: Shapes = {
        "model.embed_tokens.weight": (settings["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if width:
        shapes |= {
            "model.embed_tokens_per_layer.weight": (
                settings["vocab_size_per_layer_input"],
                count * width,
            ),
            "model.per_layer_model_projection.weight": (count * width, hidden),
            "model.per_layer_projection_norm.weight": (width,),
        }
    for index, kind in enumerate(settings["layer_types"]):
        full = kind == "full_attention"
        head = settings["global_head_dim" if full else "head_dim"]
        same = settings["attention_k_eq_v"] and full
        keys = head * settings["num_global_key_value_heads" if same else "num_key_value_heads"]
        queries = head * settings["num_attention_heads"]
        wide = settings["intermediate_size"]
        if settings["use_double_wide_mlp"] and index >= own:
            wide *= 2
        layer: Shapes = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.q_norm.weight": (head,),
            "self_attn.o_proj.weight": (hidden, queries),
            **_feed_forward(hidden, wide),
            **{f"{norm}.weight": (hidden,) for norm in _GEMMA4_NORMS},
        }
        if index < own:
            layer |= {
                "self_attn.k_proj.weight": (keys, hidden),
                "self_attn.k_norm.weight": (head,),
            }
            layer |= {} if same else {"self_attn.v_proj.weight": (keys, hidden)}
        if width:
            layer |= {
                "per_layer_input_gate.weight": (width, hidden),
                "per_layer_projection.weight": (hidden, width),
                "post_per_layer_input_norm.weight": (hidden,),
            }
        layers.append(layer | {"layer_scalar": (1,)})
    return shapes | _layers(layers)


_GEMMA4_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def attention_layers(kinds: Sequence[str]) -> list[int]:
    """The layers with attention, of the `layer_types` of a configuration."""
    with_keys = ("attention", "full_attention", "sliding_attention")
    return [index for index, kind in enumerate(kinds) if kind in with_keys]


def lfm2_shapes(settings: Config) -> Shapes:
    """Convolutions in the layers without attention; heads of queries and keys have norms."""
    hidden, wide = settings["hidden_size"], settings["block_ff_dim"]
    if settings.get("block_auto_adjust_ff_dim", True):
        wide = -(-(2 * wide // 3) // settings["block_multiple_of"]) * settings["block_multiple_of"]
    kinds = settings.get("layer_types")
    attended = settings["full_attn_idxs"] if kinds is None else attention_layers(kinds)
    head = hidden // settings["num_attention_heads"]
    keys = head * settings["num_key_value_heads"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (settings["vocab_size"], hidden),
        "model.embedding_norm.weight": (hidden,),
    }
    attention: Shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.out_proj.weight": (hidden, hidden),
        "self_attn.q_layernorm.weight": (head,),
        "self_attn.k_layernorm.weight": (head,),
    }
    convolution: Shapes = {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, settings["conv_L_cache"]),
        "conv.out_proj.weight": (hidden, hidden),
    }
    both: Shapes = {
        "operator_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "feed_forward.w1.weight": (wide, hidden),
        "feed_forward.w3.weight": (wide, hidden),
        "feed_forward.w2.weight": (hidden, wide),
    }
    full = (layer in attended for layer in range(settings["num_hidden_layers"]))
    return shapes | _of_two_kinds(full, attention, convolution, both)


def _of_two_kinds(full: Iterable[bool], attention: Shapes, other: Shapes, both: Shapes) -> Shapes:
    """Layers with attention and others, and what both kinds have."""
    return _layers((attention if has else other) | both for has in full)


def qwen35_shapes(settings: Config) -> Shapes:
    """Heads of queries give a gate, too; layers without attention have the gated delta rule."""
    hidden, wide = settings["hidden_size"], settings["intermediate_size"]
    head, keys = settings["head_dim"], settings["head_dim"] * settings["num_key_value_heads"]
    queries = head * settings["num_attention_heads"]
    value_heads = settings["linear_num_value_heads"]
    values = value_heads * settings["linear_value_head_dim"]
    channels = values
    channels += 2 * settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
    attention = _projections(hidden, queries, keys) | {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    delta: Shapes = {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (value_heads, hidden),
        "linear_attn.in_proj_b.weight": (value_heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, settings["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.norm.weight": (settings["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }
    both: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **_feed_forward(hidden, wide),
    }
    interval = settings["full_attention_interval"]
    full = ((layer + 1) % interval == 0 for layer in range(settings["num_hidden_layers"]))
    return _ends(settings) | _of_two_kinds(full, attention, delta, both)


def granite_hybrid_shapes(settings: Config) -> Shapes:
    """Layers without attention have Mamba-2; a feed-forward's first product is one tensor."""
    hidden, wide = settings["hidden_size"], settings["shared_intermediate_size"]
    head = hidden // settings["num_attention_heads"]
    heads, keys = settings["mamba_n_heads"], head * settings["num_key_value_heads"]
    inner = heads * settings["mamba_d_head"]
    channels = inner + 2 * settings["mamba_d_state"]
    attention = _projections(hidden, hidden, keys)
    mamba: Shapes = {
        "mamba.in_proj.weight": (inner + channels + heads, hidden),
        "mamba.conv1d.weight": (channels, 1, settings["mamba_d_conv"]),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.dt_bias": (heads,),
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (hidden, inner),
    }
    if settings["mamba_conv_bias"]:
        mamba["mamba.conv1d.bias"] = (channels,)
    both: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "shared_mlp.input_linear.weight": (2 * wide, hidden),
        "shared_mlp.output_linear.weight": (hidden, wide),
    }
    full = (kind == "attention" for kind in settings["layer_types"])
    return _ends(settings) | _of_two_kinds(full, attention, mamba, both)


def opt_shapes(settings: Config, prefix: str = "model.") -> Shapes:
    """The tensors of an OPT checkpoint; `prefix` is empty in the oldest ones."""
    hidden, wide = settings["hidden_size"], settings["ffn_dim"]
    vocab, projection = settings["vocab_size"], settings["word_embed_proj_dim"]
    positions = settings["max_position_embeddings"] + 2
    shapes: Shapes = {
        f"{prefix}decoder.embed_tokens.weight": (vocab, projection),
        f"{prefix}decoder.embed_positions.weight": (positions, hidden),
    }
    if projection != hidden:
        shapes[f"{prefix}decoder.project_in.weight"] = (hidden, projection)
        shapes[f"{prefix}decoder.project_out.weight"] = (projection, hidden)
    if not settings.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, projection)
    if settings["do_layer_norm_before"]:
        shapes |= _with_bias(f"{prefix}decoder.final_layer_norm", (hidden,))
    for layer in range(settings["num_hidden_layers"]):
        stored = f"{prefix}decoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _with_bias(f"{stored}.self_attn.{part}", (hidden, hidden))
        shapes |= _with_bias(f"{stored}.self_attn_layer_norm", (hidden,))
        shapes |= _with_bias(f"{stored}.fc1", (wide, hidden))
        shapes |= _with_bias(f"{stored}.fc2", (hidden, wide))
        shapes |= _with_bias(f"{stored}.final_layer_norm", (hidden,))
    return shapes


def gpt2_shapes(settings: Config, prefix: str = "") -> Shapes:
    """The tensors of a GPT-2 checkpoint; with a `prefix` where the head was saved along.

    Weights are stored [in, out], and every layer carries its causal mask, as on the hub.
    """
    hidden, context = settings["n_embd"], settings["n_positions"]
    wide = settings.get("n_inner") or 4 * hidden
    shapes: Shapes = {
        f"{prefix}wte.weight": (settings["vocab_size"], hidden),
        f"{prefix}wpe.weight": (context, hidden),
        **_with_bias(f"{prefix}ln_f", (hidden,)),
    }
    if not settings.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (settings["vocab_size"], hidden)
    for layer in range(settings["n_layer"]):
        stored = f"{prefix}h.{layer}"
        shapes[f"{stored}.attn.bias"] = (1, 1, context, context)
        for part, inputs, outputs in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, wide),
            ("mlp.c_proj", wide, hidden),
        ):
            shapes[f"{stored}.{part}.weight"] = (inputs, outputs)
            shapes[f"{stored}.{part}.bias"] = (outputs,)
        shapes |= _with_bias(f"{stored}.ln_1", (hidden,))
        shapes |= _with_bias(f"{stored}.ln_2", (hidden,))
    return shapes


def _with_bias(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


# -- kinds of checkpoints --------------------------------------------------------------------------


class Family(NamedTuple):
    """What sets checkpoints of one `model_type` apart.

    Attributes:
        architecture: the class of transformers.
        gguf: llama.cpp's name of the architecture; empty: it has none.
        shapes: computes the shapes of the tensors from config.json.
        config: the keys of config.json beside its sizes; a function gets the options.
        options: defaults of the sizes, and of what else `config` looks at.
        keys: the key of config.json for each size.
    """

    architecture: str
    gguf: str
    shapes: Callable[..., Shapes]
    config: Config
    options: Config
    keys: dict[str, str]


_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
_GATED_KEYS = {**_KEYS, "kv_heads": "num_key_value_heads", "ffn": "intermediate_size"}
_OPT_KEYS = {**_KEYS, "ffn": "ffn_dim"}
_GPT2_KEYS = {
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "context": "n_positions",
}


def _gated(
    architecture: str, gguf: str, shapes: ShapesOf, options: Config | None = None, **config: Any
) -> Family:
    """Llama, or a relative."""
    config = {"hidden_act": "silu", **config}
    options = {"kv_heads": 2, "ffn": 160, **(options or {})}
    return Family(f"{architecture}ForCausalLM", gguf, shapes, config, options, _GATED_KEYS)


def _relative(architecture: str, gguf: str, **config: Any) -> Family:
    """A relative of Llama without tensors of another kind."""
    norms = {} if {"layer_norm_eps", "norm_epsilon"} & config.keys() else {"rms_norm_eps": 1e-6}
    usual = {"pad_token_id": 0, "rope_theta": 10000.0, "tie_word_embeddings": True}
    return _gated(architecture, gguf, relative_shapes, **{**usual, **norms, **config})


def _granite_layers(options: Config) -> list[str]:
    attended = options["attention"]
    return ["attention" if one in attended else "mamba" for one in range(options["layers"])]


def _gemma4_layers(options: Config) -> list[str]:
    kinds = {"S": "sliding_attention", "F": "full_attention"}
    return [kinds[letter] for letter in options["kinds"]]


YARN: Config = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_QWEN35_ROPE: Config = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [3, 3, 2],
}
_UNTIED: Config = {"tie_word_embeddings": False}
_WINDOW: Config = {"sliding_window": 40}
_ONE_WINDOW: Config = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_QUERIES: Config = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
RELATIVES = {
    "mistral": _relative("Mistral", "llama", **_UNTIED, **_WINDOW),
    "qwen3": _relative("Qwen3", "qwen3", head_dim=32, rope_theta=1e6, use_sliding_window=False),
    "smollm3": _relative(
        "SmolLM3", "smollm3", rope_theta=5e6, no_rope_layers=[1, 0], no_rope_layer_interval=2
    ),
    "granite": _relative(
        "Granite",
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0625,
        logits_scaling=8.0,
    ),
    "olmo2": _relative("Olmo2", "olmo2", **_UNTIED),
    "olmo3": _relative(
        "Olmo3", "olmo2", **_UNTIED, **_ONE_WINDOW, rope_theta=500000.0, rope_scaling=YARN
    ),
    "exaone4": _relative("Exaone4", "exaone4", **_ONE_WINDOW, head_dim=24),
    "ernie4_5": _relative("Ernie4_5", "ernie4_5", head_dim=24, use_bias=False),
    "glm4": _relative(
        "Glm4", "glm4", **_UNTIED, head_dim=32, attention_bias=True, partial_rotary_factor=0.5
    ),
    "ministral3": _relative(
        "Ministral3",
        "mistral3",
        head_dim=32,
        rope_theta=None,
        rope_parameters={**YARN, "rope_theta": 1e6, **_QUERIES},
    ),
    "cohere2": _relative(
        "Cohere2", "cohere2", **_ONE_WINDOW, layer_norm_eps=1e-5, rope_theta=5e4, logit_scale=0.25
    ),
    "starcoder2": _relative(
        "Starcoder2",
        "starcoder2",
        **_WINDOW,
        norm_epsilon=1e-5,
        hidden_act="gelu_pytorch_tanh",
        rope_theta=1e5,
        use_bias=True,
    ),
    "phi": _relative(
        "Phi",
        "phi2",
        **_UNTIED,
        layer_norm_eps=1e-5,
        hidden_act="gelu_new",
        partial_rotary_factor=0.5,
    ),
    "gemma2": _relative(
        "Gemma2",
        "gemma2",
        **_ONE_WINDOW,
        head_dim=24,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=40,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_text": _relative(
        "Gemma3",
        "gemma3",
        **_WINDOW,
        head_dim=24,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=40,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=2,
    ),
}
"""Llama's relatives without tensors of another kind, by their `model_type`."""
FAMILIES = {
    "llama": _gated(
        "Llama",
        "llama",
        llama_shapes,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "qwen2": _gated(
        "Qwen2",
        "qwen2",
        qwen2_shapes,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        sliding_window=itemgetter("context"),
        max_window_layers=itemgetter("layers"),
    ),
    "phi3": _gated(
        "Phi3",
        "phi3",
        phi3_shapes,
        {"kv_heads": 4},
        original_max_position_embeddings=itemgetter("context"),
        sliding_window=255,
        tie_word_embeddings=False,
        attention_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        pad_token_id=0,
    ),
    **RELATIVES,
    # `attention`: the layers that have it. The feed-forward is as published: 1.5 times the ffn.
    "lfm2": _gated(
        "Lfm2",
        "lfm2",
        lfm2_shapes,
        {"layers": 3, "attention": (1,)},
        full_attn_idxs=lambda options: [*options["attention"]],
        block_ff_dim=lambda options: 3 * options["ffn"] // 2,
        block_multiple_of=32,
        conv_L_cache=3,
        conv_bias=False,
        norm_eps=1e-5,
        rope_theta=1000000.0,
        pad_token_id=0,
    ),
    # `kinds`: S for a layer with a window, F for one without. By default the last three read the
    # keys and values of the first two, one of each kind.
    "gemma4_text": _gated(
        "Gemma4",
        "gemma4",
        gemma4_shapes,
        {"kinds": "SFSSF"},
        num_hidden_layers=lambda options: len(options["kinds"]),
        layer_types=_gemma4_layers,
        num_kv_shared_layers=3,
        head_dim=16,
        global_head_dim=32,
        sliding_window=40,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=itemgetter("vocab"),
        final_logit_softcapping=30.0,
        use_double_wide_mlp=False,
        attention_k_eq_v=False,
        enable_moe_block=False,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        pad_token_id=0,
    ),
    # Every second layer has attention, the others the delta rule.
    "qwen3_5_text": _gated(
        "Qwen3_5",
        "qwen35",
        qwen35_shapes,
        {"layers": 4},
        head_dim=64,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        attn_output_gate=True,
        rms_norm_eps=1e-6,
        rope_parameters=_QWEN35_ROPE,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    # Without experts: attention in the layers `attention`, else Mamba-2.
    "granitemoehybrid": _gated(
        "GraniteMoeHybrid",
        "granitehybrid",
        granite_hybrid_shapes,
        {"layers": 3, "attention": (1,)},
        layer_types=_granite_layers,
        position_embedding_type="nope",
        shared_intermediate_size=itemgetter("ffn"),
        num_local_experts=0,
        num_experts_per_tok=0,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.0625,
        logits_scaling=8.0,
        mamba_expand=2,
        mamba_n_heads=lambda options: 2 * options["hidden"] // 32,
        mamba_d_head=32,
        mamba_d_state=48,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    # With a `projection` and not `norm_before` it is like the 350m.
    "opt": Family(
        "OPTForCausalLM",
        "",
        opt_shapes,
        {
            "word_embed_proj_dim": lambda options: options["projection"] or options["hidden"],
            "do_layer_norm_before": itemgetter("norm_before"),
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "pad_token_id": 1,
            "prefix": "</s>",
            "tie_word_embeddings": True,
        },
        {"ffn": 256, "projection": None, "norm_before": True, "prefix": "model."},
        _OPT_KEYS,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        gpt2_shapes,
        {
            "n_ctx": itemgetter("context"),
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {"prefix": ""},
        _GPT2_KEYS,
    ),
}
"""Kinds of checkpoints, by their `model_type`."""


def make_checkpoint(
    path: Path,
    kind: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tie: bool | None = None,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Writes a checkpoint with random weights to the folder `path` and returns it.

    The weights are scaled so that logits have clear maxima. Only one tensor is in memory at a time.

    Args:
        kind: one of `FAMILIES`.
        dtype: float32, float16 or bfloat16.
        tie: whether the head is the embedding; None: as is usual.
        config: replaces keys of config.json.
        options: hidden, layers, heads, kv_heads, ffn, vocab and context, and a family's own.
    """
    family = FAMILIES[kind]
    given = {**_SIZES, **family.options, **options}
    settings = {
        "architectures": [family.architecture],
        "model_type": kind,
        "vocab_size": given["vocab"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
        **{key: given[size] for size, key in family.keys.items()},
        **{key: of(given) if callable(of) else of for key, of in family.config.items()},
        **({} if tie is None else {"tie_word_embeddings": tie}),
        **(config or {}),
    }
    prefix = {"prefix": given["prefix"]} if "prefix" in given else {}
    shapes = family.shapes(settings, **prefix)
    return write_checkpoint(path, settings, shapes, seed=seed, shards=shards)


make_llama_checkpoint = partial(make_checkpoint, kind="llama")


# -- writing ---------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path,
    settings: Config,
    shapes: Shapes,
    *,
    seed: int,
    shards: int = 1,
    tokenizer: Callable[[Path, int], None] | None = None,
) -> Path:
    """Writes the folder: configuration, tokenizer and random weights of the shapes.

    `tokenizer` gets the folder and the size of the vocabulary; the default trains one.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings, indent=2))
    (tokenizer or _write_tokenizer)(path, settings.get("text_config", settings)["vocab_size"])
    groups = np.array_split(np.array(list(shapes)), shards)
    weight_map: dict[str, str] = {}
    dtype = settings.get("torch_dtype") or settings["dtype"]
    offsets = str(settings.get("model_type")).startswith("qwen3_5")
    weights = RandomWeights(seed, dtype, offsets=offsets)
    for number, names in enumerate(groups, start=1):
        single = shards == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{shards:05d}.safetensors"
        part = {str(name): shapes[str(name)] for name in names}
        write_safetensors(path / file, part, dtype, weights.of(part))
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def train_tokenizer(
    folder: Path, texts: Iterable[str], vocab: int, *, min_frequency: int = 2
) -> None:
    """Write a `tokenizer.json` with byte pairs of these texts."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size=vocab,
        min_frequency=min_frequency,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_tokenizer(path: Path, vocab: int) -> None:
    """A byte-level BPE with at most `vocab` entries; `<|endoftext|>` is id 0."""
    if vocab < _MIN_VOCAB:
        raise ValueError(f"vocab must be at least {_MIN_VOCAB} for a byte-level tokenizer")
    train_tokenizer(path, _CORPUS, vocab, min_frequency=1)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
