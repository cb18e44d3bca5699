"""What a family's drawing does not cover is refused by the name of its key, and nothing is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specops.models.convert import ExportError, Quantization, export_checkpoint
from tests.checkpoints import (
    make_gpt2_checkpoint,
    make_opt_checkpoint,
    make_phi3_checkpoint,
    make_qwen2_checkpoint,
    make_relative_checkpoint,
)

INT8 = Quantization.parse("int8-32")

Make = Callable[..., Path]


def make_relative(kind: str) -> Make:
    return partial(make_relative_checkpoint, kind=kind)


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    """Sets keys of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (make_qwen2_checkpoint, {"use_sliding_window": True}, "'use_sliding_window' must be false"),
        (make_qwen2_checkpoint, {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        (make_qwen2_checkpoint, {"num_hidden_layers": 2**31}, "more than 1000 cannot be exported"),
        (make_gpt2_checkpoint, {"n_layer": 2**31}, "'n_layer' is 2147483648; more than 1000"),
        (make_qwen2_checkpoint, {"rope_scaling": {"type": "yarn"}}, "'rope_scaling.rope_type' is"),
        (
            make_qwen2_checkpoint,
            {"architectures": ["LlamaForCausalLM"]},
            r"tensor model\.layers\.\d\.self_attn\.\w_proj\.bias has no place",
        ),
        (
            make_phi3_checkpoint,
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "'rope_scaling.short_factor' must be 8 positive numbers",
        ),
        (
            make_phi3_checkpoint,
            {"rope_scaling": {"type": "su"}},
            "'rope_scaling.short_factor' is m",
        ),
        (make_phi3_checkpoint, {"rope_scaling": {"type": "yarn"}}, "only default, .* and longrope"),
        (make_phi3_checkpoint, {"sliding_window": 0}, "'sliding_window' must be a positive integ"),
        (make_phi3_checkpoint, {"partial_rotary_factor": 0.4}, "'partial_rotary_factor' is 0.4"),
        (make_phi3_checkpoint, {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5"),
        (make_phi3_checkpoint, {"attention_bias": True}, "'attention_bias' is true"),
        (make_qwen2_checkpoint, {"mlp_bias": True}, "'mlp_bias' is true"),
        (
            make_phi3_checkpoint,
            {"num_key_value_heads": 2},
            r"qkv_proj\.weight has shape \[192, 64]",
        ),
        (make_relative("mistral"), {"head_dim": 260}, "'head_dim' is 260; attention needs a mult"),
        (make_relative("mistral"), {"attention_bias": True}, "'attention_bias' is true; biases"),
        (make_relative("qwen3"), {"use_sliding_window": True}, "'use_sliding_window' must be fals"),
        (make_relative("smollm3"), {"no_rope_layers": [1]}, "'no_rope_layers' must be 2 integers"),
        (make_relative("granite"), {"residual_multiplier": 0}, "'residual_multiplier' must be a p"),
        (make_relative("olmo2"), {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        (
            make_relative("gemma3_text"),
            {"hidden_activation": "gelu"},
            "'hidden_activation' must be 'gelu_pytorch_tanh'",
        ),
        (
            make_relative("gemma3_text"),
            {"final_logit_softcapping": 30.0},
            "'final_logit_softcapping' must be absent",
        ),
        (
            make_relative("gemma3_text"),
            {"use_bidirectional_attention": True},
            "'use_bidirectional_attention' must be false",
        ),
        (
            make_relative("gemma3_text"),
            {"layer_types": ["full_attention", "chunked"]},
            "'layer_types' names chunked",
        ),
        (
            make_relative("gemma3_text"),
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "'text_config' is missing",
        ),
        (make_opt_checkpoint, {"activation_function": "gelu"}, "'activation_function' must be 're"),
        (make_opt_checkpoint, {"enable_bias": False}, "'enable_bias' must be true"),
        (
            make_opt_checkpoint,
            {"layer_norm_elementwise_affine": False},
            "'layer_norm_elementwise_affine' must be true",
        ),
        (
            make_opt_checkpoint,
            {"_remove_final_layer_norm": True},
            "'_remove_final_layer_norm' must be false",
        ),
        (make_opt_checkpoint, {"ffn_dim": None}, "'ffn_dim' is missing"),
        (make_opt_checkpoint, {"num_attention_heads": 3}, "'hidden_size' is 64; attention of 3 he"),
        (
            make_opt_checkpoint,
            {"num_attention_heads": 16},
            "'hidden_size' is 64; .*multiple of 128",
        ),
        (
            make_opt_checkpoint,
            {"do_layer_norm_before": False},
            r"decoder\.final_layer_norm\.\w+ has",
        ),
        (make_opt_checkpoint, {"word_embed_proj_dim": 32}, r"embed_tokens\.weight has shape \[320"),
        (
            make_opt_checkpoint,
            {"max_position_embeddings": 258},
            r"embed_positions.*\[258, 64\].*260",
        ),
        (make_opt_checkpoint, {"tie_word_embeddings": False}, r"tensor lm_head\.weight is missing"),
        (
            make_gpt2_checkpoint,
            {"activation_function": "relu"},
            "'activation_function' must be one",
        ),
        (make_gpt2_checkpoint, {"scale_attn_weights": False}, "'scale_attn_weights' must be true"),
        (
            make_gpt2_checkpoint,
            {"scale_attn_by_inverse_layer_idx": True},
            "'scale_attn_by_inverse_layer_idx' must be false",
        ),
        (
            make_gpt2_checkpoint,
            {"add_cross_attention": True},
            "'add_cross_attention' must be false",
        ),
        (make_gpt2_checkpoint, {"n_head": 5}, "'n_embd' is 64; attention of 5 heads"),
        (
            make_gpt2_checkpoint,
            {"n_layer": 3},
            r"tensor transformer\.h\.2\.ln_1\.weight is missing",
        ),
        (make_gpt2_checkpoint, {"n_positions": None}, "'n_positions' is missing"),
    ],
)
def test_what_a_family_does_not_cover_is_refused_by_name(
    tmp_path: Path, make: Make, changes: dict[str, Any], message: str
) -> None:
    source = make(tmp_path / "source")
    edit_config(source, changes)
    with pytest.raises(ExportError, match=message):
        export_checkpoint(source, tmp_path / "onnx", quantization=INT8)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
