"""The layer of an EAGLE-3.1 head in torch, for its training; `layer.py` builds the graph that runs.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (2025). An entry joins what several layers of the target made of a token with the embedding of
the next token, and guesses the one after that. As in use, the layer then reads its own output in
the place of the target's states: it is unrolled over all entries of a text at once. EAGLE-3.1 has a
norm for each state, and passes on its output behind the last norm.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specops.heads.layer import Target

_HEAD_SIZE = 64  # of its attention
_FAR = -1e9  # the score of a key that an entry must not see
_ROWS, _ROWS_ON_GPU = 512, 16384  # whose loss is computed at a time


def layers_read(target: Target) -> list[int]:
    """The target's layers whose inputs a new head reads."""
    last = target.num_layers - 1
    return [min(2, last), target.num_layers // 2, max(0, last - 2)]


def new_config(target: Target, rows: int) -> dict[str, Any]:
    """The `config.json` of a head that can guess so many of a target's tokens."""
    hidden = target.hidden_size
    heads = max(1, hidden // _HEAD_SIZE)
    kv_heads = max(n for n in range(1, max(1, heads // 3) + 1) if heads % n == 0)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // (3 * _HEAD_SIZE)) * _HEAD_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": rows,
        "tie_word_embeddings": False,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers_read(target),
        },
    }


class HeadNetwork:
    """The layer. Its output rows are the target's and not trained: so it learns from fewer tokens.

    Args:
        config: as `new_config` makes it.
        rows: [V, hidden], the target's output rows of the tokens that can be guessed.

    Attributes:
        weights: by their names in a checkpoint.
        precision: of the products of a training: bfloat16 where those are faster.
    """

    def __init__(self, config: dict[str, Any], rows: Tensor) -> None:
        self.rows = rows
        self.precision = torch.bfloat16 if rows.is_cuda or _halves_are_faster() else torch.float32
        self._eps, self._theta = config["rms_norm_eps"], config["rope_theta"]
        self._heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._group, size = self._heads // kv_heads, config["hidden_size"]
        wide, layers = config["intermediate_size"], config["eagle_config"]
        self._states = len(layers["eagle_aux_hidden_state_layer_ids"])
        shapes = {
            "fc": (size, self._states * size),
            "midlayer.self_attn.q_proj": (self._heads * _HEAD_SIZE, 2 * size),
            "midlayer.self_attn.k_proj": (kv_heads * _HEAD_SIZE, 2 * size),
            "midlayer.self_attn.v_proj": (kv_heads * _HEAD_SIZE, 2 * size),
            "midlayer.self_attn.o_proj": (size, self._heads * _HEAD_SIZE),
            "midlayer.mlp.gate_proj": (wide, size),
            "midlayer.mlp.up_proj": (wide, size),
            "midlayer.mlp.down_proj": (size, wide),
        }
        random = torch.Generator().manual_seed(0)
        weights = {
            name: (2 * torch.rand(shape, generator=random) - 1) * shape[1] ** -0.5
            for name, shape in shapes.items()
        }
        norms = [
            f"midlayer.{name}norm" for name in ("input_layer", "hidden_", "post_attention_layer")
        ]
        norms += ["norm", *(f"fc_norm.{index}" for index in range(self._states))]
        weights |= {name: torch.ones(size) for name in norms}
        self.weights = {
            f"{name}.weight": value.to(rows.device).requires_grad_()
            for name, value in weights.items()
        }

    def guess(self, embeddings: Tensor, states: Tensor, guesses: int) -> Iterator[Tensor]:
        """Guess several tokens in a row behind each entry of texts.

        Args:
            embeddings: [B, T, hidden], of the token behind each entry's.
            states: [B, T, all], what the target's layers made of each entry's token.
            guesses: how many.

        Yields:
            For each guess [B, T, hidden], the states whose products with `rows` are logits. Guess n
            of entry t is the n-th of the round that began at t - n; of the first n entries it means
            nothing.
        """
        length = embeddings.shape[1]
        parts = enumerate(states.chunk(self._states, -1))
        state = self._linear("fc", torch.cat([self._norm(f"fc_norm.{i}", x) for i, x in parts], -1))
        places = torch.arange(length, device=states.device)
        half = torch.arange(0, _HEAD_SIZE, 2, device=states.device) / _HEAD_SIZE
        angles = places[:, None] * self._theta**-half
        ages = places[:, None] - places
        keys, values = list[Tensor](), list[Tensor]()
        for guess in range(guesses):
            state = _later(state, min(guess, 1), 1)  # that of the guess before
            both = [self._norm("midlayer.input_layernorm", embeddings)]
            both += [self._norm("midlayer.hidden_norm", state)]
            query, key, value = (
                self._linear(f"midlayer.self_attn.{part}_proj", torch.cat(both, -1))
                .unflatten(-1, (-1, _HEAD_SIZE))
                .transpose(1, 2)
                for part in "qkv"
            )
            query = _turned(query, angles)
            keys.append(_turned(key, angles).repeat_interleave(self._group, 1))
            values.append(value.repeat_interleave(self._group, 1))
            # It sees the entries that its round began with, and then its own of each guess.
            own = [(keys[n], values[n], guess - n) for n in range(1, guess + 1)]
            scores = [(query @ keys[0].transpose(2, 3)).masked_fill(ages < guess, _FAR)]
            scores += [(query * _later(k, age, 2)).sum(-1, keepdim=True) for k, _, age in own]
            shares = (torch.cat(scores, -1).float() * _HEAD_SIZE**-0.5).softmax(-1)
            mixed = shares[..., :length].to(value.dtype) @ values[0]
            for n, (_, v, age) in enumerate(own, length):
                mixed = mixed + shares[..., n : n + 1].to(value.dtype) * _later(v, age, 2)
            state = state + self._linear(
                "midlayer.self_attn.o_proj", mixed.transpose(1, 2).flatten(2)
            )
            inner = self._norm("midlayer.post_attention_layernorm", state)
            gate = functional.silu(self._linear("midlayer.mlp.gate_proj", inner))
            inner = gate * self._linear("midlayer.mlp.up_proj", inner)
            state = self._norm("norm", state + self._linear("midlayer.mlp.down_proj", inner))
            yield state

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return functional.rms_norm(x.float(), weight.shape, weight, self._eps)


@functools.cache
def _halves_are_faster() -> bool:
    """Whether this processor multiplies bfloat16 faster: with AVX-512 four times, else slower."""

    def seconds(precision: torch.dtype) -> float:
        x, taken = torch.zeros((_ROWS, _ROWS), dtype=precision), list[float]()
        for _ in range(5):
            begun = time.perf_counter()
            functional.linear(x, x)
            taken.append(time.perf_counter() - begun)
        return min(taken)

    return seconds(torch.bfloat16) < seconds(torch.float32)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def _later(x: Tensor, count: int, axis: int) -> Tensor:
    """Move all entries `count` places on; zeros come first."""
    count = min(count, x.shape[axis])
    kept = x.narrow(axis, 0, x.shape[axis] - count)
    return torch.cat([torch.zeros_like(x.narrow(axis, 0, count)), kept], axis) if count else x


class DistillationLoss(torch.autograd.Function):
    """How far the probabilities of states are from the target's.

    The mean over rows of `mass * (entropy * CE + variation * TV)`. Cross entropy teaches fast at
    first; the total variation is what rejects draft tokens (arXiv 2602.23881). The gradient is
    computed beside the loss, some rows at a time, so that no more logits have to be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        rows: Tensor,
        target: tuple[Tensor, Tensor],
        factors: tuple[float, float],
    ) -> Tensor:
        """Compute the loss.

        Args:
            ctx: keeps the gradient.
            states: [n, hidden].
            rows: [V, hidden], output rows, which are not trained.
            target: shares [n, V], the target's probabilities of these tokens, sums 1; and mass [n],
                its probability of all of these tokens.
            factors: of the cross entropy and of the total variation.
        """
        step = _ROWS if states.device.type == "cpu" else _ROWS_ON_GPU
        entropy, variation = factors
        gradient, total = torch.empty_like(states), torch.zeros((), device=states.device)
        for start in range(0, len(states), step):
            part = slice(start, start + step)
            logs = (states[part] @ rows.T.to(states.dtype)).float().log_softmax(-1)
            share, weight = target[0][part].float(), target[1][part, None] / len(states)
            total -= (weight * share * logs).sum() * entropy
            chances = logs.exp_()
            surplus = chances - share
            total += (weight * surplus.abs()).sum() / 2 * variation
            slope = surplus.sign().div_(2)
            slope -= (slope * chances).sum(-1, keepdim=True)
            slope.mul_(chances).mul_(variation).add_(surplus, alpha=entropy).mul_(weight)
            gradient[part] = slope.to(states.dtype) @ rows.to(states.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the states; nothing else of it is trained."""
        return ctx.saved_tensors[0] * slope, None, None, None
