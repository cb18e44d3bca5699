"""Trains a small Qwen3.5 with its MTP block for some minutes, to benchmark that drafter.

`python -m training.mtp FOLDER --minutes 10` writes a checkpoint with the tensor names of published
ones. The model learns from the library text of the demo pair, with its tokenizer, and is too small
and too briefly trained for any other use. With `--minutes 0` the weights stay random. Like
Qwen3.5's, the block is trained together with the model, on its states after the final norm.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from training.checkpoint import set_up, trained_tokenizer
from training.corpus import DEMO_DIR, load_corpus
from training.data import Sampler, token_arrays
from training.loop import MATRIX_LR
from training.optim import Optimizer
from training.pretrain import VECTOR_LR
from training.runtime import Budget, device
from training.tokenizer import save_tokenizer

LAYERS, INTERVAL = 16, 4  # deep enough that the block is a small part of a pass
LENGTH, ROWS = 256, 8
MTP_LOSS = 0.3  # weight; that of the next token's loss is 1
CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "full_attention_interval": INTERVAL,
    "layer_types": [
        "linear_attention" if number % INTERVAL else "full_attention"
        for number in range(1, LAYERS + 1)
    ],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class MtpBlock(nn.Module):
    """Turns a state and the next token into the state that predicts the token after that."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(hidden, epsilon)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(hidden, epsilon)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, INTERVAL - 1)])
        self.norm = qwen.Qwen3_5RMSNorm(hidden, epsilon)

    def forward(self, embedding: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """States [rows, tokens, hidden] for embeddings and states of the same shape."""
        both = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(state)
        x = self.layers[0](self.fc(torch.cat(both, -1)), position_embeddings=rotary)
        return self.norm(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """The decoder and its MTP block, which share the tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Qwen3_5TextConfig(**CONFIG, attn_implementation="sdpa")
        self.decoder = qwen.Qwen3_5ForCausalLM(self.config)
        self.mtp = MtpBlock(self.config)

    def outputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The states of all tokens [rows, n], and the block's outputs for the first n - 1."""
        model = self.decoder.model
        states = model(tokens).last_hidden_state
        embedded = model.embed_tokens(tokens[:, 1:])
        positions = torch.arange(embedded.shape[1], device=tokens.device)
        rotary = model.rotary_emb(embedded, positions.expand(3, len(tokens), -1))
        return states, self.mtp(embedded, states[:, :-1], rotary)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Losses in nats per token: of the next token, and of the block for the token after it."""
        states, guessed = self.outputs(tokens[:, :-1])
        rows = self.decoder.model.embed_tokens.weight
        following, block = (
            F.cross_entropy(F.linear(x, rows).float().flatten(0, 1), expected.flatten())
            for x, expected in ((states, tokens[:, 1:]), (guessed, tokens[:, 2:]))
        )
        return following, block

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in float16 like the demo pair."""
        tensors = dict(self.decoder.state_dict())
        tensors.pop("lm_head.weight", None)  # tied
        tensors |= {f"mtp.{name}": values for name, values in self.mtp.state_dict().items()}
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: values.half().contiguous().cpu() for name, values in tensors.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        names = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
        config = CONFIG | names | {"mtp_num_hidden_layers": 1, "torch_dtype": "float16"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def train(folder: Path, minutes: float, seed: int = 57) -> None:
    """Train for some minutes and write the checkpoint to `folder`."""
    set_up(seed, torch.get_num_threads())
    tokenizer = trained_tokenizer(DEMO_DIR / "target")
    model = Model().to(device())
    optimizer = Optimizer(model, matrix_lr=MATRIX_LR, vector_lr=VECTOR_LR)
    budget, step = Budget(0, minutes), 0
    if minutes:
        arrays = token_arrays(tokenizer, load_corpus(), folder.with_name(f"{folder.name}-tokens"))
        sampler = Sampler(arrays, seed)
    budget.start()
    while minutes and budget.progress < 1:
        tokens = torch.from_numpy(sampler.batch({"library": ROWS}, LENGTH)).to(device())
        with torch.autocast(tokens.device.type, torch.bfloat16):
            following, block = model.losses(tokens)
        (following + MTP_LOSS * block).backward()
        optimizer.step(budget.progress)
        budget.spend(ROWS * LENGTH)
        step += 1
        losses = f"loss {following.detach():.3f}, of the block {block.detach():.3f}"
        print(f"step {step}: {losses}, {budget.eta_minutes():.1f} minutes left", flush=True)
    model.save(folder)
    save_tokenizer(tokenizer, folder, context=model.config.max_position_embeddings)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    train(options.folder, options.minutes)


if __name__ == "__main__":
    main()
