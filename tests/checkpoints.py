"""Random-weight Hugging Face checkpoints of any size: tests need the format, not the talent.

Torch-free. The folder that `make_llama_checkpoint` writes loads in transformers as well as in the
exporter: config.json, model.safetensors (or shards with an index) and a byte-level
tokenizer.json trained on the spot. Other families: `family_checkpoints`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import ByteLevelBPETokenizer

_CORPUS = ["def add(a, b):\n    return a + b\n", "The quick brown fox jumps over the lazy dog.\n"]
_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TABLES = ("embed_tokens.weight", "embed_positions.weight", "wte.weight", "wpe.weight")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_MIN_VOCAB = 257  # 256 bytes and the end-of-text token


def make_llama_checkpoint(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 160,
    vocab: int = 320,
    tie: bool = False,
    seed: int = 0,
    context: int = 256,
    dtype: str = "float32",
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a Llama checkpoint with random weights to the folder `path` and returns it.

    `dtype` is float32, float16 or bfloat16; `config` overrides keys of config.json. Memory: one
    tensor at a time. The scale of the weights gives logits spread enough to have clear winners.
    """
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
        **(config or {}),
    }
    return write_checkpoint(
        path, settings, llama_shapes(settings), seed=seed, dtype=dtype, shards=shards
    )


def write_safetensors(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
    tensors: Iterator[np.ndarray[Any, Any]],
) -> None:
    """Writes `tensors`, in the order of `shapes`, as a safetensors file of one dtype."""
    item = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * item.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.write(tensor.astype(item).tobytes())


def write_checkpoint(
    path: Path,
    settings: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    seed: int,
    dtype: str,
    shards: int = 1,
) -> Path:
    """Writes the folder: configuration, tokenizer and random weights of the shapes."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings, indent=2))
    _write_tokenizer(path, settings["vocab_size"])
    groups = np.array_split(np.array(list(shapes)), shards)
    weight_map: dict[str, str] = {}
    rng = np.random.default_rng(seed)
    for number, names in enumerate(groups, start=1):
        single = shards == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{shards:05d}.safetensors"
        part = {str(name): shapes[str(name)] for name in names}
        write_safetensors(path / file, part, dtype, _random_weights(part, rng))
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def llama_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama checkpoint with this config.json."""
    hidden, wide = settings["hidden_size"], settings["intermediate_size"]
    head = settings.get("head_dim") or hidden // settings["num_attention_heads"]
    queries = head * settings["num_attention_heads"]
    keys = head * settings["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (settings["vocab_size"], hidden)
    }
    for layer in range(settings["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
            f"model.layers.{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"model.layers.{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"model.layers.{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"model.layers.{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
            f"model.layers.{layer}.mlp.gate_proj.weight": (wide, hidden),
            f"model.layers.{layer}.mlp.up_proj.weight": (wide, hidden),
            f"model.layers.{layer}.mlp.down_proj.weight": (hidden, wide),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (settings["vocab_size"], hidden)
    return shapes


def _random_weights(
    shapes: dict[str, tuple[int, ...]], rng: np.random.Generator
) -> Iterator[np.ndarray[Any, Any]]:
    for name, shape in shapes.items():
        if name.endswith(".bias") and len(shape) == 1:
            yield 0.2 * rng.standard_normal(shape, np.float32)
        elif len(shape) == 1:
            yield 1 + 0.1 * rng.standard_normal(shape, np.float32)
        elif name.endswith(_TABLES):
            yield rng.standard_normal(shape, np.float32) * np.float32(0.3)
        elif len(shape) == 4:
            yield np.tril(np.ones(shape, np.float32))
        elif name.endswith(_TRANSPOSED):
            yield rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))
        else:
            yield rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))


def _write_tokenizer(path: Path, vocab: int) -> None:
    """A byte-level BPE with at most `vocab` entries; `<|endoftext|>` is id 0."""
    if vocab < _MIN_VOCAB:
        raise ValueError(f"vocab must be at least {_MIN_VOCAB} for a byte-level tokenizer")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _CORPUS,
        vocab_size=vocab,
        min_frequency=1,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
