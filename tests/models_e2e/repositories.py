"""What lies on the hub under the names that presets use: shapes, files and tokenizers, no talent.

Configurations are the published ones; weights are random, in the files that the repository has:
safetensors (one or several), with or without the prefix of the class, or torch's own. Layers can
be left out: everything else that a configuration says stays true.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import (
    gpt2_shapes,
    llama_shapes,
    opt_shapes,
    phi3_shapes,
    qwen2_shapes,
    relative_shapes,
    write_checkpoint,
)
from tests.models.graph.published_graph import write_published
from tests.random_weights import RandomWeights, Shapes
from tests.text import published_tokenizers as tokenizers

Config = dict[str, Any]
PHI3_GRAPH = "phi3-mini-4k-instruct-cpu-int4-rtn-block-32-acc-level-4.onnx"


@dataclass(frozen=True)
class Repository:
    """A model as it is published.

    Attributes:
        config: its config.json.
        shapes: the tensors that a configuration asks for, by their stored names.
        tokenizer: writes its tokenizer's files.
        shards: safetensors files; 0: one file of torch, pytorch_model.bin.
        generation: its generation_config.json.
    """

    config: Config
    shapes: Callable[[Config], Shapes]
    tokenizer: Callable[[Path, int], None]
    shards: int = 1
    generation: Config | None = None

    def write(self, folder: Path, layers: int | None) -> None:
        """Fill `folder`; `layers` is how many of them, None: all."""
        config = dict(self.config)
        if layers is not None:
            config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
        shapes = self.shapes(config)
        if self.shards:
            write_checkpoint(
                folder, config, shapes, seed=0, shards=self.shards, tokenizer=self.tokenizer
            )
        else:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config))
            self.tokenizer(folder, config["vocab_size"])
            save_state_dict(folder / "pytorch_model.bin", shapes, config["torch_dtype"])
        if self.generation:
            (folder / "generation_config.json").write_text(json.dumps(self.generation))


def save_state_dict(file: Path, shapes: Shapes, dtype: str) -> None:
    """Let torch save random weights of these shapes."""
    import torch  # noqa: PLC0415 - heavy

    drawn = RandomWeights(0, dtype).of(shapes)
    tensors = {name: torch.from_numpy(array) for name, array in zip(shapes, drawn, strict=True)}
    torch.save(tensors, file)


def write_phi3_graph(folder: Path, layers: int) -> None:
    """Microsoft's layout for onnxruntime-genai: one graph among other files, int4 in blocks of 32.

    The weights are those of our converter; operators and their order are the model builder's.
    """
    source, made = folder / "checkpoint", folder / "made"
    REPOSITORIES["microsoft/Phi-3-mini-4k-instruct"].write(source, layers)
    export_checkpoint(source, made, quantization=Quantization.parse("int4-32-rtn"))
    shutil.rmtree(source)
    write_published(made / "model.onnx", folder / PHI3_GRAPH, packed=True)
    for name in ("tokenizer.json", "config.json"):
        if (made / name).exists():
            (made / name).rename(folder / name)
    shutil.rmtree(made)
    decoder = {"filename": PHI3_GRAPH, "num_hidden_layers": layers}
    special = {"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000}
    model = {"type": "phi3", "context_length": 4096, "vocab_size": 32064, "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": {**model, **special}}))


def _llama_tokenizer(folder: Path, vocab: int) -> None:
    tokenizers.written(tokenizers.llama)(folder, vocab)
    (folder / "tokenizer.model").write_bytes(b"SentencePiece's own, which nobody needs")


def _opt_tokenizer(folder: Path, vocab: int) -> None:
    tokenizers.write_opt_files(folder)


def _llama(**sizes: Any) -> Config:
    common = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return {**common, "bos_token_id": 1, "eos_token_id": 2, "rope_scaling": None, **sizes}


def _opt(hidden: int, layers: int, heads: int, **changes: Any) -> Config:
    return {
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "bos_token_id": 2,
        "do_layer_norm_before": True,
        "eos_token_id": 2,
        "ffn_dim": 4 * hidden,
        "hidden_size": hidden,
        "max_position_embeddings": 2048,
        "model_type": "opt",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "vocab_size": 50272,
        "word_embed_proj_dim": hidden,
        **changes,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "torch_dtype": "float32",
        "vocab_size": 50257,
    }


def _smollm2(hidden: int, layers: int, heads: int, kv_heads: int, wide: int) -> Config:
    return _llama(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=wide,
        max_position_embeddings=8192,
        rms_norm_eps=1e-05,
        rope_theta=100_000,
        rope_interleaved=False,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
        torch_dtype="bfloat16",
        vocab_size=49152,
    )


def _qwen3(hidden: int, layers: int, heads: int, wide: int) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def _llama32(hidden: int, layers: int, heads: int) -> Config:
    return _llama(
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        attention_bias=False,
        mlp_bias=False,
        head_dim=hidden // heads,
        hidden_size=hidden,
        intermediate_size=8192,
        max_position_embeddings=131072,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_scaling={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        vocab_size=128256,
    )


def _gemma3(hidden: int, layers: int, wide: int) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    }


def _relative(config: Config, tokenizer: Callable[[], Any]) -> Repository:
    return Repository(config, relative_shapes, tokenizers.written(tokenizer), shards=3)


def _opt_repository(config: Config) -> Repository:
    """Weights of torch whose names lack the class's prefix; vocabulary and merges."""
    return Repository(config, lambda settings: opt_shapes(settings, ""), _opt_tokenizer, shards=0)


def _gpt2_repository(config: Config, prefix: str = "") -> Repository:
    write = tokenizers.written(tokenizers.gpt2)
    return Repository(config, lambda settings: gpt2_shapes(settings, prefix), write)


REPOSITORIES = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Repository(
        _llama(
            hidden_size=2048,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            intermediate_size=5632,
            max_position_embeddings=2048,
            rms_norm_eps=1e-05,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            vocab_size=32000,
        ),
        llama_shapes,
        _llama_tokenizer,
    ),
    "JackFram/llama-160m": Repository(
        _llama(
            bos_token_id=0,
            pad_token_id=1,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=12,
            intermediate_size=3072,
            max_position_embeddings=2048,
            rms_norm_eps=1e-06,
            tie_word_embeddings=False,
            torch_dtype="float32",
            vocab_size=32000,
        ),
        llama_shapes,
        _llama_tokenizer,
        shards=0,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Repository(
        _smollm2(576, 30, 9, 3, 1536), llama_shapes, tokenizers.written(tokenizers.smollm2)
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": Repository(
        _smollm2(960, 32, 15, 5, 2560), llama_shapes, tokenizers.written(tokenizers.smollm2)
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Repository(
        {**_smollm2(2048, 24, 32, 32, 8192), "rope_theta": 130_000},
        llama_shapes,
        tokenizers.written(tokenizers.smollm2),
    ),
    "Qwen/Qwen3-0.6B": _relative(_qwen3(1024, 28, 16, 3072), tokenizers.qwen2),
    "Qwen/Qwen3-1.7B": _relative(_qwen3(2048, 28, 16, 6144), tokenizers.qwen2),
    "Qwen/Qwen3-4B": _relative(_qwen3(2560, 36, 32, 9728), tokenizers.qwen2),
    "meta-llama/Llama-3.2-1B-Instruct": _relative(_llama32(2048, 16, 32), tokenizers.gpt2),
    "meta-llama/Llama-3.2-3B-Instruct": _relative(_llama32(3072, 28, 24), tokenizers.gpt2),
    "google/gemma-3-270m-it": _relative(_gemma3(640, 18, 2048), tokenizers.llama),
    "google/gemma-3-1b-it": _relative(_gemma3(1152, 26, 6912), tokenizers.llama),
    "microsoft/Phi-4-mini-instruct": Repository(
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "model_type": "phi3",
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 199999,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1, *(1.0 + place for place in range(47))],
                "short_factor": [1] * 48,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 200064,
        },
        phi3_shapes,
        tokenizers.written(tokenizers.gpt2),
        shards=2,
        generation={"bos_token_id": 199999, "eos_token_id": [200020, 199999]},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Repository(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        qwen2_shapes,
        tokenizers.written(tokenizers.qwen2),
        generation={"bos_token_id": 151643, "eos_token_id": [151645, 151643]},
    ),
    "microsoft/Phi-3-mini-4k-instruct": Repository(
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "phi3",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
        phi3_shapes,
        tokenizers.written(tokenizers.phi3),
        shards=2,
        generation={"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007]},
    ),
    "facebook/opt-125m": _opt_repository(_opt(768, 12, 12)),
    "facebook/opt-1.3b": _opt_repository(_opt(2048, 24, 32)),
    "facebook/opt-2.7b": _opt_repository(_opt(2560, 32, 32)),
    "facebook/opt-350m": _opt_repository(
        _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False)
    ),
    "openai-community/gpt2": _gpt2_repository(_gpt2(768, 12, 12)),
    "openai-community/gpt2-medium": _gpt2_repository(_gpt2(1024, 24, 16)),
    "openai-community/gpt2-large": _gpt2_repository(_gpt2(1280, 36, 20)),
    "distilbert/distilgpt2": _gpt2_repository(_gpt2(768, 6, 12), prefix="transformer."),
}
