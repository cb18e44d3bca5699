"""A small Llama in torch, with the names and the arithmetic of transformers' LlamaForCausalLM.

RMSNorm, rotary embedding on half-split heads, grouped-query attention, SwiGLU, tied embeddings.
Parameter names equal Hugging Face's, so that a state dict is a checkpoint.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model; the field names are those of a Hugging Face config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    vocab_size: int = 4096
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hugging_face(self) -> dict[str, object]:
        """The content of config.json for transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "use_cache": True,
            "dtype": "float16",
        }


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, head_dim]` of the rotary embedding (Su et al., 2021)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta**-exponents)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [B, heads, S, head_dim]`; the pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix `x [B, S, hidden]` over its earlier positions."""
        batch, length, _ = x.shape
        # One product instead of three narrow ones.
        joined = F.linear(
            x, torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        )
        joined = joined.view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key, value = joined.split([self.heads, self.kv_heads, self.kv_heads], 1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        groups = self.heads // self.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of `x [B, S, hidden]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [B, S, hidden]`, once further."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Everything but the output projection, which is the embedding again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The model; `state_dict()` has the names of LlamaForCausalLM with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        cos, sin = rotary_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Projections into the residual stream start at zero: each layer starts as identity.
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.0 if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, S, vocab]` for `tokens [B, S]`, in the precision that autocast gives."""
        length = tokens.shape[1]
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        """Parameters, the tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
