"""What the tests of attention share: a session of one node, a cache, and attention in float64."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from specops.runtime import kernels
from specops.runtime.session import share_threads
from tests.conftest import THREADS as USUAL_THREADS

THREADS = int(os.environ.get("KERNEL_TEST_THREADS", USUAL_THREADS))  # one pool for a process
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
INPUTS = [
    "query",
    "key",
    "value",
    "spans",
    "block_tables",
    "cache",
    "cos",
    "sin",
    "q_norm",
    "k_norm",
]


@dataclass(frozen=True)
class Layer:
    """The operator's attributes, and which optional inputs it has."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    rotated: int = 0
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    norm: bool = False
    packed: bool = False
    layer: int = 1
    layers: int = 3

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "layers": self.layers,
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "head_size": self.size,
            "rotary_interleaved": int(self.interleaved),
            "window": self.window,
            "scale": self.size**-0.5,
            "softcap": self.softcap,
            "epsilon": 1e-6,
        }


class Span(NamedTuple):
    """Tokens of a slot: they lie at positions `start` and on of the slot."""

    slot: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Weights:
    """What a layer has besides its tokens."""

    cos: np.ndarray | None
    sin: np.ndarray | None
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None

    @staticmethod
    def random(layer: Layer, positions: int = 512) -> Weights:
        random = np.random.default_rng(7)
        cos = sin = q_norm = k_norm = None
        if layer.rotated:
            angles = random.uniform(0, 7, (positions, layer.rotated // 2))
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        if layer.norm:
            q_norm, k_norm = random.normal(1, 0.2, (2, layer.size)).astype(np.float32)
        return Weights(cos, sin, q_norm, k_norm)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        values = {"cos": self.cos, "sin": self.sin, "q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: value for name, value in values.items() if value is not None}


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
        self, layer: Layer, dtype: str, *, slots: int = 3, max_blocks: int = 8, fill: int = 0xFF
    ) -> None:
        self.bytes = kernels.block_bytes(layer.layers, layer.kv_heads, layer.size, dtype)
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
    """One node in a session."""

    def __init__(
        self,
        layer: Layer,
        weights: Weights,
        /,
        *,
        without: str = "",
        **changed: Any,
    ) -> None:
        self.layer, self.weights = layer, weights
        there = {*INPUTS[:6], *weights.inputs} - ({"key", "value"} if layer.packed else {without})
        names = [name if name in there else "" for name in INPUTS]
        attributes = {**layer.attributes, **changed}
        node = helper.make_node(
            kernels.ATTENTION, names, ["out"], domain=kernels.DOMAIN, **attributes
        )
        self.session = session(node)

    def feeds(
        self, cache: Cache, spans: Sequence[Span], parts: Sequence[Tokens]
    ) -> dict[str, np.ndarray]:
        """The inputs of a pass; `parts` has the tokens of each span."""
        counts = (self.layer.heads, self.layer.kv_heads, self.layer.kv_heads)
        query, key, value = (
            np.concatenate(tensors).reshape(1, sum(map(len, tensors)), heads * self.layer.size)
            for tensors, heads in zip(zip(*parts, strict=True), counts, strict=True)
        )
        feeds = {"query": query, "key": key, "value": value}
        if self.layer.packed:
            feeds = {"query": np.concatenate([query, key, value], axis=-1)}
        return feeds | {
            "spans": np.array(spans, np.int64).reshape(-1, 3),
            "block_tables": cache.tables,
            "cache": cache.descriptor,
            **self.weights.inputs,
        }

    def run(self, feeds: dict[str, Any]) -> np.ndarray:
        """[T, heads, size]."""
        out = self.session.run(["out"], feeds)[0]
        return out.reshape(-1, self.layer.heads, self.layer.size)

    def whole(self, cache: Cache, slot: int, tokens: Tokens) -> np.ndarray:
        """A sequence from position 0 in one span: [tokens, heads, size]."""
        span = Span(slot, 0, len(tokens.query))
        return self.run(self.feeds(cache, [span], [tokens]))


def session(node: Any) -> ort.InferenceSession:
    """A session of that node alone; its inputs are the graph's, of any shape."""
    types = {name: INT64 if name in INPUTS[3:6] else FLOAT for name in INPUTS}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, types[name], None) for name in node.input if name],
        [helper.make_tensor_value_info("out", FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(kernels.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return opened(model)


def opened(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session with the kernels, on the threads that all of this process share."""
    share_threads(THREADS)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    kernels.register(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def expected(layer: Layer, weights: Weights, tokens: Tokens) -> np.ndarray:
    """Attention of a sequence from position 0 in float64: [tokens, heads, size]."""
    query, key, value = (part.astype(np.float64) for part in tokens)
    query = rotated(layer, weights, normed(query, weights.q_norm)) * layer.attributes["scale"]
    key = rotated(layer, weights, normed(key, weights.k_norm))
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


def rotated(layer: Layer, weights: Weights, heads: np.ndarray) -> np.ndarray:
    if weights.cos is None or weights.sin is None:
        return heads
    pairs, count = layer.rotated // 2, len(heads)
    cos, sin = weights.cos[:count, None].astype(np.float64), weights.sin[:count, None]
    if layer.interleaved:
        one, two = heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    else:
        one, two = heads[..., :pairs], heads[..., pairs : 2 * pairs]
    turned = np.stack([one * cos - two * sin, two * cos + one * sin], axis=-1)
    if not layer.interleaved:
        turned = np.moveaxis(turned, -1, -2)
    flat = turned.reshape(*heads.shape[:-1], 2 * pairs)
    return np.concatenate([flat, heads[..., 2 * pairs :]], axis=-1)
