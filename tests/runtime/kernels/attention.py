"""What the tests of attention share: the operator, a cache, and attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specops.runtime import kernels
from tests.runtime.kernels.operators import operator

INPUTS = ["query", "key", "value", "spans", "block_tables", "cache"]
INPUTS += ["cos", "sin", "q_norm", "k_norm", "long_cos", "long_sin", "v_norm"]


@dataclass(frozen=True)
class Layer:
    """The operator's attributes, and which optional inputs it has."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    rotated: int = 0
    frequencies: bool = False  # instead of tables of cosines and sines
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    norm: bool = False
    value_norm: bool = False
    packed: bool = False
    others: tuple[tuple[int, int], ...] = ((3, 24), (1, 8))  # heads and sizes of two other layers

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        return (self.others[0], (self.kv_heads, self.size), self.others[1])

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "layer": 1,
            "num_heads": self.heads,
            "kv_num_heads": [heads for heads, _ in self.layers],
            "head_size": [size for _, size in self.layers],
            "rotary_interleaved": int(self.interleaved),
            "rotary_factor": 1.25 if self.frequencies else 1.0,
            "rotary_within": 0,
            "window": self.window,
            "scale": self.size**-0.5,
            "softcap": self.softcap,
            "epsilon": 1e-6,
        }


def random_weights(layer: Layer, positions: int = 768) -> dict[str, np.ndarray]:
    """What a layer has besides its tokens."""
    random = np.random.default_rng(7)
    weights = {}
    if layer.frequencies:
        weights |= {"cos": random.uniform(0, 7, layer.rotated // 2).astype(np.float32)}
    elif layer.rotated:
        angles = random.uniform(0, 7, (positions, layer.rotated // 2))
        weights |= {"cos": np.cos(angles).astype(np.float32)}
        weights |= {"sin": np.sin(angles).astype(np.float32)}
    if layer.norm:
        norms = random.normal(1, 0.2, (2, layer.size)).astype(np.float32)
        weights |= {"q_norm": norms[0], "k_norm": norms[1]}
    if layer.value_norm:
        weights |= {"v_norm": random.normal(1, 0.2, layer.size).astype(np.float32)}
    return weights


class Tokens(NamedTuple):
    """Queries, keys and values of consecutive positions: [tokens, heads, size]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(tensor[start:stop] for tensor in self))

    @staticmethod
    def random(layer: Layer, tokens: int, seed: int = 0) -> Tokens:
        random = np.random.default_rng(seed)
        heads = (layer.heads, layer.kv_heads, layer.kv_heads)
        shapes = [(tokens, count, layer.size) for count in heads]
        return Tokens(*(random.normal(size=shape).astype(np.float32) for shape in shapes))


class Cache:
    """Blocks of a cache, full of NaN, and tables that give each slot blocks of its own."""

    def __init__(
        self, layer: Layer, dtype: str, *, slots: int = 3, max_blocks: int = 12, fill: int = 0xFF
    ) -> None:
        self.bytes = kernels.block_bytes(layer.layers, dtype)
        self.dtype, blocks = dtype, slots * max_blocks
        self.pool = np.full(blocks * self.bytes, fill, np.uint8)
        order = np.random.default_rng(5).permutation(blocks)
        self.tables = order.reshape(slots, max_blocks).astype(np.int64)

    @property
    def descriptor(self) -> np.ndarray:
        blocks = len(self.pool) // self.bytes
        return np.array(
            [self.pool.ctypes.data, blocks, self.bytes, kernels.KV_DTYPES[self.dtype]], np.int64
        )


class Attention:
    """The operator Attention with random weights."""

    def __init__(
        self, layer: Layer, positions: int = 768, /, *, without: str = "", **changed: Any
    ) -> None:
        self.layer, self.weights = layer, random_weights(layer, positions)
        there = {*INPUTS[:6], *self.weights} - (
            {"key", "value"} if layer.packed else {*without.split()}
        )
        names = [name if name in there else "" for name in INPUTS]
        attributes = layer.attributes | changed
        self._compute = operator(kernels.ATTENTION, names, ["out"], **attributes)

    def feeds(self, cache: Cache, *spans: tuple[int, int, Tokens]) -> dict[str, np.ndarray]:
        """The inputs of a pass; a span has a slot, its first position and its tokens."""
        counts = (self.layer.heads, self.layer.kv_heads, self.layer.kv_heads)
        query, key, value = (
            np.concatenate(tensors).reshape(1, sum(map(len, tensors)), heads * self.layer.size)
            for tensors, heads in zip(
                zip(*(tokens for *_, tokens in spans), strict=True), counts, strict=True
            )
        )
        feeds = {"query": query, "key": key, "value": value}
        if self.layer.packed:
            feeds = {"query": np.concatenate([query, key, value], axis=-1)}
        return feeds | {
            "spans": np.array(
                [(slot, start, len(tokens.query)) for slot, start, tokens in spans], np.int64
            ),
            "block_tables": cache.tables,
            "cache": cache.descriptor,
            **self.weights,
        }

    def run(self, feeds: dict[str, Any]) -> np.ndarray:
        """[T, heads, size]."""
        return self._compute(**feeds)[0].reshape(-1, self.layer.heads, self.layer.size)

    def step(self, cache: Cache, *spans: tuple[int, int, Tokens]) -> np.ndarray:
        """The results of a pass; see `feeds`."""
        return self.run(self.feeds(cache, *spans))

    def whole(self, cache: Cache, slot: int, tokens: Tokens) -> np.ndarray:
        """The results of a sequence from position 0 in one span."""
        return self.step(cache, (slot, 0, tokens))


def expected(layer: Layer, weights: dict[str, np.ndarray], tokens: Tokens) -> np.ndarray:
    """Attention of a sequence from position 0 in float64: [tokens, heads, size]."""
    query, key, value = (part.astype(np.float64) for part in tokens)
    query = (
        rotated(layer, weights, normed(query, weights.get("q_norm"))) * layer.attributes["scale"]
    )
    key = rotated(layer, weights, normed(key, weights.get("k_norm")))
    value = normed(value, weights.get("v_norm"))
    group = layer.heads // layer.kv_heads
    scores = np.einsum("qhd,khd->hqk", query, np.repeat(key, group, axis=1))
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    places = np.arange(len(query))
    distance = places[:, None] - places
    hidden = (distance < 0) | ((distance >= layer.window) if layer.window else False)
    scores = np.where(hidden, -np.inf, scores)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weight, np.repeat(value, group, axis=1))


def normed(heads: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    if norm is None:
        return heads
    return heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + 1e-6) * norm


def rotated(layer: Layer, weights: dict[str, np.ndarray], heads: np.ndarray) -> np.ndarray:
    if not layer.rotated:
        return heads
    pairs, count = layer.rotated // 2, len(heads)
    if layer.frequencies:  # the angles are float32, as in transformers
        angles = np.arange(count, dtype=np.float32)[:, None, None] * weights["cos"]
        cos, sin = (1.25 * turn(angles.astype(np.float64)) for turn in (np.cos, np.sin))
    else:
        cos, sin = (weights[name][:count, None].astype(np.float64) for name in ("cos", "sin"))
    if layer.interleaved:
        one, two = heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    else:
        one, two = heads[..., :pairs], heads[..., pairs : 2 * pairs]
    turned = np.stack([one * cos - two * sin, two * cos + one * sin], axis=-1)
    if not layer.interleaved:
        turned = np.moveaxis(turned, -1, -2)
    flat = turned.reshape(*heads.shape[:-1], 2 * pairs)
    return np.concatenate([flat, heads[..., 2 * pairs :]], axis=-1)
