"""Random-weight Hugging Face checkpoints of any size: tests need the format, not the talent.

Torch-free. A folder that a `make_*_checkpoint` writes loads in transformers as well as in the
exporter: config.json, model.safetensors (or shards with an index) and a byte-level
tokenizer.json trained on the spot. Tensors are named as in the checkpoints on the hub.
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
        **_llama_sizes(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            vocab=vocab,
            context=context,
        ),
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
        **(config or {}),
    }
    return _write(path, settings, _llama_shapes(settings), seed=seed, dtype=dtype, shards=shards)


def make_qwen2_checkpoint(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 160,
    vocab: int = 320,
    tie: bool = True,
    seed: int = 0,
    context: int = 256,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a Qwen2 checkpoint: Llama's tensors and biases on q, k and v."""
    settings = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **_llama_sizes(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            vocab=vocab,
            context=context,
        ),
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": context,
        "max_window_layers": layers,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
        **(config or {}),
    }
    shapes = _llama_shapes(settings)
    for name, shape in list(shapes.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name.replace(".weight", ".bias")] = shape[:1]
    return _write(path, settings, shapes, seed=seed, dtype=dtype)


def make_phi3_checkpoint(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    ffn: int = 160,
    vocab: int = 320,
    seed: int = 0,
    context: int = 256,
    window: int | None = 255,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a Phi-3 checkpoint: q, k and v in one tensor, gate and up in one."""
    settings = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **_llama_sizes(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            vocab=vocab,
            context=context,
        ),
        "original_max_position_embeddings": context,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": dtype,
        **(config or {}),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in _llama_shapes(settings).items():
        if name.endswith("q_proj.weight"):
            rows = shape[0] + 2 * kv_heads * shape[0] // heads
            shapes[name.replace("q_proj", "qkv_proj")] = (rows, hidden)
        elif name.endswith("gate_proj.weight"):
            shapes[name.replace("gate_proj", "gate_up_proj")] = (2 * ffn, hidden)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            shapes[name] = shape
    return _write(path, settings, shapes, seed=seed, dtype=dtype)


def make_opt_checkpoint(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    ffn: int = 256,
    vocab: int = 320,
    projection: int | None = None,
    norm_before: bool = True,
    seed: int = 0,
    context: int = 256,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes an OPT checkpoint; with a `projection` and not `norm_before` it is like the 350m."""
    settings = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "word_embed_proj_dim": projection or hidden,
        "do_layer_norm_before": norm_before,
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "prefix": "</s>",
        "dtype": dtype,
        **(config or {}),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (vocab, projection or hidden),
        "model.decoder.embed_positions.weight": (context + 2, hidden),
    }
    if projection:
        shapes["model.decoder.project_in.weight"] = (hidden, projection)
        shapes["model.decoder.project_out.weight"] = (projection, hidden)
    if norm_before:
        shapes |= _with_bias("model.decoder.final_layer_norm", (hidden,))
    for layer in range(layers):
        stored = f"model.decoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _with_bias(f"{stored}.self_attn.{part}", (hidden, hidden))
        shapes |= _with_bias(f"{stored}.self_attn_layer_norm", (hidden,))
        shapes |= _with_bias(f"{stored}.fc1", (ffn, hidden))
        shapes |= _with_bias(f"{stored}.fc2", (hidden, ffn))
        shapes |= _with_bias(f"{stored}.final_layer_norm", (hidden,))
    return _write(path, settings, shapes, seed=seed, dtype=dtype)


def make_gpt2_checkpoint(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    vocab: int = 320,
    seed: int = 0,
    context: int = 256,
    dtype: str = "float32",
    prefix: str = "",
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a GPT-2 checkpoint; `prefix` is `transformer.` where the head was saved along.

    Weights are stored [in, out], and every layer carries its causal mask, as on the hub.
    """
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": context,
        "n_ctx": context,
        "vocab_size": vocab,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
        **(config or {}),
    }
    wide = settings.get("n_inner") or 4 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}wte.weight": (vocab, hidden),
        f"{prefix}wpe.weight": (context, hidden),
        **_with_bias(f"{prefix}ln_f", (hidden,)),
    }
    for layer in range(layers):
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
    return _write(path, settings, shapes, seed=seed, dtype=dtype)


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


def _write(
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


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _llama_sizes(
    *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


def _llama_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
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
