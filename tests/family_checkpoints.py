"""Random-weight checkpoints of the families beside Llama, as the hub has them.

Configurations carry the keys and tensors the names, order of axes and buffers of the published
ones, so that what loads these loads those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import llama_shapes, write_checkpoint


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
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
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
    shapes = llama_shapes(settings)
    for name, shape in list(shapes.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name.replace(".weight", ".bias")] = shape[:1]
    return write_checkpoint(path, settings, shapes, seed=seed, dtype=dtype)


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
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
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
    for name, shape in llama_shapes(settings).items():
        if name.endswith("q_proj.weight"):
            rows = shape[0] + 2 * kv_heads * shape[0] // heads
            shapes[name.replace("q_proj", "qkv_proj")] = (rows, hidden)
        elif name.endswith("gate_proj.weight"):
            shapes[name.replace("gate_proj", "gate_up_proj")] = (2 * ffn, hidden)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            shapes[name] = shape
    return write_checkpoint(path, settings, shapes, seed=seed, dtype=dtype)


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
    tie: bool = True,
    prefix: str = "model.",
    seed: int = 0,
    context: int = 256,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes an OPT checkpoint; with a `projection` and not `norm_before` it is like the 350m.

    `prefix` is empty in the oldest checkpoints.
    """
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
        "tie_word_embeddings": tie,
        "dtype": dtype,
        **(config or {}),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}decoder.embed_tokens.weight": (vocab, projection or hidden),
        f"{prefix}decoder.embed_positions.weight": (context + 2, hidden),
    }
    if projection:
        shapes[f"{prefix}decoder.project_in.weight"] = (hidden, projection)
        shapes[f"{prefix}decoder.project_out.weight"] = (projection, hidden)
    if not tie:
        shapes["lm_head.weight"] = (vocab, projection or hidden)
    if norm_before:
        shapes |= _with_bias(f"{prefix}decoder.final_layer_norm", (hidden,))
    for layer in range(layers):
        stored = f"{prefix}decoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _with_bias(f"{stored}.self_attn.{part}", (hidden, hidden))
        shapes |= _with_bias(f"{stored}.self_attn_layer_norm", (hidden,))
        shapes |= _with_bias(f"{stored}.fc1", (ffn, hidden))
        shapes |= _with_bias(f"{stored}.fc2", (hidden, ffn))
        shapes |= _with_bias(f"{stored}.final_layer_norm", (hidden,))
    return write_checkpoint(path, settings, shapes, seed=seed, dtype=dtype)


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
    tie: bool = True,
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
        "tie_word_embeddings": tie,
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
    if not tie:
        shapes["lm_head.weight"] = (vocab, hidden)
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
    return write_checkpoint(path, settings, shapes, seed=seed, dtype=dtype)


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
