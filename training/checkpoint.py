"""Writes a model as a regular Hugging Face folder, and reads it back.

The weights are float16: half the size, and (see the model card) no change in bits per byte.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.model import Llama, ModelConfig
from training.tokenizer import save_tokenizer


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().cpu().half().contiguous() for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library leaves it to the owner alone
    config = json.dumps(model.config.to_hugging_face(), indent=2)
    (folder / "config.json").write_text(config + "\n", "utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    save_tokenizer(tokenizer, folder, context=model.config.max_position_embeddings)


def load_model(folder: Path) -> Llama:
    """The model of a folder that `save_model` wrote, in float32, for evaluation."""
    content = json.loads((folder / "config.json").read_text("utf-8"))
    names = ModelConfig.__dataclass_fields__
    model = Llama(ModelConfig(**{name: content[name] for name in names}))
    model.load_state_dict(
        {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    )
    return model.eval().requires_grad_(False)


def trained_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def set_up(seed: int, threads: int) -> None:
    """Fix the seed and the threads of this process."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
