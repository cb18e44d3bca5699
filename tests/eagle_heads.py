"""Random EAGLE-3 checkpoints as they are published, and what they compute, in torch.

The reference follows the paper and the format, not our code: it is slow, begins anew for every
guess, and reads a checkpoint by itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.random_weights import Shapes

Config = dict[str, Any]
LAYERS = 8  # of the targets here


def write_head(
    folder: Path,
    *,
    target: Path,
    seed: int = 0,
    hidden: int = 64,
    states: int = 3,
    rows: int = 100,
    sizes: tuple[int, int, int, int] = (4, 2, 16, 96),
    spelling: str = "midlayer.",
    nested: bool = False,
    embedding: bool = False,
    output: bool = True,
    biases: bool = False,
    d2t: bool = True,
    head_norms: bool = False,
    **config: Any,
) -> Path:
    """Write a head with random weights for a target's checkpoint.

    Args:
        folder: the new folder.
        target: the target's checkpoint.
        seed: of the weights.
        hidden: its own width.
        states: number of the target's layers that it reads; 0: one, without `fc`.
        rows: number of tokens that it can guess.
        sizes: of its layer: heads of queries, of keys, numbers in a head, in its gate.
        spelling: how names of the layer's tensors begin.
        nested: the layout of the library speculators.
        embedding, output: whether it has tables of its own.
        biases: whether its products have biases.
        d2t: whether it says which tokens it can guess.
        head_norms: whether each head of queries and keys has a norm.
        config: more settings.
    """
    of_target = json.loads((target / "config.json").read_text())
    width, vocab = of_target["hidden_size"], of_target["vocab_size"]
    rng, (heads, kv_heads, size, wide) = np.random.default_rng(seed), sizes

    def matrix(out: int, inputs: int) -> np.ndarray[Any, Any]:
        return np.asarray(rng.normal(size=(out, inputs)) * inputs**-0.5, np.float32)

    def vector(count: int) -> np.ndarray[Any, Any]:
        return rng.uniform(0.5, 1.5, count).astype(np.float32)

    products = {
        "self_attn.q_proj": (heads * size, 2 * hidden),
        "self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    tensors = {f"{spelling}{name}.weight": matrix(*shape) for name, shape in products.items()}
    if biases:
        tensors |= {
            f"{spelling}{name}.bias": vector(shape[0]) - 1 for name, shape in products.items()
        }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{spelling}{norm}.weight"] = vector(hidden)
    normed = "qk" if head_norms else ""
    tensors |= {f"{spelling}self_attn.{part}_norm.weight": vector(size) for part in normed}
    tensors["norm.weight"] = vector(hidden)
    if states:
        tensors["fc.weight"] = matrix(hidden, states * width)
        if biases:
            tensors["fc.bias"] = vector(hidden) - 1
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = vector(states * width)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": vector(width) for index in range(states)}
    for name, wanted, shape in (
        ("embed_tokens.weight", embedding, (vocab, hidden)),
        ("lm_head.weight", output, (rows, hidden)),
    ):
        if wanted:
            tensors[name] = 3 * matrix(*shape)
    if d2t:
        chosen = np.sort(rng.choice(vocab, rows, replace=False))
        tensors["d2t"] = chosen - np.arange(rows)
        tensors["t2d"] = np.isin(np.arange(vocab), chosen)
    layer = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 64,
        "vocab_size": vocab,
    }
    own = {"draft_vocab_size": rows, **config}
    if hidden != width:
        own["target_hidden_size"] = width
    if nested:
        own |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
        }
    else:
        own |= {"architectures": ["LlamaForCausalLMEagle3"], **layer, **config}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(own))
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle_shapes(config: Config) -> Shapes:
    """The tensors of a published head with this config.json, without those of integers.

    It reads three of the target's layers, which are as wide as itself, and has no embedding.
    """
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value")
    )
    shapes: Shapes = {
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"midlayer.{norm}.weight": (hidden,) for norm in norms}
    return shapes | {"norm.weight": (hidden,)}


class Reference:
    """What a head guesses, from the whole text.

    Args:
        folder: the head's checkpoint.
        embedding, output: [V, width], the target's.
    """

    def __init__(self, folder: Path, embedding: Any, output: Any) -> None:
        import torch  # noqa: PLC0415 - not everywhere

        self._torch = torch
        config = json.loads((folder / "config.json").read_text())
        layer = config.get("transformer_layer_config", config)
        self.layers = config.get("eagle_aux_hidden_state_layer_ids", [2, LAYERS // 2, LAYERS - 3])
        if "target_layer_ids" in config:
            self.layers = [layer + 1 for layer in config["target_layer_ids"]]
        self._heads, self._size = layer["num_attention_heads"], layer["head_dim"]
        self._kv_heads, self._eps = layer["num_key_value_heads"], layer["rms_norm_eps"]
        nested = "transformer_layer_config" in config
        self._before = config.get("norm_before_residual", nested)
        self._window = layer.get("sliding_window", config.get("sliding_window", 0))
        self._normed = config.get("norm_output", False)
        angles = 1 / layer["rope_theta"] ** (np.arange(0, self._size, 2) / self._size)
        self._angles = torch.tensor(angles / layer.get("rope_scaling", {}).get("factor", 1.0))
        stored = load_file(folder / "model.safetensors")
        self._tensors = {
            name.replace("midlayer.", "layers.0."): torch.from_numpy(values)
            for name, values in stored.items()
        }
        self._embedding = self._tensors.get("embed_tokens.weight", embedding)
        shift = self._tensors.get("d2t", torch.zeros(len(output), dtype=torch.int64))
        ids = torch.arange(len(shift)) + shift
        shared = self._embedding if layer.get("tie_word_embeddings") else output
        self._rows = self._tensors.get("lm_head.weight", shared[ids])

    def logits(self, tokens: list[int], guesses: list[int], states: list[Any]) -> Any:
        """The logits of the token behind a text and guesses, by the target's `states`.

        Args:
            tokens: [n], the text.
            guesses: the guesses behind it.
            states: by layer [n - 1, width] and more, as transformers gives them.
        """
        known = len(tokens) - 1
        state = self._fused([item[:known] for item in states])
        queries, keys, values, residual = self._entries(state, tokens[1:], 0)
        next_state, logits = self._guess(queries[-1], keys, values, residual[-1])
        for place, token in enumerate(guesses, known):
            entry = self._entries(next_state[None], [token], place)
            keys, values = (
                self._torch.cat(pair) for pair in ((keys, entry[1]), (values, entry[2]))
            )
            next_state, logits = self._guess(entry[0][0], keys, values, entry[3][0])
        return logits

    def _fused(self, states: list[Any]) -> Any:
        torch, get = self._torch, self._tensors.get
        joined = torch.cat(states, -1)
        if (norm := get("input_norm.weight")) is not None:
            joined = self._norm(joined, norm)
        parts = [
            item if (norm := get(f"fc_norm.{index}.weight")) is None else self._norm(item, norm)
            for index, item in enumerate(joined.chunk(len(states), -1))
        ]
        joined = torch.cat(parts, -1)
        weight, bias = get("fc.weight"), get("fc.bias")
        return joined if weight is None else torch.nn.functional.linear(joined, weight, bias)

    def _entries(self, state: Any, tokens: list[int], first: int) -> tuple[Any, Any, Any, Any]:
        """Queries, keys, values and residuals of adjacent entries, the first at a position."""
        torch = self._torch
        normed = self._norm(state, self._tensors["layers.0.hidden_norm.weight"])
        token = self._norm(
            self._embedding[tokens], self._tensors["layers.0.input_layernorm.weight"]
        )
        both = torch.cat([token, normed], -1)
        q, k, v = (self._linear(f"self_attn.{part}_proj", both) for part in "qkv")
        places = torch.arange(first, first + len(tokens))
        q = q.view(len(tokens), self._heads, self._size)
        k = k.view(len(tokens), self._kv_heads, self._size)
        if (norm := self._tensors.get("layers.0.self_attn.q_norm.weight")) is not None:
            q = self._norm(q, norm)
            k = self._norm(k, self._tensors["layers.0.self_attn.k_norm.weight"])
        return (
            self._turned(q, places),
            self._turned(k, places),
            v.view(len(tokens), self._kv_heads, self._size),
            normed if self._before else state,
        )

    def _guess(self, query: Any, keys: Any, values: Any, residual: Any) -> tuple[Any, Any]:
        """The state for the next guess, and the logits, of an entry that sees these keys."""
        torch, group = self._torch, self._heads // self._kv_heads
        keys, values, found = keys[-self._window :], values[-self._window :], []
        for head in range(self._heads):
            shares = torch.softmax(keys[:, head // group] @ query[head] * self._size**-0.5, 0)
            found.append(shares @ values[:, head // group])
        x = self._linear("self_attn.o_proj", torch.cat(found)) + residual
        y = self._norm(x, self._tensors["layers.0.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(self._linear("mlp.gate_proj", y))
        x = x + self._linear("mlp.down_proj", gate * self._linear("mlp.up_proj", y))
        last = self._norm(x, self._tensors["norm.weight"])
        return (last if self._normed else x), self._rows @ last

    def _linear(self, name: str, x: Any) -> Any:
        name = f"layers.0.{name}"
        bias = self._tensors.get(f"{name}.bias")
        return self._torch.nn.functional.linear(x, self._tensors[f"{name}.weight"], bias)

    def _norm(self, x: Any, weight: Any) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * weight

    def _turned(self, x: Any, places: Any) -> Any:
        angles = places[:, None, None] * self._angles
        cos, sin = angles.cos().float(), angles.sin().float()
        low, high = x.chunk(2, -1)
        return self._torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
