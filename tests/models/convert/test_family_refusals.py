"""Settings that a family does not support are refused by the name of their key."""

import json
from pathlib import Path
from typing import Any

import pytest

from specops.models.convert import ExportError, Quantization, export_checkpoint
from specops.models.convert.families import family_of
from specops.models.convert.model_config import ModelConfig
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.models.convert.runner import edit_config

DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
BAD_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "much"}}
SHORT = {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
CHUNKED = {"layer_types": ["full_attention", "chunked"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["MambaForCausalLM"]}, "'architectures' is MambaForCausalLM"),
    ("llama", {"architectures": None, "model_type": None}, "'model_type' is missing"),
    ("llama", {"architectures": None, "model_type": "mamba"}, "'model_type' is mamba, which"),
    ("llama", {"architectures": [7]}, "'architectures' must be a list of names"),
    ("llama", {"hidden_size": None}, "'hidden_size' is missing"),
    ("llama", {"num_hidden_layers": "two"}, "must be a positive integer, is 'two'"),
    ("llama", {"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
    ("llama", {"num_hidden_layers": 1}, r"tensor model\.layers\.1\.\S+ is not part"),
    ("llama", {"intermediate_size": 161}, r"gate_proj\.weight has shape \[160, 64\].*\[161, 64\]"),
    ("llama", {"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
    ("llama", {"head_dim": 20}, "'head_dim' is 20; attention needs a multiple of 8"),
    ("llama", {"max_position_embeddings": 1 << 31}, "'max_position_embeddings' is 2147483648; m"),
    ("llama", {"attention_bias": True}, r"model\.layers\.0\.self_attn\.q_proj\.bias is missing"),
    ("llama", {"mlp_bias": True}, r"tensor model\.layers\.0\.mlp\.gate_proj\.bias is missing"),
    ("llama", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
    ("llama", DYNAMIC, "'rope_scaling.rope_type' is 'dynamic'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type' is 'dynamic'"),
    ("llama", {"rope_theta": 1.0, **BAD_YARN}, "'rope_theta' is 1; YaRN needs another"),
    ("llama", BAD_YARN, "'rope_scaling.beta_fast' must be a positive number"),
    ("llama", {"rope_theta": 1e-60}, "'rope_theta' is 1e-60; .* not finite"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "'rope_parameters.factor' is missing"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary_factor' must be 1"),
    ("llama", {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
    ("llama", {"eos_token_id": "</s>"}, "'eos_token_id' must be token ids"),
    ("llama", {"architectures": ["Qwen3_5MoeForCausalLM"]}, "is Qwen3_5MoeForCausalLM, a mixture"),
    ("llama", {"architectures": ["MixtralForCausalLM"]}, "a mixture .* take a dense one"),
    ("llama", {"architectures": ["Qwen3Model"]}, "is Qwen3Model, a model that embeds or"),
    ("llama", {"architectures": ["ModernBertForMaskedLM"]}, "embeds or classifies: take one that"),
    (
        "llama",
        {"architectures": ["LlamaForCausalLMEagle3"]},
        "as SPECOPS_DRAFT take the checkpoint",
    ),
    ("llama", {"is_encoder_decoder": True}, "'is_encoder_decoder' is true: encoders cannot"),
    ("llama", {"num_experts": 8, **FP8}, "'num_experts' is 8: this is a mixture of experts"),
    ("llama", FP8, "'quantization_config.quant_method' is fp8: .* quantized already.*or a GGUF"),
    ("qwen3_5_text", {"text_config": {**FP8}}, "'text_config.quantization_config.quant_method' is"),
    ("lfm2", {"conv_bias": True}, "'conv_bias' must be false"),
    ("lfm2", {"conv_L_cache": 9}, "'conv_L_cache' must be 1 to 8"),
    ("lfm2", {"conv_L_cache": 4}, r"conv\.conv\.weight has shape \[64, 1, 3].*\[64, 1, 4]"),
    ("lfm2", {"full_attn_idxs": []}, "'layer_types' has no layer with attention"),
    ("lfm2", {"full_attn_idxs": "1"}, "'full_attn_idxs' must be a list of integers"),
    ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "'layer_types' is mamba"),
    ("lfm2", {"block_ff_dim": 480}, r"feed_forward\.\S+ has shape"),
    ("qwen3_5_text", {"attn_output_gate": False}, "'attn_output_gate' must be true"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 9}, "'linear_conv_kernel_dim' must be 1 to 8"),
    ("qwen3_5_text", {"linear_key_head_dim": 24}, "'linear_key_head_dim' must be a multiple of 16"),
    ("qwen3_5_text", {"linear_value_head_dim": 48}, "must be a multiple of 32, up to 256"),
    ("qwen3_5_text", {"linear_num_key_heads": 3}, "must be a multiple of linear_num_key_heads, 3"),
    ("qwen3_5_text", {"full_attention_interval": 9}, "has no layer with attention"),
    ("qwen3_5_text", {"layer_types": ["conv"] * 4}, "'layer_types' is conv; supported are"),
    ("qwen3_5_text", {"linear_num_value_heads": 2}, r"in_proj_qkv\.weight has shape"),
    (
        "qwen3_5_text",
        {"linear_num_value_heads": 2048},
        "'linear_num_value_heads' must be at most 1024",
    ),
    (
        "qwen3_5_text",
        {"linear_key_head_dim": 256, "linear_value_head_dim": 256},
        "'linear_value_head_dim' makes a head's state 65536 numbers; at most 32768",
    ),
    (
        "granitemoehybrid",
        {"mamba_expand": 1024, "mamba_n_heads": 2048},
        "'mamba_n_heads' must be at most 1024",
    ),
    (
        "granitemoehybrid",
        {"mamba_expand": 4, "mamba_n_heads": 1, "mamba_d_head": 256, "mamba_d_state": 256},
        "'mamba_d_state' makes a head's state 65536 numbers; at most 32768",
    ),
    (
        "granitemoehybrid",
        {"num_local_experts": 64},
        "'num_local_experts' is 64: this is a mixture of experts",
    ),
    ("granitemoehybrid", {"num_local_experts": None}, "'num_local_experts' is 8"),
    ("granitemoehybrid", {"mamba_n_groups": 2}, "'mamba_n_groups' is 2; it must be 1"),
    ("granitemoehybrid", {"mamba_d_head": 64}, "'mamba_d_head' is 64; it must be 32"),
    ("granitemoehybrid", {"mamba_n_heads": 5}, "'mamba_d_head' is 32; it must be 25"),
    (
        "granitemoehybrid",
        {"mamba_n_heads": 8, "mamba_d_head": 16},
        "'mamba_n_heads' must divide 128 into",
    ),
    (
        "granitemoehybrid",
        {"mamba_d_state": 40},
        "'mamba_d_state' must be a multiple of 16, up to 256",
    ),
    ("granitemoehybrid", {"mamba_d_state": 64}, r"in_proj\.weight has shape"),
    ("granitemoehybrid", {"mamba_proj_bias": True}, "'mamba_proj_bias' must be false"),
    ("granitemoehybrid", {"mamba_conv_bias": False}, r"conv1d\.bias is not part"),
    ("granitemoehybrid", {"time_step_limit": [0.1, 1.0]}, "'time_step_limit' is"),
    ("granitemoehybrid", {"layer_types": None}, "'layer_types' has no layer with attention"),
    ("granitemoehybrid", {"layer_types": ["conv", "attention", "mamba"]}, "'layer_types' is conv"),
    ("qwen2", {"use_sliding_window": True}, "'use_sliding_window' must be false"),
    ("qwen2", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
    ("qwen2", {"num_hidden_layers": 2**31}, "more than 1000 cannot be exported"),
    ("qwen2", DYNAMIC, "'rope_scaling.rope_type' is"),
    ("qwen2", {"architectures": ["LlamaForCausalLM"]}, r"self_attn\.\w_proj\.bias is not part"),
    ("qwen2", {"mlp_bias": True}, "'mlp_bias' must be false"),
    ("phi3", SHORT, "'rope_scaling.short_factor' must be 8 positive numbers"),
    ("phi3", {"rope_scaling": {"type": "su"}}, "'rope_scaling.short_factor' is m"),
    ("phi3", DYNAMIC, "only default, .* and proportional"),
    ("phi3", {"sliding_window": 0}, "'sliding_window' must be a positive integer"),
    ("phi3", {"partial_rotary_factor": 0.4}, "'partial_rotary_factor' is 0.4"),
    ("phi3", {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5"),
    ("phi3", {"attention_bias": True}, "'attention_bias' must be false"),
    ("phi3", {"num_key_value_heads": 2}, r"qkv_proj\.weight has shape \[192, 64]"),
    ("mistral", {"head_dim": 260}, "'head_dim' is 260; attention needs a multiple"),
    ("mistral", {"attention_bias": True}, "'attention_bias' must be false to be exported"),
    ("qwen3", {"use_sliding_window": True}, "'use_sliding_window' must be false"),
    ("smollm3", {"no_rope_layers": [1]}, "'no_rope_layers' must be 2 integers"),
    ("granite", {"residual_multiplier": 0}, "'residual_multiplier' must be a positive"),
    ("olmo2", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "'hidden_activation' must be 'gelu_pytorch_ta"),
    ("gemma2", {"attn_logit_softcapping": None}, "'attn_logit_softcapping' is missing"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' must be absent"),
    (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "bidirectional_attention' must be false",
    ),
    ("gemma4_text", {"enable_moe_block": True}, "'enable_moe_block' is true: this is a mix"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "must be 'vision' or absent"),
    (
        "gemma4_text",
        {"global_head_dim": 520},
        "'global_head_dim' is 520; attention needs a multiple",
    ),
    (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "'num_global_key_value_heads' must divide num_attention_heads, 4",
    ),
    ("gemma4_text", {"per_layer_config": {"1": {}}}, "must have the layers of the type full_att"),
    (
        "gemma4_text",
        {"per_layer_config": {"1": {"head_dim": 8}, "4": {"head_dim": 16}}},
        "must have the same sizes",
    ),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "'num_kv_shared_layers' is 4 of 5"),
    ("gemma4_text", {"num_kv_shared_layers": 9}, "'num_kv_shared_layers' is 9 of 5"),
    ("gemma4_text", {"layer_types": ["sliding_attention"] * 5}, "must end with full_attention"),
    (
        "gemma4_text",
        {"vocab_size_per_layer_input": 100},
        "'vocab_size_per_layer_input' is below 320",
    ),
    ("gemma3_text", CHUNKED, "'layer_types' is chunked"),
    ("olmo3", CHUNKED, "'layer_types' is chunked"),
    ("exaone4", CHUNKED, "'layer_types' is chunked"),
    ("cohere2", {"use_qk_norm": True}, "'use_qk_norm' must be false"),
    ("cohere2", {"logit_scale": 0}, "'logit_scale' must be a positive"),
    ("starcoder2", {"hidden_act": "silu"}, "'hidden_act' must be 'gelu_pytorch_tanh'"),
    ("phi", {"qk_layernorm": True}, "'qk_layernorm' must be false"),
    ("opt", {"activation_function": "gelu"}, "'activation_function' must be 'relu'"),
    ("opt", {"enable_bias": False}, "'enable_bias' must be true"),
    ("opt", {"layer_norm_elementwise_affine": False}, "_elementwise_affine' must be true"),
    ("opt", {"_remove_final_layer_norm": True}, "'_remove_final_layer_norm' must be false"),
    ("opt", {"ffn_dim": None}, "'ffn_dim' is missing"),
    ("opt", {"num_attention_heads": 3}, "'head_dim' is 21; attention needs a multiple of 8"),
    ("opt", {"num_attention_heads": 16}, "'head_dim' is 4; attention needs a multiple of 8"),
    ("opt", {"do_layer_norm_before": False}, r"decoder\.final_layer_norm\.\w+ is"),
    ("opt", {"word_embed_proj_dim": 32}, r"embed_tokens\.weight has shape \[320"),
    ("opt", {"max_position_embeddings": 258}, r"embed_positions.*\[258, 64\].*260"),
    ("opt", {"tie_word_embeddings": False}, r"tensor lm_head\.weight is missing"),
    ("gpt2", {"n_layer": 2**31}, "'n_layer' is 2147483648; more than 1000"),
    ("gpt2", {"activation_function": "relu"}, "'activation_function' must be 'gelu_new'"),
    ("gpt2", {"scale_attn_weights": False}, "'scale_attn_weights' must be true"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx' must be false"),
    ("gpt2", {"add_cross_attention": True}, "'add_cross_attention' must be false"),
    ("gpt2", {"n_head": 5}, "'head_dim' is 12; attention needs a multiple of 8"),
    ("gpt2", {"n_layer": 3}, r"tensor transformer\.h\.2\.attn\.c_attn\.weight is missing"),
    ("gpt2", {"n_positions": None}, "'n_positions' is missing"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_model_type_replaces_an_absent_architecture(tmp_path: Path, family: str) -> None:
    source = make_checkpoint(tmp_path, family)
    config = json.loads((source / "config.json").read_text())
    assert config["model_type"] == family
    named = family_of(ModelConfig(config, source))
    assert type(family_of(ModelConfig(config | {"architectures": []}, source))) is type(named)


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_settings_that_a_family_does_not_support_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    source = make_checkpoint(tmp_path / "source", family)
    edit_config(source, **changes)
    with pytest.raises(ExportError, match=message):
        export_checkpoint(source, tmp_path / "onnx", quantization=Quantization.parse("int8-32"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
