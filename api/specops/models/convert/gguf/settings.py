"""Makes the config.json of a checkpoint from a GGUF's metadata."""

from collections.abc import Mapping
from typing import Any

from specops.models.convert.families.family import Family
from specops.models.convert.families.gated_decoder import FULL, SLIDING, GatedDecoder
from specops.models.convert.gguf.architectures import MTP_LAYERS, WINDOW, check_neutral
from specops.models.convert.gguf.header import GgufTensors, Metadata

_MAX_LAYERS = 1 << 12
_MAX_POSITIONS = 1 << 20
_MAX_ANGLES = 1 << 27  # of a table: positions times a head's values
# Tensors with divisors of the rotation's frequencies, and the names of them in a config.json.
ROPE_FACTORS = {
    "rope_freqs.weight": "factors",
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
_BIASED = {  # flags of a config.json, and parts that have biases where they are true
    "attention_bias": "attn_q",
    "mlp_bias": "ffn_up",
    "use_bias": "attn_q",
}
Factors = Mapping[str, list[float]]  # by the names in a config.json


def config_of(
    family: type[Family], metadata: Metadata, tensors: GgufTensors, factors: Factors
) -> dict[str, Any]:
    """The config.json of transformers for a file.

    Args:
        family: that reads the file.
        metadata: of the file, or of the first shard.
        tensors: all tensors by llama.cpp's names.
        factors: the content of the tensors in `ROPE_FACTORS`.

    Raises:
        ExportError: a key is missing or malformed, or asks for something that no family supports.
    """
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise metadata.error("general.architecture", "has no tensor token_embd.weight")
    if metadata.optional_integer(MTP_LAYERS) and not any(
        name.startswith("blk.0.") for name in tensors
    ):
        raise metadata.error(
            MTP_LAYERS, "is of a file with an MTP block alone: take the file of the whole model"
        )
    if metadata.integer("{arch}.block_count") > min(_MAX_LAYERS, len(tensors)):
        raise metadata.error("{arch}.block_count", f"is too large for {len(tensors)} tensors")
    if metadata.integer("{arch}.context_length") > _MAX_POSITIONS:
        raise metadata.error("{arch}.context_length", f"is above {_MAX_POSITIONS}")
    config = {
        "architectures": [family.architecture],
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if issubclass(family, GatedDecoder):
        config |= _gated(family, metadata, tensors, factors)
    config |= {key: metadata.integer(theirs) for key, theirs in family.gguf_integers.items()}
    config |= {key: metadata.given(theirs) for key, theirs in family.gguf_numbers.items()}
    return config | family.gguf_settings(metadata, tensors, config)


def num_layers(metadata: Metadata) -> int:
    """The number of layers without an MTP block, which a file counts as one more."""
    return metadata.integer("{arch}.block_count") - metadata.integer(MTP_LAYERS, 0)


def rotated_heads(family: type[Family], part: str, metadata: Metadata) -> int:
    """The number of heads of a tensor whose rows the file interleaves; 0 for all other tensors.

    Args:
        family: of the model.
        part: the tensor's stored name within its layer.
        metadata: of the GGUF.
    """
    if not family.gguf_interleaved or part not in ("attn_q", "attn_k"):
        return 0
    heads = metadata.integer("{arch}.attention.head_count")
    return heads if part == "attn_q" else _kv_heads(metadata, heads)


def _gated(
    family: type[GatedDecoder], metadata: Metadata, tensors: GgufTensors, factors: Factors
) -> dict[str, Any]:
    """What all relatives of Llama have."""
    hidden = metadata.integer("{arch}.embedding_length")
    heads = metadata.integer("{arch}.attention.head_count")
    if not heads:
        raise metadata.error("{arch}.attention.head_count", "must not be 0")
    head_dim = metadata.integer("{arch}.attention.key_length", hidden // heads)
    context = metadata.integer("{arch}.context_length")
    if context * head_dim > _MAX_ANGLES:
        raise metadata.error("{arch}.attention.key_length", f"is {head_dim}, too large")
    if metadata.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise metadata.error(
            "{arch}.attention.value_length", f"must equal the key length, {head_dim}"
        )
    epsilon = "layer_norm_epsilon" if family.layer_norms else "layer_norm_rms_epsilon"
    rotated = metadata.integer("{arch}.rope.dimension_count", head_dim)
    biased = {
        name.split(".")[2] for name in tensors if name.startswith("blk.") and name.endswith(".bias")
    }
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "intermediate_size": min(metadata.per_layer("{arch}.feed_forward_length"), default=0),
        family.epsilon[0]: metadata.number(f"{{arch}}.attention.{epsilon}"),
        "rope_theta": metadata.number("{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(metadata, factors),
        "attention_output_bias": "attn_output" in biased,
        **{flag: _BIASED[flag] in biased for flag in family.optional_biases},
        **_windows(family, metadata),
    }
    if rotated != head_dim or family.partial_rotary:
        config["partial_rotary_factor"] = rotated / head_dim if head_dim else 0
    return config


def _kv_heads(metadata: Metadata, heads: int) -> int:
    """Heads of keys and values; layers without attention have 0."""
    key = "{arch}.attention.head_count_kv"
    return max(metadata.per_layer(key), default=0) if key in metadata else heads


def _windows(family: type[GatedDecoder], metadata: Metadata) -> dict[str, Any]:
    """The windows of attention; if the file does not say which layers have one, the usual ones."""
    pattern = "{arch}.attention.sliding_window_pattern"
    window, every = metadata.optional_integer(WINDOW), family.full_layer_every
    if not window:
        return {"sliding_window_pattern": 1}  # all layers are global
    if every is None and not family.windowed:
        raise metadata.error(WINDOW, f"is {window}; it must be absent")
    if pattern in metadata and isinstance(metadata.raw(pattern), list):
        kinds = {True: SLIDING, False: FULL}
        listed = [kinds[local] for local in metadata.listed(pattern, bool)]
        return {"sliding_window": window, "layer_types": listed}
    return {
        "sliding_window": window,
        "sliding_window_pattern": metadata.integer(pattern, every or 1),
    }


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
    check_neutral(metadata, strength, (0, 1))
    factor = _linear_factor(metadata) if kind == "linear" else 1.0
    if factors and "factors" not in factors:
        raise metadata.error(key, "needs rope_factors_long.weight with the short factors")
    if factors:
        return {"rope_type": "factors", "factors": [one * factor for one in factors["factors"]]}
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(metadata: Metadata) -> dict[str, Any]:
    """YaRN's parameters; llama.cpp writes the factor of queries and keys under two names."""
    scaling, trained = "{arch}.rope.scaling", metadata.integer("{arch}.context_length")
    trained = metadata.integer(f"{scaling}.original_context_length", trained)
    found = {
        "rope_type": "yarn",
        "factor": _linear_factor(metadata),
        "original_max_position_embeddings": trained,
        "attention_factor": metadata.given(f"{scaling}.yarn_attn_factor"),
        "beta_fast": metadata.given(f"{scaling}.yarn_beta_fast"),
        "beta_slow": metadata.given(f"{scaling}.yarn_beta_slow"),
        "llama_4_scaling_beta": metadata.given("{arch}.attention.temperature_scale"),
    }
    check_neutral(metadata, f"{scaling}.yarn_ext_factor", (-1, 1))
    check_neutral(metadata, f"{scaling}.attn_factor", (0, 1))
    if all_dim := metadata.given(f"{scaling}.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": all_dim}
    return found


def _linear_factor(metadata: Metadata) -> float:
    """By how much positions are divided; 0 means the same as an absent key."""
    for key in ("{arch}.rope.scaling.factor", "{arch}.rope.scale_linear"):  # the second one is old
        if key in metadata:
            return metadata.given(key) or 1.0
    return 1.0
