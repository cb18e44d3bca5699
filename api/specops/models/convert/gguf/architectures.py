"""Translates llama.cpp's architectures for transformers: a config.json and the tensors' names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from specops.models.convert.checkpoint import MTP
from specops.models.convert.gguf.header import GgufTensor, Metadata
from specops.models.convert.refusals import EXPERTS, what_it_is

SSM_A, SSM_D = "ssm_a", "ssm_d"  # a state's decay, -exp(A_log); what skips it
_LLAMA = {  # Llama's; names with a dot in front belong to a layer
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": ".input_layernorm",
    "attn_q": ".self_attn.q_proj",
    "attn_k": ".self_attn.k_proj",
    "attn_v": ".self_attn.v_proj",
    "attn_output": ".self_attn.o_proj",
    "ffn_norm": ".post_attention_layernorm",
    "ffn_gate": ".mlp.gate_proj",
    "ffn_up": ".mlp.up_proj",
    "ffn_down": ".mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": ".self_attn.q_norm", "attn_k_norm": ".self_attn.k_norm"}
_NORMS_AFTER = {
    "post_attention_norm": ".post_attention_layernorm",
    "post_ffw_norm": ".post_feedforward_layernorm",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": ".ln_1",
    "attn_qkv": ".attn.c_attn",
    "attn_output": ".attn.c_proj",
    "ffn_norm": ".ln_2",
    "ffn_up": ".mlp.c_fc",
    "ffn_down": ".mlp.c_proj",
}
_MTP = {  # tensors of an MTP block beside those of its layer, which is behind the model's own ones
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
_BIASES = {
    "attention_bias": "attn_q",
    "attention_output_bias": "attn_output",
    "mlp_bias": "ffn_up",
}
_GRANITE = {
    "{arch}.logit_scale": "logits_scaling",
    "{arch}.embedding_scale": "embedding_multiplier",
    "{arch}.residual_scale": "residual_multiplier",
    "{arch}.attention.scale": "attention_multiplier",
}


# Of layers with a window, which have smaller heads; and the soft cap of logits.
_GEMMA4 = (
    "{arch}.attention.key_length_swa",
    "{arch}.attention.value_length_swa",
    "{arch}.rope.dimension_count_swa",
    "{arch}.final_logit_softcapping",
)
_SCALAR = ".layer_scalar"  # in transformers a name without `.weight`
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_RECURRENT = "{arch}.attention.recurrent_layers"


def _without(*parts: str) -> dict[str, str]:
    return {part: name for part, name in _LLAMA.items() if part not in parts}


class _Architecture(NamedTuple):
    """One of llama.cpp's architectures, and how its files differ from transformers' checkpoints.

    Attributes:
        transformers: the class of transformers that reads the same weights.
        windowed: the class that reads them if the file has a window; empty: the same class.
        names: tensors' names in transformers; one with a dot in front belongs to a layer. Names
            that are whole, with or without a kind, stand for whole names.
        layers: what the names of a layer's tensors begin with in transformers.
        permuted: whether only the file interleaves the two halves of each head in q and k.
        interleaved: whether transformers rotates pairs of neighbours, too.
        biases: the keys of config.json that are true where these tensors have a bias.
        epsilon: the key of config.json for layer norms; empty: the norms are RMS norms.
        windows: which layers may have a window: `all`, or a `pattern` of them.
        partial_rotary: whether config.json always says which part of a head is rotated.
        mtp: whether the last layer may be an MTP block.
        supported: keys of `_NEUTRAL` that may have any value.
    """

    transformers: str
    names: Mapping[str, str] = _LLAMA
    windowed: str = ""
    layers: str = "model.layers"
    permuted: bool = False
    interleaved: bool = False
    biases: Mapping[str, str] = {}
    epsilon: str = ""
    windows: Literal["", "all", "pattern"] = ""
    partial_rotary: bool = False
    mtp: bool = False
    supported: Collection[str] = ()


_ARCHITECTURES = {
    "llama": _Architecture(
        "LlamaForCausalLM",
        permuted=True,
        biases=_BIASES,
        windows="all",
        windowed="MistralForCausalLM",
    ),
    "mistral3": _Architecture("Ministral3ForCausalLM", permuted=True, biases=_BIASES),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen2vl": _Architecture("Qwen2ForCausalLM"),  # images are in a file of their own
    "smollm3": _Architecture("SmolLM3ForCausalLM", permuted=True, biases=_BIASES),
    "granite": _Architecture(
        "GraniteForCausalLM", permuted=True, biases=_BIASES, supported=_GRANITE
    ),
    "ernie4_5": _Architecture("Ernie4_5ForCausalLM", interleaved=True, biases=_BIASES),
    "qwen3": _Architecture("Qwen3ForCausalLM", _LLAMA | _HEAD_NORMS, biases=_BIASES, mtp=True),
    "qwen3vl": _Architecture("Qwen3ForCausalLM", _LLAMA | _HEAD_NORMS, biases=_BIASES),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        {**_LLAMA, **_HEAD_NORMS, **_NORMS_AFTER, "ffn_norm": ".pre_feedforward_layernorm"},
        windows="pattern",
    ),
    "gemma4": _Architecture(
        "Gemma4ForCausalLM",
        {
            **{**_LLAMA, **_HEAD_NORMS, **_NORMS_AFTER, "ffn_norm": ".pre_feedforward_layernorm"},
            "layer_output_scale": _SCALAR,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "inp_gate": ".per_layer_input_gate",
            "proj": ".per_layer_projection",
            "post_norm": ".post_per_layer_input_norm",
        },
        supported=_GEMMA4,
    ),
    "olmo2": _Architecture(
        "Olmo2ForCausalLM",
        _without("attn_norm", "ffn_norm") | _HEAD_NORMS | _NORMS_AFTER,
        biases=_BIASES,
        windows="pattern",
        windowed="Olmo3ForCausalLM",
    ),
    "exaone4": _Architecture(
        "Exaone4ForCausalLM",
        _without("attn_norm", "ffn_norm") | _HEAD_NORMS | _NORMS_AFTER,
        windows="pattern",
    ),
    "glm4": _Architecture(
        "Glm4ForCausalLM",
        {
            **_without("ffn_gate"),
            "ffn_up": ".mlp.gate_up_proj",
            "post_attention_norm": ".post_self_attn_layernorm",
            "post_ffw_norm": ".post_mlp_layernorm",
        },
        interleaved=True,
        biases=_BIASES,
        partial_rotary=True,
    ),
    "cohere2": _Architecture(
        "Cohere2ForCausalLM",
        _without("ffn_norm"),
        interleaved=True,
        epsilon="layer_norm_eps",
        windows="pattern",
        supported=["{arch}.logit_scale"],
    ),
    "starcoder2": _Architecture(
        "Starcoder2ForCausalLM",
        {**_without("ffn_gate"), "ffn_up": ".mlp.c_fc", "ffn_down": ".mlp.c_proj"},
        biases={"use_bias": "attn_q"},
        epsilon="norm_epsilon",
        windows="all",
    ),
    "phi2": _Architecture(
        "PhiForCausalLM",
        {
            **_without("ffn_norm", "ffn_gate"),
            "output_norm": "model.final_layernorm",
            "attn_output": ".self_attn.dense",
            "ffn_up": ".mlp.fc1",
            "ffn_down": ".mlp.fc2",
        },
        epsilon="layer_norm_eps",
        partial_rotary=True,
    ),
    "phi3": _Architecture(
        "Phi3ForCausalLM",
        {
            **_without("attn_q", "attn_k", "attn_v", "ffn_gate"),
            "attn_qkv": ".self_attn.qkv_proj",
            "ffn_up": ".mlp.gate_up_proj",
        },
        windows="all",
        partial_rotary=True,
    ),
    "lfm2": _Architecture(
        "Lfm2ForCausalLM",
        {
            **_without("output_norm"),
            "token_embd_norm": "model.embedding_norm",
            "attn_norm": ".operator_norm",
            "attn_q_norm": ".self_attn.q_layernorm",
            "attn_k_norm": ".self_attn.k_layernorm",
            "attn_output": ".self_attn.out_proj",
            "ffn_norm": ".ffn_norm",
            "ffn_gate": ".feed_forward.w1",
            "ffn_up": ".feed_forward.w3",
            "ffn_down": ".feed_forward.w2",
            **{f"shortconv.{part}": f".conv.{part}" for part in ("in_proj", "conv", "out_proj")},
        },
    ),
    "qwen35": _Architecture(
        "Qwen3_5ForCausalLM",
        {
            **_without("ffn_norm"),
            **_HEAD_NORMS,
            "post_attention_norm": ".post_attention_layernorm",
            "attn_qkv": ".linear_attn.in_proj_qkv",
            "attn_gate": ".linear_attn.in_proj_z",
            "ssm_alpha": ".linear_attn.in_proj_a",
            "ssm_beta": ".linear_attn.in_proj_b",
            "ssm_conv1d": ".linear_attn.conv1d",
            "ssm_norm": ".linear_attn.norm",
            "ssm_out": ".linear_attn.out_proj",
            SSM_A: ".linear_attn.A_log",
            "ssm_dt.bias": ".linear_attn.dt_bias",
        },
        mtp=True,
    ),
    "granitehybrid": _Architecture(
        "GraniteMoeHybridForCausalLM",
        {
            **_LLAMA,
            **{f"ssm_{part}": f".mamba.{part}" for part in ("conv1d", "norm")},
            **{f"ssm_{part}": f".mamba.{part}_proj" for part in ("in", "out")},
            SSM_A: ".mamba.A_log",
            SSM_D: ".mamba.D",
            "ssm_dt.bias": ".mamba.dt_bias",
        },
        permuted=True,
        biases=_BIASES,
        supported=_GRANITE,
    ),
    "gpt2": _Architecture("GPT2LMHeadModel", _GPT2, layers="transformer.h"),
}
_HYBRID = ("lfm2", "granitehybrid")  # they list each layer's heads of keys; 0: no attention
_NAME = re.compile(
    r"(?:blk\.(?P<layer>0|[1-9]\d{0,4})\.)?"
    r"(?P<whole>(?P<part>(?:(?:shortconv|nextn)\.)?\w+)(?P<kind>\.weight|\.bias|))"
)
_FIRST = re.compile(r"blk\.0\.")
_FUSED = re.compile(r"(?P<layer>blk\.\d+\.)attn_qkv(?P<kind>\.weight|\.bias)")
_WHOLE = (SSM_A, SSM_D, "ssm_dt.bias")  # names without a kind, here or in transformers
# Keys of settings that no family supports, and their allowed values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "{arch}.logit_scale": (0, 1),
    "{arch}.embedding_scale": (0, 1),
    "{arch}.residual_scale": (0, 1),
    "{arch}.attention.scale": (0,),
    "{arch}.attention.clamp_kqv": (0,),
    "{arch}.attention.max_alibi_bias": (0,),
    "{arch}.attn_logit_softcapping": (0,),
    "{arch}.final_logit_softcapping": (0,),
    "{arch}.attention.causal": (True,),
    "{arch}.use_parallel_residual": (False,),
    "{arch}.pooling_type": (0,),
}
_TYPE, _MODEL, _EXPERTS = "general.type", "model", "{arch}.expert_count"
_MTP_LAYERS = "{arch}.nextn_predict_layers"
# Sizes that a file may repeat, and the keys that they have to equal.
_REPEATED = {
    "{arch}.embedding_length_out": "{arch}.embedding_length",
    "{arch}.attention.key_length_swa": "{arch}.attention.key_length",
    "{arch}.attention.value_length_swa": "{arch}.attention.value_length",
    "{arch}.rope.dimension_count_swa": "{arch}.rope.dimension_count",
}
_ROTATES = "{arch}.rope.scaling.finetuned"  # of Granite's
_SECTIONS = "{arch}.rope.dimension_sections"
_NOTHING_TURNS = 1e29  # a divisor of frequencies
_GEMMA3_27B = 62  # layers of the one model with another scale of scores
_MOST_LAYERS = 1 << 12
_MOST_POSITIONS = 1 << 20
_MOST_ANGLES = 1 << 27  # of a table: positions times a head's values
# Tensors with divisors of the rotation's frequencies, and the names of them in a config.json.
ROPE_FACTORS = {
    "rope_freqs.weight": "factors",
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}


Factors = Mapping[str, list[float]]  # by the names in a config.json


def check_architecture(metadata: Metadata) -> None:
    """Raises ExportError for an architecture or a setting that no family supports."""
    architecture = _ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        kind = what_it_is(metadata.architecture)
        raise metadata.error(
            "general.architecture",
            f"is {metadata.architecture}, {kind}"
            if kind
            else f"is {metadata.architecture}, which is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}",
        )
    if metadata.text(_TYPE, _MODEL) != _MODEL:
        kind = metadata.text(_TYPE)
        raise metadata.error(_TYPE, f"is {kind}: this is not a model; take the model's own file")
    if metadata.optional_integer(_EXPERTS):
        raise metadata.error(_EXPERTS, f"is {metadata.integer(_EXPERTS)}: this is {EXPERTS}")
    for key, allowed in _NEUTRAL.items():
        if key not in architecture.supported:
            _neutral(metadata, key, allowed)
    _neutral(metadata, _MTP_LAYERS, (0, 1) if architecture.mtp else (0,))
    for key, other in _REPEATED.items():
        if key in architecture.supported or key not in metadata:
            continue
        if other not in metadata or metadata.raw(key) != metadata.raw(other):
            raise metadata.error(key, f"must be the same as {other}, or absent")
    sections = _SECTIONS in metadata and any(metadata.listed(_SECTIONS, int))
    if sections and architecture.interleaved:  # those of GLM-4V are not
        raise metadata.error(_SECTIONS, "must be 0 or absent")
    if metadata.architecture == "granite":  # its switch for rotation; it means nothing elsewhere
        _neutral(metadata, _ROTATES, (True,))


def _neutral(metadata: Metadata, key: str, allowed: tuple[Any, ...]) -> None:
    """Raises ExportError for a value that no family supports."""
    if key in metadata and (value := metadata.raw(key)) not in allowed:
        raise metadata.error(key, f"is {value}; this cannot be exported")


def transformers_name(metadata: Metadata, name: str) -> str | None:
    """The name of a tensor in transformers; None if the architecture has no such tensor."""
    row, found = _ARCHITECTURES[metadata.architecture], _NAME.fullmatch(name)
    if found is None:
        return None
    layer = None if found["layer"] is None else int(found["layer"])
    whole = found["whole"] if found["whole"] in _WHOLE else ""
    if not (kind := found["kind"]) and not whole:
        return None
    in_block = row.mtp and layer == num_layers(metadata)
    part = row.names.get(whole or found["part"])
    if in_block and (part is None or found["part"] in _MTP):  # whether it is known is seen later
        return f"{MTP}{_MTP.get(found['part'], found['part'])}{kind}"
    if part is None or part.startswith(".") != (layer is not None):
        return None
    layers = f"{MTP}layers.0" if in_block else f"{row.layers}.{layer}"
    kind = "" if whole or part == _SCALAR else kind
    return f"{'' if layer is None else layers}{part}{kind}"


def parted(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """The tensors, each fused one of queries, keys and values as three.

    llama.cpp's converter fuses them on request, in architectures that have them apart, too.
    """
    found: dict[str, GgufTensor] = {}
    twice = 2 if metadata.architecture == "qwen35" else 1  # with the gates of attention's output
    for name, tensor in tensors.items():
        fused, (rows, *inputs) = _FUSED.fullmatch(name), tensor.shape
        output = tensors.get(f"{fused['layer']}attn_output.weight") if fused else None
        queries = output.shape[-1] * twice if output else 0
        keys = (rows - queries) // 2
        apart = "attn_q" in _ARCHITECTURES[metadata.architecture].names
        if not (fused and output and apart and keys > 0 and queries + 2 * keys == rows):
            found[name] = tensor
            continue
        offset = tensor.offset
        for part, count in (("q", queries), ("k", keys), ("v", keys)):
            called = f"{fused['layer']}attn_{part}{fused['kind']}"
            nbytes = tensor.nbytes // rows * count
            found[called] = replace(
                tensor, name=called, shape=(count, *inputs), offset=offset, nbytes=nbytes
            )
            offset += nbytes
    return found


def num_layers(metadata: Metadata) -> int:
    """The number of layers without an MTP block, which a file counts as one more."""
    return metadata.integer("{arch}.block_count") - metadata.integer(_MTP_LAYERS, 0)


def rotated_heads(architecture: str, part: str, metadata: Metadata) -> int:
    """The number of heads of a tensor whose rows the file interleaves; 0 for all other tensors."""
    if not _ARCHITECTURES[architecture].permuted or part not in ("attn_q", "attn_k"):
        return 0
    heads = metadata.integer("{arch}.attention.head_count")
    if part == "attn_q":
        return heads
    return _kv_heads(metadata, heads)


def is_one_more(architecture: str, name: str) -> bool:
    """Whether the file stores a vector plus 1."""
    if architecture == "qwen35":
        return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
    return architecture == "gemma3" and name.endswith("_norm.weight")


def config_of(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], factors: Factors
) -> dict[str, Any]:
    """The config.json of transformers for a file.

    Args:
        metadata: of the file, or of the first shard.
        tensors: all tensors by llama.cpp's names.
        factors: the content of the tensors in `ROPE_FACTORS`.

    Raises:
        ExportError: a key is missing or malformed, or asks for something that no family supports.
    """
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise metadata.error("general.architecture", "has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[metadata.architecture].transformers],
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if metadata.optional_integer(_MTP_LAYERS) and not any(map(_FIRST.match, tensors)):
        raise metadata.error(
            _MTP_LAYERS, "is of a file with an MTP block alone: take the file of the whole model"
        )
    if metadata.integer("{arch}.block_count") > min(_MOST_LAYERS, len(tensors)):
        raise metadata.error("{arch}.block_count", f"is too large for {len(tensors)} tensors")
    if metadata.integer("{arch}.context_length") > _MOST_POSITIONS:
        raise metadata.error("{arch}.context_length", f"is above {_MOST_POSITIONS}")
    if metadata.architecture == "gpt2":
        return config | _gpt2(metadata)
    return config | _gated(metadata, tensors, factors)


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    return {
        "n_embd": metadata.integer("{arch}.embedding_length"),
        "n_layer": metadata.integer("{arch}.block_count"),
        "n_head": metadata.integer("{arch}.attention.head_count"),
        "n_positions": metadata.integer("{arch}.context_length"),
        "n_inner": metadata.integer("{arch}.feed_forward_length"),
        "layer_norm_epsilon": metadata.number("{arch}.attention.layer_norm_epsilon"),
    }


def _gated(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], factors: Factors
) -> dict[str, Any]:
    architecture = _ARCHITECTURES[metadata.architecture]
    hidden = metadata.integer("{arch}.embedding_length")
    heads = metadata.integer("{arch}.attention.head_count")
    if not heads:
        raise metadata.error("{arch}.attention.head_count", "must not be 0")
    head_dim = metadata.integer("{arch}.attention.key_length", hidden // heads)
    context = metadata.integer("{arch}.context_length")
    if context * head_dim > _MOST_ANGLES:
        raise metadata.error("{arch}.attention.key_length", f"is {head_dim}, too large")
    if metadata.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise metadata.error(
            "{arch}.attention.value_length", f"must equal the key length, {head_dim}"
        )
    gemma4 = metadata.architecture == "gemma4"
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "intermediate_size": _per_layer(metadata, "{arch}.feed_forward_length")[0],
        **_epsilon(metadata),
        "rope_theta": metadata.number("{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": None if gemma4 else _scaling(metadata, factors),
    }
    for key, part in architecture.biases.items():
        config[key] = f"blk.0.{part}.bias" in tensors
    config |= _windows(metadata, config)
    if metadata.architecture.startswith("granite"):
        usual = {"attention_multiplier": head_dim**-0.5 if head_dim else 1}
        for key, name in _GRANITE.items():  # 0 means the same as an absent key
            given = key in metadata and metadata.raw(key) != 0
            config[name] = metadata.number(key) if given else usual.get(name, 1.0)
    if metadata.architecture == "cohere2":
        config["logit_scale"] = metadata.number("{arch}.logit_scale")
    if metadata.architecture == "lfm2":
        config |= _lfm2(metadata, config)
    if gemma4:
        config |= _gemma4(metadata, config, tensors, factors)
    if metadata.architecture == "granitehybrid":
        config |= _granite_hybrid(metadata, tensors)
    if metadata.architecture == "qwen35":
        config |= _qwen35(metadata)
    rotated = metadata.integer("{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim or architecture.partial_rotary:
        config["partial_rotary_factor"] = rotated / head_dim if head_dim else 0
    return config


def _kv_heads(metadata: Metadata, heads: int) -> int:
    """Heads of keys and values; of some a list, in which layers without attention have 0."""
    key = "{arch}.attention.head_count_kv"
    if metadata.architecture == "gemma4":
        return _per_layer(metadata, key)[0]
    if metadata.architecture not in _HYBRID:
        return metadata.integer(key, heads)
    found = set(metadata.listed(key, int)) - {0}
    if len(found) != 1:
        raise metadata.error(key, "must have the same number in all layers with attention")
    return found.pop()


def _per_layer(metadata: Metadata, key: str) -> list[int]:
    """An integer of each layer; only Gemma 4's layers may have different ones."""
    layers = metadata.integer("{arch}.block_count")
    if metadata.architecture != "gemma4" or not isinstance(metadata.raw(key), list):
        return [metadata.integer(key)] * max(layers, 1)
    if len(found := metadata.listed(key, int)) != layers or not layers or min(found) < 1:
        raise metadata.error(key, f"must be {layers} integers from 1")
    return found


def _gemma4(
    metadata: Metadata,
    config: dict[str, Any],
    tensors: Mapping[str, GgufTensor],
    factors: Factors,
) -> dict[str, Any]:
    """The two kinds of layers, what the last layers share, and the rotation of full layers."""
    attention, layers = "{arch}.attention", config["num_hidden_layers"]
    found = _pattern(metadata, 6)
    kinds = found.get("layer_types")
    if kinds is None or len(kinds) != layers or {*kinds} != {_FULL, _SLIDING}:
        raise metadata.error(
            f"{attention}.sliding_window_pattern", f"must be {layers} layers of both kinds"
        )
    full, local = kinds.index(_FULL), kinds.index(_SLIDING)
    size, local_size = config["head_dim"], metadata.integer(f"{attention}.key_length_swa")
    for key, expected in {
        f"{attention}.value_length_swa": local_size,
        "{arch}.rope.dimension_count_swa": local_size,
        "{arch}.rope.dimension_count": size,
    }.items():
        if metadata.integer(key, expected) != expected:
            raise metadata.error(key, f"must be {expected}, the size of a head")
    kv_heads = _per_layer(metadata, f"{attention}.head_count_kv")
    shared = metadata.integer(f"{attention}.shared_kv_layers", 0)
    widths, wide = _per_layer(metadata, "{arch}.feed_forward_length"), config["intermediate_size"]
    doubled = widths[-1] == 2 * wide
    if widths != [wide * (2 if doubled and at >= layers - shared else 1) for at in range(layers)]:
        raise metadata.error("{arch}.feed_forward_length", "differs between other layers")
    if kv_heads != [kv_heads[full if kind == _FULL else local] for kind in kinds]:
        raise metadata.error(f"{attention}.head_count_kv", "differs between layers of a kind")
    same = f"blk.{full}.attn_v.weight" not in tensors
    if kv_heads[full] != kv_heads[local] and not same:
        raise metadata.error(f"{attention}.head_count_kv", "needs values that are the keys")
    # Frequencies are divided by 1, or else by so much that nothing turns.
    divisors = factors.get("factors", [1.0] * (size // 2))
    turning = sum(divisor == 1 for divisor in divisors)
    still = [divisor for divisor in divisors[turning:] if divisor >= _NOTHING_TURNS]
    if turning + len(still) != size // 2:
        raise metadata.error("{arch}.rope.freq_base", "has other factors than Gemma 4's")
    table = tensors.get("per_layer_token_embd.weight")
    bases = {
        _FULL: metadata.number("{arch}.rope.freq_base", 1e6),
        _SLIDING: metadata.number("{arch}.rope.freq_base_swa", 1e4),
    }
    return found | {
        "head_dim": local_size,
        "global_head_dim": size,
        "num_key_value_heads": kv_heads[local],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": same,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": doubled,
        "sliding_window": metadata.integer(f"{attention}.sliding_window"),
        "hidden_size_per_layer_input": metadata.integer(
            "{arch}.embedding_length_per_layer_input", 0
        ),
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        "final_logit_softcapping": _given(metadata, "{arch}.final_logit_softcapping"),
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * turning / size,
                "rope_theta": bases[_FULL],
            },
            _SLIDING: {"rope_type": "default", "rope_theta": bases[_SLIDING]},
        },
    }


def _lfm2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers have attention, and the size of the others' convolutions."""
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": _kinds(metadata, "conv"),
        "conv_L_cache": metadata.integer("{arch}.shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # a file says the width as it is
    }


def _qwen35(metadata: Metadata) -> dict[str, Any]:
    """Which layers have attention, and the sizes of the gated delta rule in the others."""
    values, recurrent = metadata.integer("{arch}.ssm.time_step_rank"), None
    if _RECURRENT in metadata:
        recurrent = metadata.listed(_RECURRENT, bool)
    return {
        "layer_types": recurrent and [_LINEAR if state else _FULL for state in recurrent],
        "full_attention_interval": metadata.integer("{arch}.full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.integer("{arch}.ssm.conv_kernel"),
        "linear_num_key_heads": metadata.integer("{arch}.ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata.integer("{arch}.ssm.state_size"),
        "linear_value_head_dim": metadata.integer("{arch}.ssm.inner_size") // max(1, values),
        "linear_value_heads_tiled": True,
    }


def _granite_hybrid(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Which layers have attention, whether it rotates, and the sizes of the others' states."""
    heads = metadata.integer("{arch}.ssm.time_step_rank")
    hidden = metadata.integer("{arch}.embedding_length")
    return {
        "layer_types": _kinds(metadata, "mamba"),
        "position_embedding_type": "rope" if metadata.flag(_ROTATES, True) else "none",
        "mamba_n_heads": heads,
        "mamba_d_state": metadata.integer("{arch}.ssm.state_size"),
        "mamba_n_groups": metadata.integer("{arch}.ssm.group_count"),
        "mamba_d_conv": metadata.integer("{arch}.ssm.conv_kernel"),
        "mamba_expand": metadata.integer("{arch}.ssm.inner_size") // max(1, hidden),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "num_local_experts": 0,
        "fused_feed_forward": False,
    }


def _kinds(metadata: Metadata, other: str) -> list[str]:
    """The kinds of layers: with attention, or another."""
    counts = metadata.listed("{arch}.attention.head_count_kv", int)
    return ["full_attention" if count else other for count in counts]


def _windows(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The windows of attention, and what else differs between layers."""
    key, architecture = "{arch}.attention.sliding_window", _ARCHITECTURES[metadata.architecture]
    if metadata.architecture == "gemma3":
        return _gemma3(metadata, config)
    if metadata.architecture == "gemma4":  # `_gemma4` has them
        return {}
    window = metadata.optional_integer(key)
    if not window:
        return {}
    if not architecture.windows:
        raise metadata.error(key, f"is {window}; it must be absent")
    found: dict[str, Any] = {"sliding_window": window}
    if architecture.windowed:
        found["architectures"] = [architecture.windowed]
    if architecture.windows == "all":
        return found
    base = "{arch}.rope.freq_base_swa"  # llama.cpp could rotate layers with a window by another one
    usual = metadata.number("{arch}.rope.freq_base", 10_000.0)
    if metadata.number(base, usual) != usual:
        raise metadata.error(base, "must be the same as {arch}.rope.freq_base, or absent")
    return found | _pattern(metadata, 4)


def _gemma3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Settings that llama.cpp knows for the architecture, so files may leave them out."""
    size = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA3_27B:
        size = config["hidden_size"] // config["num_attention_heads"]
    found: dict[str, Any] = {
        "query_pre_attn_scalar": size,
        "rope_local_base_freq": metadata.number("{arch}.rope.freq_base_swa", 10_000.0),
    }
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    if not window:  # all layers are global
        return found | {"sliding_window_pattern": 1}
    return found | {"sliding_window": window} | _pattern(metadata, 6)


def _pattern(metadata: Metadata, usual: int) -> dict[str, Any]:
    """Which layers have the window; if the file does not say it, all but each `usual`th."""
    pattern = "{arch}.attention.sliding_window_pattern"
    if pattern in metadata and isinstance(metadata.raw(pattern), list):
        kinds = {True: _SLIDING, False: _FULL}
        return {"layer_types": [kinds[local] for local in metadata.listed(pattern, bool)]}
    return {"sliding_window_pattern": metadata.integer(pattern, usual)}


def _epsilon(metadata: Metadata) -> dict[str, float]:
    if key := _ARCHITECTURES[metadata.architecture].epsilon:
        return {key: metadata.number("{arch}.attention.layer_norm_epsilon")}
    return {"rms_norm_eps": metadata.number("{arch}.attention.layer_norm_rms_epsilon")}


def _scaling(metadata: Metadata, factors: Factors) -> dict[str, Any] | None:
    """The `rope_scaling` of transformers. Without a type a factor is linear, as in llama.cpp."""
    key = "{arch}.rope.scaling.type"
    kind = metadata.text(key, "longrope" if "long_factor" in factors else "linear")
    strength = "{arch}.rope.scaling.attn_factor"
    if kind in ("none", "longrope") and "long_factor" in factors:
        trained = "{arch}.rope.scaling.original_context_length"
        scaling = {
            "rope_type": "longrope",
            "original_max_position_embeddings": metadata.integer(trained),
            **factors,
        }
        if strength in metadata:
            scaling["attention_factor"] = metadata.number(strength)
        return scaling
    if kind == "yarn" and not factors:
        return _yarn(metadata)
    if kind not in ("none", "linear"):
        raise metadata.error(
            key, f"is {kind}; only none, linear, yarn and longrope can be exported"
        )
    _neutral(metadata, strength, (0, 1))
    factor = _linear_factor(metadata) if kind == "linear" else 1.0
    if factors and "factors" not in factors:
        raise metadata.error(key, "needs rope_factors_long.weight beside the short factors")
    if factors:
        return {"rope_type": "factors", "factors": [one * factor for one in factors["factors"]]}
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(metadata: Metadata) -> dict[str, Any]:
    """YaRN's parameters; llama.cpp writes the factor of queries and keys under two names."""
    scaling = "{arch}.rope.scaling"
    trained = metadata.integer("{arch}.context_length")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": _linear_factor(metadata),
        "original_max_position_embeddings": metadata.integer(
            f"{scaling}.original_context_length", trained
        ),
        "attention_factor": _given(metadata, f"{scaling}.yarn_attn_factor"),
        "beta_fast": _given(metadata, f"{scaling}.yarn_beta_fast"),
        "beta_slow": _given(metadata, f"{scaling}.yarn_beta_slow"),
    }
    _neutral(metadata, f"{scaling}.yarn_ext_factor", (-1, 1))
    _neutral(metadata, f"{scaling}.attn_factor", (0, 1))
    if all_dim := _given(metadata, f"{scaling}.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": all_dim}
    if metadata.architecture == "mistral3":
        found["llama_4_scaling_beta"] = _given(metadata, "{arch}.attention.temperature_scale")
    return found


def _given(metadata: Metadata, key: str) -> float | None:
    """A number; 0 means the same as an absent key."""
    return metadata.number(key) if key in metadata and metadata.raw(key) != 0 else None


def _linear_factor(metadata: Metadata) -> float:
    """By how much positions are divided; 0 means the same as an absent key."""
    for key in ("{arch}.rope.scaling.factor", "{arch}.rope.scale_linear"):  # the second one is old
        if key in metadata:
            return _given(metadata, key) or 1.0
    return 1.0
