"""Checkpoints of Qwen3.5 and Qwen3 with a random MTP block, and what the block computes, in torch.

Names and order are those of Qwen3.5's files; Qwen3 is the same without states, gates and offsets.
The reference is slow, begins anew for every guess, and reads a checkpoint by itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests import checkpoints


def make_checkpoint(
    folder: Path, *, seed: int = 0, with_states: bool = False, **options: Any
) -> Path:
    """Write a checkpoint, see `tests.checkpoints`, and add an MTP block to it.

    `with_states` makes it Qwen3.5's, otherwise it is Qwen3's.
    """
    kind = "qwen3_5_text" if with_states else "qwen3"
    checkpoints.make_checkpoint(folder, kind, **options)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    rng, hidden = np.random.default_rng(seed), config["hidden_size"]
    layer = "model.layers.1."  # one with attention
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        **{f"{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")},
        "norm.weight": (hidden,),
        **{
            f"layers.0.{name.removeprefix(layer)}": values.shape
            for name, values in tensors.items()
            if name.startswith(layer)
        },
    }
    for name, shape in shapes.items():
        values = rng.uniform(0.5, 1.5, shape) - with_states
        if len(shape) == 2:
            values = rng.normal(size=shape) * shape[1] ** -0.5
        tensors[f"mtp.{name}"] = values.astype(np.float32)
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Reference:
    """What the block of a checkpoint guesses, from the whole text."""

    def __init__(self, folder: Path) -> None:
        import torch  # noqa: PLC0415 - not everywhere

        self._torch = torch
        self._config = config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self._tensors = {name: torch.from_numpy(values).float() for name, values in stored.items()}
        self._embedding = self._tensors["model.embed_tokens.weight"]
        self._rows = self._tensors.get("lm_head.weight", self._embedding)
        self._gated = self._offsets = config.get("attn_output_gate", False)
        rope = config.get("rope_parameters") or config
        size = int(config["head_dim"] * rope.get("partial_rotary_factor", 1))
        self._angles = torch.tensor(1 / rope["rope_theta"] ** (np.arange(0, size, 2) / size))

    def logits(self, tokens: list[int], guesses: list[int], states: Any) -> Any:
        """The logits of the token behind a text and guesses.

        Args:
            tokens: [n], the text.
            guesses: the guesses behind it.
            states: [n - 1, width] and more, the target's last ones, behind its final norm.
        """
        state = states[: len(tokens) - 1]
        following = tokens[1:]
        for guess in guesses:
            last = self._outputs(following, state)[-1:]
            state, following = self._torch.cat([state, last]), [*following, guess]
        return self._rows @ self._outputs(following, state)[-1]

    def _outputs(self, tokens: list[int], states: Any) -> Any:
        """The block's normed outputs [n, width] of entries: a token, and the state before it."""
        torch, linear = self._torch, self._torch.nn.functional.linear
        heads, kv_heads = (self._config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        size, count = self._config["head_dim"], len(tokens)
        token = self._norm(self._embedding[tokens], "mtp.pre_fc_norm_embedding")
        state = self._norm(states, "mtp.pre_fc_norm_hidden")
        x = linear(torch.cat([token, state], -1), self._tensors["mtp.fc.weight"])
        y = self._norm(x, "mtp.layers.0.input_layernorm")
        q, k, v = (
            self._linear(f"self_attn.{part}_proj", y).view(count, number, -1).transpose(0, 1)
            for part, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, gates = q[..., :size], q[..., size:]
        q, k = (
            self._turned(self._norm(vectors, f"mtp.layers.0.self_attn.{part}_norm"))
            for part, vectors in (("q", q), ("k", k))
        )
        k, v = (vectors.repeat_interleave(heads // kv_heads, 0) for vectors in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self._gated:
            attended = attended * gates.sigmoid()
        x = x + self._linear("self_attn.o_proj", attended.transpose(0, 1).reshape(count, -1))
        y = self._norm(x, "mtp.layers.0.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear("mlp.gate_proj", y))
        x = x + self._linear("mlp.down_proj", gate * self._linear("mlp.up_proj", y))
        return self._norm(x, "mtp.norm")

    def _linear(self, name: str, x: Any) -> Any:
        return self._torch.nn.functional.linear(x, self._tensors[f"mtp.layers.0.{name}.weight"])

    def _norm(self, x: Any, name: str) -> Any:
        epsilon = self._config["rms_norm_eps"]
        scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return x * scale * (self._tensors[f"{name}.weight"] + self._offsets)

    def _turned(self, x: Any) -> Any:
        angles = self._torch.arange(x.shape[1])[:, None] * self._angles
        cos, sin = angles.cos().float(), angles.sin().float()
        size = 2 * len(self._angles)
        low, high = x[..., :size].chunk(2, -1)
        turned = [low * cos - high * sin, high * cos + low * sin]
        return self._torch.cat([*turned, x[..., size:]], -1)
