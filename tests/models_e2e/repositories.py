"""The repositories of models and draft heads on the hub that presets name, with random weights.

Configurations are the published ones. The weights lie in the same kinds of files: safetensors (one
or several), with or without the prefix of the class, or torch's own. Layers can be left out; the
rest of a configuration stays true.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import (
    gemma4_shapes,
    gpt2_shapes,
    granite_hybrid_shapes,
    lfm2_shapes,
    llama_shapes,
    opt_shapes,
    phi3_shapes,
    qwen2_shapes,
    qwen35_shapes,
    relative_shapes,
    write_checkpoint,
)
from tests.eagle_heads import eagle_shapes
from tests.models.graph.published_graph import write_published
from tests.random_weights import RandomWeights, Shapes, write_safetensors
from tests.text import published_tokenizers as tokenizers

Config = dict[str, Any]
_WHOLE_ATTENTION = ("full_attention", "attention")
PHI3_GRAPH = "phi3-mini-4k-instruct-cpu-int4-rtn-block-32-acc-level-4.onnx"


class Published(ABC):
    """A repository.

    Attributes:
        config: its config.json.
        shapes: the shapes of a configuration's tensors, by their stored names.
    """

    config: Config
    shapes: Callable[[Config], Shapes]

    @abstractmethod
    def write(self, folder: Path, layers: int | None, *, multimodal: bool = False) -> None:
        """Write the repository into `folder`; a model has so many layers, or all its own.

        `multimodal`: a multimodal model whole, and not its text part alone.
        """


@dataclass(frozen=True)
class Head(Published):
    """An EAGLE-3 head of some bfloat16 tensors and two of integers."""

    config: Config
    shapes: Callable[[Config], Shapes] = eagle_shapes

    def write(self, folder: Path, layers: int | None, *, multimodal: bool = False) -> None:
        """Write the head, which always has one layer."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        shapes, rows = self.shapes(self.config), self.config["draft_vocab_size"]
        chosen = np.arange(rows) * self.config["vocab_size"] // rows
        integers = {
            "d2t": chosen - np.arange(rows),
            "t2d": np.isin(np.arange(self.config["vocab_size"]), chosen),
        }
        tensors = RandomWeights(0, "bfloat16").of(shapes)
        write_safetensors(folder / "model.safetensors", shapes, "bfloat16", tensors, integers)


@dataclass(frozen=True)
class Repository(Published):
    """A model.

    Attributes:
        config: its config.json.
        shapes: the shapes of a configuration's tensors, by their stored names.
        tokenizer: writes its tokenizer's files.
        shards: number of safetensors files; 0: one file of torch, pytorch_model.bin.
        generation: its generation_config.json.
        within: the class of the multimodal model whose text part `config` and `shapes` are.
    """

    config: Config
    shapes: Callable[[Config], Shapes]
    tokenizer: Callable[[Path, int], None]
    shards: int = 1
    generation: Config | None = None
    within: str = ""

    def write(self, folder: Path, layers: int | None, *, multimodal: bool = False) -> None:
        """Write the model into `folder`, with this number of layers; None: all layers."""
        config = dict(self.config)
        if layers is not None:
            if kinds := config.get("layer_types"):  # up to the first with attention to all tokens
                first = next(i for i, kind in enumerate(kinds) if kind in _WHOLE_ATTENTION)
                layers = max(layers, first + 1)
                config["layer_types"] = kinds[:layers]
                config |= {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in config else {}
            config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
        shapes = self.shapes(config)
        if multimodal and self.within:
            config, shapes = _multimodal(self.within, config, shapes)
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


def _multimodal(architecture: str, text: Config, shapes: Shapes) -> tuple[Config, Shapes]:
    """The model around a text part: with one layer of all that reads images and sound.

    Names and shapes of its tensors are transformers' own.
    """
    import torch  # noqa: PLC0415 - heavy
    import transformers  # noqa: PLC0415 - heavy

    kind = text["model_type"].removesuffix("_text")
    vision = {"num_hidden_layers": 1, "depth": 1, "out_hidden_size": text["hidden_size"]}
    sections = {"text_config": text, "vision_config": vision, "audio_config": {}}
    if kind == "gemma4":
        sections["audio_config"] = {"num_hidden_layers": 1}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **deepcopy(sections))
        model = getattr(transformers, architecture)(config)
    part, dtype = "model.language_model.", text["torch_dtype"]
    around = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.startswith((part, "lm_head."))
    }
    renamed = {
        name.replace("model.", part, 1) if name.startswith("model.") else name: shape
        for name, shape in shapes.items()
    }
    tied = text["tie_word_embeddings"]
    settings = {"architectures": [architecture], "torch_dtype": dtype, "tie_word_embeddings": tied}
    return {**settings, "model_type": kind, **sections}, {**around, **renamed}


def save_state_dict(file: Path, shapes: Shapes, dtype: str) -> None:
    """Have torch save random weights of these shapes."""
    import torch  # noqa: PLC0415 - heavy

    drawn = RandomWeights(0, dtype).of(shapes)
    tensors = {name: torch.from_numpy(array) for name, array in zip(shapes, drawn, strict=True)}
    torch.save(tensors, file)


def write_phi3_graph(folder: Path, layers: int) -> None:
    """Write Microsoft's layout for onnxruntime-genai: one graph, int4 in blocks of 32.

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


# -- the published configurations ------------------------------------------------------------------

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def _sizes(*numbers: int) -> Config:
    """The sizes of a decoder, by the names that most families share."""
    return dict(zip(_SIZES, numbers, strict=True))


def _family(architecture: str, bos: int, eos: int | list[int], dtype: str = "bfloat16") -> Config:
    kind = architecture.removesuffix("ForCausalLM").lower()
    common = {"architectures": [architecture], "model_type": kind, "torch_dtype": dtype}
    return {**common, "bos_token_id": bos, "eos_token_id": eos}


_LLAMA = {**_family("LlamaForCausalLM", 1, 2), "hidden_act": "silu", "rope_scaling": None}
_SMOLLM2: Config = {
    **_LLAMA,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100_000,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "pad_token_id": 2,
}
_QWEN2: Config = {
    **_family("Qwen2ForCausalLM", 151643, 151645),
    "hidden_act": "silu",
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_QWEN3: Config = {
    **_family("Qwen3ForCausalLM", 151643, 151645),
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_LLAMA32: Config = {
    **_family("LlamaForCausalLM", 128000, [128001, 128008, 128009]),
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_GEMMA3: Config = {
    **_family("Gemma3ForCausalLM", 2, [1, 106]),
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_PHI3: Config = {
    **_family("Phi3ForCausalLM", 1, 32000),
    **_sizes(3072, 32, 32, 32, 8192, 32064, 4096),
    "attention_bias": False,
    "hidden_act": "silu",
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
}
_PHI4: Config = {
    **_PHI3,
    **_family("Phi3ForCausalLM", 199999, 199999),
    **_sizes(3072, 32, 24, 8, 8192, 200064, 131072),
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1, *(1.0 + index for index in range(47))],
        "short_factor": [1] * 48,
        "type": "longrope",
    },
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}

_GRANITE: Config = {
    **_family("GraniteForCausalLM", 0, 0),
    **_sizes(2048, 40, 32, 8, 8192, 49159, 131072),
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "logits_scaling": 8.0,
    "mlp_bias": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
_STARCODER2: Config = {
    **_family("Starcoder2ForCausalLM", 0, 0, "float32"),
    **_sizes(3072, 30, 24, 2, 12288, 49152, 16384),
    "hidden_act": "gelu_pytorch_tanh",
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "tie_word_embeddings": True,  # the published file lacks it: it is the class's default
    "use_bias": True,
}

_QWEN35: Config = {  # the text part
    **_family("Qwen3_5ForCausalLM", 248044, 248044),
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
}
_GRANITE_H: Config = {
    **_family("GraniteMoeHybridForCausalLM", 100257, 100257),
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "logits_scaling": 8.0,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "num_experts_per_tok": 0,
    "num_local_experts": 0,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
}
_GEMMA4: Config = {  # the text part
    **_family("Gemma4ForCausalLM", 2, 1),
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "num_global_key_value_heads": None,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262144,
}
_LFM2: Config = {
    **_family("Lfm2ForCausalLM", 1, 7),
    **_sizes(2048, 16, 32, 8, 12288, 65536, 128000),
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,  # two thirds of it count
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-05,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


def _opt(hidden: int, layers: int, heads: int, **changes: Any) -> Repository:
    """Weights of torch whose names lack the class's prefix; vocabulary and merges."""
    config = {
        **_family("OPTForCausalLM", 2, 2, "float16"),
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "ffn_dim": 4 * hidden,
        "hidden_size": hidden,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "prefix": "</s>",
        "vocab_size": 50272,
        "word_embed_proj_dim": hidden,
        **changes,
    }
    write = tokenizers.write_opt_files
    return Repository(
        config, lambda given: opt_shapes(given, ""), lambda folder, vocab: write(folder), shards=0
    )


def _gpt2(hidden: int, layers: int, heads: int, prefix: str = "") -> Repository:
    config = {
        **_family("GPT2LMHeadModel", 50256, 50256, "float32"),
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    write = tokenizers.written(tokenizers.gpt2)
    return Repository(config, lambda given: gpt2_shapes(given, prefix), write)


def _smollm2(*sizes: int, **changes: Any) -> Repository:
    config = {**_SMOLLM2, **_sizes(*sizes, 49152, 8192), **changes}
    return Repository(config, llama_shapes, tokenizers.written(tokenizers.smollm2))


def _relative(config: Config, tokenizer: Callable[[], Any], *sizes: int) -> Repository:
    """A family that is drawn like Llama."""
    config = {**config, **_sizes(*sizes)}
    return Repository(config, relative_shapes, tokenizers.written(tokenizer), shards=3)


def _qwen3(hidden: int, layers: int, heads: int, wide: int) -> Repository:
    config = {**_QWEN3, "max_window_layers": layers}
    return _relative(config, tokenizers.qwen2, hidden, layers, heads, 8, wide, 151936, 40960)


def _coder(*sizes: int) -> Repository:
    config = {**_QWEN2, **_sizes(*sizes, 151936, 32768), "eos_token_id": 151643}
    generation = {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643}
    write = tokenizers.written(tokenizers.qwen2_coder)
    return Repository(config, qwen2_shapes, write, shards=2, generation=generation)


def _llama32(hidden: int, layers: int, heads: int) -> Repository:
    config = {**_LLAMA32, "head_dim": hidden // heads}
    return _relative(config, tokenizers.gpt2, hidden, layers, heads, 8, 8192, 128256, 131072)


def _gemma3(hidden: int, layers: int, wide: int) -> Repository:
    return _relative(_GEMMA3, tokenizers.llama, hidden, layers, 4, 1, wide, 262144, 32768)


def _lfm2(hidden: int, heads: int, wide: int) -> Repository:
    attention, layers = (2, 5, 8, 10, 12, 14), 16
    kinds = ["full_attention" if index in attention else "conv" for index in range(layers)]
    sizes = _sizes(hidden, layers, heads, 8, wide, 65536, 128000)
    config = {**_LFM2, **sizes, "block_ff_dim": wide, "layer_types": kinds}
    return Repository(config, lfm2_shapes, tokenizers.written(tokenizers.gpt2))


def _head(architecture: str, epsilon: float, theta: float, *sizes: int) -> Head:
    hidden, heads, wide, vocab = sizes
    config = {
        **_sizes(hidden, 1, heads, 8, wide, vocab, 40960),
        "architectures": [architecture],
        "model_type": "llama",
        "draft_vocab_size": 32000,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return Head(config)


def _qwen35_shapes(config: Config) -> Shapes:
    """The text part, and the MTP block: a layer with attention behind two norms and a product."""
    hidden, last = config["hidden_size"], config["full_attention_interval"] - 1
    shapes, layer = qwen35_shapes(config), f"model.layers.{last}."
    block = {
        f"mtp.layers.0.{name.removeprefix(layer)}": shape
        for name, shape in shapes.items()
        if name.startswith(layer)
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    block |= {f"mtp.{norm}.weight": (hidden,) for norm in norms}
    return shapes | block | {"mtp.fc.weight": (hidden, 2 * hidden)}


def _qwen35(*sizes: int, value_heads: int = 16) -> Repository:
    config = {**_QWEN35, **_sizes(*sizes, 248320, 262144), "linear_num_value_heads": value_heads}
    interval = config["full_attention_interval"]
    config["layer_types"] = [
        "linear_attention" if number % interval else "full_attention"
        for number in range(1, config["num_hidden_layers"] + 1)
    ]
    write, within = tokenizers.written(tokenizers.qwen2), "Qwen3_5ForConditionalGeneration"
    return Repository(config, _qwen35_shapes, write, shards=2, within=within)


def _granite_h(
    *sizes: int, attention: tuple[int, ...], heads: int, head: int, wide: int
) -> Repository:
    config = {**_GRANITE_H, **_sizes(*sizes, wide, 100352, 131072), "mamba_n_heads": heads}
    layers = range(config["num_hidden_layers"])
    kinds = ["attention" if layer in attention else "mamba" for layer in layers]
    config |= {"layer_types": kinds, "mamba_d_head": head, "shared_intermediate_size": wide}
    write = tokenizers.written(tokenizers.starcoder2)
    return Repository(config, granite_hybrid_shapes, write, shards=2)


def _gemma4(*sizes: int, shared: int, every: int, double: bool) -> Repository:
    config = {**_GEMMA4, **_sizes(*sizes, 262144, 131072), "num_kv_shared_layers": shared}
    config["use_double_wide_mlp"] = double
    config["layer_types"] = [
        "sliding_attention" if number % every else "full_attention"
        for number in range(1, config["num_hidden_layers"] + 1)
    ]
    write, within = tokenizers.written(tokenizers.gemma3), "Gemma4ForConditionalGeneration"
    return Repository(config, gemma4_shapes, write, shards=2, within=within)


def _llama_tokenizer(folder: Path, vocab: int) -> None:
    tokenizers.written(tokenizers.llama)(folder, vocab)
    (folder / "tokenizer.model").write_bytes(b"SentencePiece's own, which is not needed")


REPOSITORIES: dict[str, Published] = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Repository(
        {
            **_LLAMA,
            **_sizes(2048, 22, 32, 4, 5632, 32000, 2048),
            **{"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False},
        },
        llama_shapes,
        _llama_tokenizer,
    ),
    "JackFram/llama-160m": Repository(
        {
            **_LLAMA,
            **_sizes(768, 12, 12, 12, 3072, 32000, 2048),
            **{"bos_token_id": 0, "pad_token_id": 1, "torch_dtype": "float32"},
            **{"rms_norm_eps": 1e-06, "tie_word_embeddings": False},
        },
        llama_shapes,
        _llama_tokenizer,
        shards=0,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _smollm2(576, 30, 9, 3, 1536),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _smollm2(2048, 24, 32, 32, 8192, rope_theta=130_000),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728),
    "AngelSlim/Qwen3-1.7B_eagle3": _head(
        "LlamaForCausalLMEEagle3", 1e-6, 1e6, 2048, 16, 6144, 151936
    ),
    "AngelSlim/Qwen3-4B_eagle3": _head("Eagle3LlamaForCausalLM", 1e-6, 1e6, 2560, 32, 9728, 151936),
    "thoughtworks/Llama-3.2-3B-Instruct-Eagle3": _head(
        "LlamaForCausalLMEagle3", 1e-5, 5e5, 3072, 24, 8192, 128256
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _llama32(2048, 16, 32),
    "meta-llama/Llama-3.2-3B-Instruct": _llama32(3072, 28, 24),
    "google/gemma-3-270m-it": _gemma3(640, 18, 2048),
    "google/gemma-3-1b-it": _gemma3(1152, 26, 6912),
    "LiquidAI/LFM2.5-350M": _lfm2(1024, 16, 6656),
    "LiquidAI/LFM2.5-1.2B-Instruct": _lfm2(2048, 32, 12288),
    "Qwen/Qwen3.5-0.8B": _qwen35(1024, 24, 8, 2, 3584),
    "Qwen/Qwen3.5-2B": _qwen35(2048, 24, 8, 2, 6144),
    "Qwen/Qwen3.5-4B": _qwen35(2560, 32, 16, 4, 9216, value_heads=32),
    "ibm-granite/granite-4.0-h-350m": _granite_h(
        *(768, 32, 12, 4), attention=(10, 13, 17, 27), heads=48, head=32, wide=2048
    ),
    "ibm-granite/granite-4.0-h-micro": _granite_h(
        *(2048, 40, 32, 8), attention=(5, 15, 25, 35), heads=64, head=64, wide=8192
    ),
    "google/gemma-4-E2B-it": _gemma4(1536, 35, 8, 1, 6144, shared=20, every=5, double=True),
    "google/gemma-4-E4B-it": _gemma4(2560, 42, 8, 2, 10240, shared=18, every=6, double=False),
    "microsoft/Phi-4-mini-instruct": Repository(
        _PHI4,
        phi3_shapes,
        tokenizers.written(tokenizers.gpt2),
        shards=2,
        generation={"bos_token_id": 199999, "eos_token_id": [200020, 199999]},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Repository(
        {**_QWEN2, **_sizes(896, 24, 14, 2, 4864, 151936, 32768)},
        qwen2_shapes,
        tokenizers.written(tokenizers.qwen2),
        generation={"bos_token_id": 151643, "eos_token_id": [151645, 151643]},
    ),
    "Qwen/Qwen2.5-Coder-0.5B": _coder(896, 24, 14, 2, 4864),
    "Qwen/Qwen2.5-Coder-1.5B": _coder(1536, 28, 12, 2, 8960),
    "ibm-granite/granite-3.3-2b-instruct": Repository(
        _GRANITE, relative_shapes, tokenizers.written(tokenizers.starcoder2), shards=2
    ),
    "bigcode/starcoder2-3b": Repository(
        _STARCODER2, relative_shapes, tokenizers.written(tokenizers.starcoder2)
    ),
    "microsoft/Phi-3-mini-4k-instruct": Repository(
        _PHI3,
        phi3_shapes,
        tokenizers.written(tokenizers.phi3),
        shards=2,
        generation={"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007]},
    ),
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "distilbert/distilgpt2": _gpt2(768, 6, 12, prefix="transformer."),
}
