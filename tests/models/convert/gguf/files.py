"""Writes checkpoints as GGUF files like llama.cpp's converter, with llama.cpp's own library."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType

from specops.models.convert.checkpoint import Checkpoint
from tests.checkpoints import FAMILIES
from tests.random_weights import write_safetensors

Array = np.ndarray[Any, Any]
KindOf = Callable[[str], Kind]

SIZES = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 512, "context": 128}
WRITTEN = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.BF16, Kind.F16, Kind.F32)
"""Types that the library can quantize to."""
DRAWN = (
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4),
)
"""Types that the library only reads; their blocks are random."""
BLOCKS = (*WRITTEN[:5], *DRAWN)
"""Types that are not plain numbers."""
_STEPS = {Kind.Q2_K: 5e-3, Kind.Q3_K: 1e-3, Kind.Q4_K: 4e-4, Kind.Q5_K: 2e-4, Kind.Q6_K: 4e-5}
_STEPS |= {Kind.IQ4_NL: 1e-3, Kind.IQ4_XS: 5e-5}
_MIDDLES = {Kind.Q2_K: 1.5, Kind.Q4_K: 8, Kind.Q5_K: 16}
_BOTH, _GATE, _UP = "input_linear.weight", "gate_proj.weight", "up_proj.weight"
_MTP = {  # of an MTP block, which is one more layer
    "mtp.fc.": "eh_proj",
    "mtp.pre_fc_norm_embedding.": "enorm",
    "mtp.pre_fc_norm_hidden.": "hnorm",
    "mtp.norm.": "shared_head_norm",
}
_PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitehybrid")  # by llama.cpp's converter


def stored_tensors(folder: Path) -> dict[str, Array]:
    """Every tensor of a checkpoint's folder, in float32."""
    return dict(_each_tensor(folder))


def _each_tensor(folder: Path) -> Iterator[tuple[str, Array]]:
    checkpoint = Checkpoint(folder)
    for name in checkpoint.tensors:
        yield name, np.asarray(checkpoint._view(name), np.float32)


def _parted(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Gives the halves of Granite's first products of feed-forwards one by one."""
    for name, values in tensors:
        if ".shared_mlp." in name and name.endswith(_BOTH):
            for part, half in zip((_GATE, _UP), np.split(values, 2), strict=True):
                yield name.replace(_BOTH, part), half
        else:
            yield name, values


def _joined(tensors: dict[str, Array]) -> dict[str, Array]:
    """Joins what `_parted` parted."""
    gates = [name for name in tensors if ".shared_mlp." in name and name.endswith(_GATE)]
    for name in gates:
        halves = tensors.pop(name), tensors.pop(name.replace(_GATE, _UP))
        tensors[name.replace(_GATE, _BOTH)] = np.concatenate(halves)
    return tensors


def packed(kind: Kind, values: Array) -> Array:
    """A matrix in blocks; of a type in `DRAWN`, random blocks of the same shape."""
    if kind not in DRAWN:
        return gguf.quantize(values, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size + kind)
    rows, columns = values.shape
    blocks = random.integers(0, 256, (rows, columns // weights, size), np.uint8)
    if kind == Kind.MXFP4:
        blocks[..., 0] = random.integers(119, 122, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    step = random.uniform(0.7, 1.3, (rows, columns // weights, 1)) * _STEPS[kind]
    place = {Kind.Q2_K: 80, Kind.Q3_K: 108, Kind.Q6_K: 208}.get(kind, 0)
    blocks[..., place : place + 2] = step.astype(np.float16).view(np.uint8)
    if kind in _MIDDLES:  # the mean of a block's weights is about 0
        offset = (step * _MIDDLES[kind]).astype(np.float16).view(np.uint8)
        blocks[..., place + 2 : place + 4] = offset
    if kind == Kind.Q2_K:
        blocks[..., :16] = (blocks[..., :16] & 15) * 17
    elif kind in (Kind.Q4_K, Kind.Q5_K):
        blocks[..., 8:12] = blocks[..., 4:8] ^ random.integers(0, 2, blocks[..., 4:8].shape)
        blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17
    return blocks.reshape(rows, -1)


def interleaved(weights: Array, heads: int) -> Array:
    """Reorders the rows of q and k like llama.cpp's converter."""
    shape = weights.shape
    halves = weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def straight(weights: Array, heads: int) -> Array:
    """The opposite of `interleaved`."""
    shape = weights.shape
    pairs = weights.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return pairs.swapaxes(1, 2).reshape(shape)


def tiled(config: dict[str, Any], name: str, values: Array, *, back: bool = False) -> Array:
    """Reorders the value heads of a Qwen3.5 layer like llama.cpp's converter, or `back` again.

    A checkpoint has the value heads of each key head behind each other; a file has the first ones
    of all key heads, then the second ones. A decay is stored as -exp(A_log).
    """
    if config["model_type"] != "qwen3_5_text" or "linear_attn" not in name:
        return values
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    part, size = name.split(".")[4], config["linear_value_head_dim"]
    order = np.arange(heads).reshape((heads // keys, keys) if back else (keys, heads // keys)).T
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        values = values[order.reshape(-1)]
        return -np.exp(values) if part == "A_log" else values
    if part == "norm":
        return values
    places = (order.reshape(-1, 1) * size + np.arange(size)).reshape(-1)
    if part == "out_proj":
        return values[:, places]
    before = len(values) - heads * size  # rows of queries and keys
    return values[np.concatenate([np.arange(before), before + places])]


def _of_mamba(name: str, values: Array) -> Array:
    """What a file has of a vector of Mamba-2: an axis more."""
    if name.endswith("mamba.A_log"):
        return -np.exp(values)[:, None]
    if name.endswith("mamba.D"):
        return values[:, None]
    return values[None] if name.endswith("mamba.norm.weight") else values


def _is_one_more(kind: str, name: str) -> bool:
    """Whether a file has a norm's weights plus 1."""
    known = kind in ("gemma2", "gemma3_text", "qwen3_5_text") and "linear_attn" not in name
    return known and name.endswith("norm.weight")


def heads_of(config: dict[str, Any], name: str) -> int:
    """The number of heads whose rows a file interleaves; 0 if it does not."""
    if FAMILIES[config["model_type"]].gguf not in _PERMUTED:
        return 0
    part = name.split(".")[-2]
    return {
        "q_proj": int(config["num_attention_heads"]),
        "k_proj": int(config.get("num_key_value_heads", 0)),
    }.get(part, 0)


def write_gguf(
    folder: Path,
    file: Path,
    kind_of: KindOf,
    *,
    split: int = 0,
    fused: bool = False,
    change: Callable[[GGUFWriter], None] | None = None,
    dequantized: Path | None = None,
) -> Path:
    """Writes a checkpoint's folder as `file`, or as shards of `split` tensors; returns the first.

    `kind_of` gives a matrix's type by its name in transformers. Queries, keys and values become one
    tensor where `fused`; they must have the same type then. `change` may add to the metadata.
    The folder `dequantized` becomes the same checkpoint with the weights of the file.
    """
    config = json.loads((folder / "config.json").read_text())
    called = config.get("gguf") or FAMILIES[config["model_type"]].gguf
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == called)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    blocks = config.get("mtp_num_hidden_layers", 0)
    names = gguf.get_tensor_name_map(architecture, layers + blocks)
    writer = GGUFWriter(file, called, split_max_tensors=split)
    _write_sizes(writer, config)
    write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    if change is not None:
        change(writer)
    kept: dict[str, Array] = {}
    add = _fusing(writer) if fused else writer.add_tensor
    for name, values in _parted(_each_tensor(folder)):
        known = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
        known = known.replace(".dt_bias", ".dt_proj.bias")  # as llama.cpp's converter calls it
        known = known.replace("shared_mlp.output_linear", "mlp.down_proj")
        known = known.replace("shared_mlp.", "mlp.")
        called = names.get_name(known, try_suffixes=(".weight", ".bias"))
        for theirs, part in _MTP.items() if blocks else ():
            if name.startswith(theirs):
                called = f"blk.{layers}.nextn.{part}.weight"
        if called is None or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if name.endswith("layer_scalar"):
            called += ".weight"
        stored, heads = values, heads_of(config, name)
        turned = config["model_type"] == "gpt2" and ".h." in f".{name}" and values.ndim == 2
        if turned:
            stored = values.T
        if heads:
            stored = interleaved(stored, heads)
        if _is_one_more(config["model_type"], name):
            stored = stored + np.float32(1)
        stored = tiled(config, name, stored)
        if values.ndim != 2:  # a convolution's [channels, 1, taps] loses the axis of length 1
            add(called, np.ascontiguousarray(_of_mamba(name, stored.squeeze())))
            kept[name] = values
            continue
        kind = kind_of(name)
        data = packed(kind, np.ascontiguousarray(stored))
        add(called, data, raw_dtype=kind)
        if dequantized is None:
            continue
        numbers = gguf.dequantize(data, kind)
        numbers = straight(numbers, heads) if heads else numbers
        numbers = tiled(config, name, numbers, back=True)
        kept[name] = numbers.T if turned else numbers
    write_and_close(writer)
    if dequantized is not None:
        kept = _joined(kept)
        shutil.copytree(folder, dequantized)
        shapes = {name: values.shape for name, values in kept.items()}
        values = (np.ascontiguousarray(item, np.float32) for item in kept.values())
        write_safetensors(dequantized / "model.safetensors", shapes, "float32", values)
    return file if file.exists() else sorted(file.parent.glob(f"{file.stem}-*.gguf"))[0]


def write_and_close(writer: GGUFWriter) -> None:
    """Write what a writer was given: metadata and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _fusing(writer: GGUFWriter) -> Callable[..., None]:
    """Adds tensors as llama.cpp's converter does with `--fuse-qkv`."""
    waiting: defaultdict[str, dict[str, Array]] = defaultdict(dict)

    def add(called: str, data: Array, **kind: Any) -> None:
        found = re.fullmatch(r"(blk\.\d+\.attn_)([qkv])(\..+)", called)
        if found is None:
            writer.add_tensor(called, data, **kind)
            return
        parts = waiting[fused := f"{found[1]}qkv{found[3]}"]
        parts[found[2]] = data
        if len(parts) == len("qkv"):
            rows = np.concatenate([parts[part] for part in "qkv"])
            writer.add_tensor(fused, rows, **kind)

    return add


def _write_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    blocks = config.get("mtp_num_hidden_layers", 0)
    writer.add_block_count(config["num_hidden_layers"] + blocks)
    if blocks:
        writer.add_nextn_predict_layers(blocks)
    writer.add_feed_forward_length(_widths(config))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_kv_heads(config))
    if epsilon := config.get("rms_norm_eps") or config.get("norm_eps"):
        writer.add_layer_norm_rms_eps(epsilon)
    else:
        writer.add_layer_norm_eps(config.get("norm_epsilon") or config["layer_norm_eps"])
    if config["model_type"] == "gemma4_text":
        _write_gemma4(writer, config)
        return
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(scaling.get("rope_theta") or config["rope_theta"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(head * partial))
    writer.add_key_length(head)
    writer.add_value_length(head)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] in ("olmo3", "exaone4", "cohere2"):
        local = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(local)
    _write_layers(writer, config)
    if scaling.get("rope_type") == "yarn":
        _write_yarn(writer, scaling)
    if scaling.get("type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for kind in ("long", "short"):
            factors = np.array(scaling[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _widths(config: dict[str, Any]) -> int | list[int]:
    """Of the feed-forward; of Gemma 4 E2B a list."""
    wide, layers = config["intermediate_size"], config["num_hidden_layers"]
    if not config.get("use_double_wide_mlp"):
        return wide
    own = layers - config["num_kv_shared_layers"]
    return [wide * (1 + (index >= own)) for index in range(layers)]


def _write_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    size, local = config["global_head_dim"], config["head_dim"]
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind[0] == "s" for kind in config["layer_types"]])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(local)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    turning = size // 8
    factors = [1.0] * turning + [1e30] * (size // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _kv_heads(config: dict[str, Any]) -> int | list[int]:
    """Heads of keys and values; where not all layers have attention, those of each layer."""
    heads: int = config["num_key_value_heads"]
    if config["model_type"] == "lfm2":
        layers = range(config["num_hidden_layers"])
        return [heads * (layer in config["full_attn_idxs"]) for layer in layers]
    if config["model_type"] == "granitemoehybrid":
        return [heads * (kind == "attention") for kind in config["layer_types"]]
    return heads


def _write_layers(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Settings of some architectures."""
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    rope = config.get("rope_parameters") or {}
    if sections := config.get("mrope_section") or rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if config["model_type"] == "qwen3_5_text":
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        writer.add_ssm_inner_size(values)
        writer.add_full_attention_interval(config["full_attention_interval"])
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    if config["model_type"].startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "cohere2":
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _write_yarn(writer: GGUFWriter, scaling: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    if "attention_factor" in scaling:
        writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    if "mscale_all_dim" in scaling:
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
    if "llama_4_scaling_beta" in scaling:
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])


def write_tokenizer(
    writer: GGUFWriter, made: dict[str, Any], *, pre: str = "gpt-2", bos: int = 0
) -> None:
    """Writes a byte-level tokenizer.json."""
    ids, types = tokens_of(made)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(ids)
    writer.add_token_types(types)
    merges = made["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(0)


def write_pieces(writer: GGUFWriter, made: dict[str, Any]) -> None:
    """Writes a tokenizer.json of SentencePiece: scores, and a type for each byte."""
    ids, types = tokens_of(made)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(made["model"]["merges"]):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(text, len(ranks) + place)) for place, text in enumerate(ids)]
    for place, text in enumerate(ids):
        if text.startswith("<0x") and types[place] == TokenType.NORMAL:
            types[place] = TokenType.BYTE
    types[0] = TokenType.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_token_list(ids)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def tokens_of(made: dict[str, Any]) -> tuple[list[str], list[int]]:
    """All tokens in the order of their ids, and their types."""
    added = {token["id"]: token for token in made["added_tokens"]}
    by_id = {index: text for text, index in made["model"]["vocab"].items()}
    by_id |= {index: token["content"] for index, token in added.items()}
    ids, types = [], []
    for index in range(max(by_id) + 1):
        ids.append(by_id.get(index, f"[PAD{index}]"))
        kind = TokenType.NORMAL if index in by_id else TokenType.UNUSED
        if index in added:
            special = added[index]["special"]
            kind = TokenType.CONTROL if special else TokenType.USER_DEFINED
        types.append(kind)
    return ids, types
