"""Layers with a recurrent state over the memory of a few slots, for tests of their operators."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.runtime.kernels import recurrences
from tests.runtime.kernels.operators import operator

SLOTS, RING = 3, 20
LAST = ("spans", "progress", "kept_inputs")

Floats = NDArray[np.float32]
Tokens = dict[str, Floats]  # of one sequence, by the operator's inputs
Span = tuple[int, int, int, int, int]  # slot, start, tokens, applied, committed


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `groups` of heads share keys."""

    name: str
    groups: int
    heads: int
    key_size: int
    value_size: int
    first: int = 5  # other layers' floats of a position, and of the states
    state_first: int = 32
    tiled: bool = False  # head j reads the keys of group j % groups

    @property
    def delta(self) -> bool:
        """Whether it is the gated delta rule."""
        return self.name == "GatedDelta"

    @property
    def inputs(self) -> dict[str, int]:
        """What the operator reads of a token: names and sizes."""
        values = self.heads * self.value_size
        sizes = {"mixed": 2 * self.groups * self.key_size + values, "gate": values}
        return sizes | dict.fromkeys("ab" if self.delta else ["dt"], self.heads)

    @property
    def row(self) -> int:
        """Floats that it keeps of a position."""
        padded = -(-self.heads // 16) * 16
        return self.groups * self.key_size + self.heads * self.value_size + padded

    @property
    def state(self) -> int:
        """Floats of a state."""
        return self.heads * self.key_size * self.value_size


def random_tokens(shape: Shape, count: int, seed: int) -> Tokens:
    """Inputs of a sequence as a network makes them."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.3 if name == "mixed" else 1, (count, size)).astype(np.float32)
        for name, size in shape.inputs.items()
    }


def random_weights(shape: Shape, seed: int = 1) -> Tokens:
    """Weights of heads that remember from one token to thousands of them."""
    rng = np.random.default_rng(seed)
    weights = {
        "decay": -np.exp(np.linspace(-7, 2.7, shape.heads)),
        "bias": rng.normal(size=shape.heads),
    }
    if shape.delta:
        weights["norm"] = rng.normal(1, 0.2, shape.value_size)
    else:
        weights["skip"] = rng.normal(size=shape.heads)
    return {name: values.astype(np.float32) for name, values in weights.items()}


@dataclass
class Layer:
    """A layer, and the memory of its slots, which nothing initializes."""

    shape: Shape
    weights: Tokens = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self.weights = self.weights or random_weights(shape)
        self.total, self.state_total = (
            shape.first + shape.row + 3,
            shape.state_first + shape.state + 16,
        )
        self.memory = np.full((SLOTS, self.state_total + RING * self.total), np.nan, np.float32)
        numbers = self.memory.ctypes.data, SLOTS, RING, self.total, self.state_total
        self.kept = np.array(numbers, np.int64)
        if shape.delta:
            self.settings: dict[str, Any] = {
                "key_heads": shape.groups,
                "epsilon": 1e-6,
                "tiled": int(shape.tiled),
            }
        else:
            self.settings = {"state_size": shape.key_size}
        attributes = self.settings | {
            "first": shape.first,
            "total": self.total,
            "state_first": shape.state_first,
            "state_total": self.state_total,
        }
        inputs = (*shape.inputs, *self.weights)
        self.whole = operator(shape.name, inputs, ["out"], self.weights, **attributes)
        self.run = operator(shape.name, (*inputs, *LAST), ["out"], self.weights, **attributes)

    def feeds(self, tokens: Sequence[Tokens], *spans: Span) -> dict[str, Any]:
        """Inputs of a pass over these spans of the slots' sequences."""
        parts = [
            {name: rows[start : start + count] for name, rows in tokens[slot].items()}
            for slot, start, count, *_ in spans
        ]
        return {
            "spans": np.array([span[:3] for span in spans], np.int64),
            "progress": np.array([span[3:] for span in spans], np.int64),
            "kept_inputs": self.kept,
            **{name: np.concatenate([part[name] for part in parts])[None] for name in parts[0]},
        }

    def step(self, tokens: Sequence[Tokens], *spans: Span) -> Floats:
        """The outputs of a pass, [tokens, heads * value_size]."""
        return self.run(**self.feeds(tokens, *spans))[0][0]

    def state(self, slot: int) -> Floats:
        """A slot's state [heads, key_size, value_size]."""
        shape = self.shape
        state = self.memory[slot, shape.state_first :][: shape.state]
        parts = state.reshape(shape.heads, shape.value_size // 16, shape.key_size, 16)
        return parts.transpose(0, 2, 1, 3).reshape(shape.heads, shape.key_size, shape.value_size)

    def settle(self, slot: int, length: int, applied: int) -> Floats:
        """The state after a slot's first tokens, by a pass over one token that does not count."""
        nothing = random_tokens(self.shape, length + 1, 0)
        self.step([nothing] * SLOTS, (slot, length, 1, applied, length))
        return self.state(slot)

    def reference(self, tokens: Tokens) -> tuple[Floats, Floats]:
        """Outputs and last state in float64."""
        compute = recurrences.gated_delta if self.shape.delta else recurrences.state_space
        return compute(**tokens, **self.weights, **self.settings)


SHAPES = {
    "GatedDelta": Shape("GatedDelta", groups=2, heads=4, key_size=32, value_size=64),
    "StateSpace": Shape("StateSpace", groups=2, heads=6, key_size=48, value_size=32),
}
TRUE_SHAPES = {
    "Qwen3.5-0.8B": Shape("GatedDelta", groups=4, heads=4, key_size=128, value_size=128),
    "Qwen3.5-4B": Shape("GatedDelta", groups=2, heads=4, key_size=128, value_size=128),
    "Qwen3.5-4B's GGUF": Shape("GatedDelta", 2, 4, key_size=128, value_size=128, tiled=True),
    "Granite-4.0-h": Shape("StateSpace", groups=1, heads=4, key_size=128, value_size=64),
    "largest": Shape("StateSpace", groups=1, heads=2, key_size=256, value_size=128),
}
