"""Creates a model, writes it as a regular Hugging Face folder, and reads it back.

The models are transformers' Llama. The weights are stored in float16, which halves the size.
"""

from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from training.tokenizer import save_tokenizer


def new_model(config: LlamaConfig) -> LlamaForCausalLM:
    """A model with random weights in which each layer starts as the identity."""
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    deepcopy(model).half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # the library makes it readable only for its owner
    save_tokenizer(tokenizer, folder, context=model.config.max_position_embeddings)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Load a model that `save_model` wrote, in float32, for evaluation."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)  # nosec B615
    return model.eval().requires_grad_(False)


def trained_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def set_up(seed: int, threads: int) -> None:
    """Set the seed and the number of threads of this process."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
