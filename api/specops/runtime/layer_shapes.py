"""The cache that each layer of a graph needs: a table in the graph's metadata.

`prepack` writes it. The KV cache's blocks, the states of recurrent layers and the memory plan
follow from it. A recurrent layer whose inputs are convolved has two rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

KEY = "specops.layers"
_LANES = 16  # of the kernels' vectors


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention: keys and values of all tokens, in the blocks of the cache."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention without a cache: it reads keys and values of `Attention` layer number `source`."""

    source: int


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A short convolution over the last `taps` tokens: `channels` float32 inputs per token."""

    channels: int
    taps: int

    @property
    def ring_floats_per_token(self) -> int:
        """Numbers that are kept of each of the last tokens."""
        return self.channels

    @property
    def state_floats(self) -> int:
        """Numbers of the state after all tokens."""
        return 0


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A state [value_size, key_size] per value head; keys, deltas and decays per token."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def ring_floats_per_token(self) -> int:
        """Numbers that are kept of each of the last tokens."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return keys + values + _padded(self.value_heads)

    @property
    def state_floats(self) -> int:
        """Numbers of the state after all tokens."""
        return prod((self.value_heads, self.value_size, self.key_size))


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A state [size, state_size] per head; inputs, B and decays per token."""

    heads: int
    groups: int
    size: int
    state_size: int

    @property
    def ring_floats_per_token(self) -> int:
        """Numbers that are kept of each of the last tokens."""
        return self.heads * self.size + self.groups * self.state_size + _padded(self.heads)

    @property
    def state_floats(self) -> int:
        """Numbers of the state after all tokens."""
        return prod((self.heads, self.size, self.state_size))


Recurrent = ShortConv | GatedDelta | StateSpace
LayerShape = Attention | SharedAttention | Recurrent
_KINDS: dict[str, type[LayerShape]] = {
    "attention": Attention,
    "shared_attention": SharedAttention,
    "short_conv": ShortConv,
    "gated_delta": GatedDelta,
    "state_space": StateSpace,
}


def dump(layers: Sequence[LayerShape]) -> dict[str, str]:
    """The metadata of a graph with these layers."""
    names = {kind: name for name, kind in _KINDS.items()}
    return {KEY: json.dumps([{names[type(layer)]: asdict(layer)} for layer in layers])}


def parse(metadata: Mapping[str, str]) -> list[LayerShape]:
    """The layers of a graph with these metadata.

    Raises:
        ValueError: the metadata have no such table.
    """
    try:
        rows = [entry for row in json.loads(metadata[KEY]) for entry in row.items()]
        return [_KINDS[kind](**sizes) for kind, sizes in rows]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{KEY} is missing or not a table of layers ({error!r})") from error


def _padded(count: int) -> int:
    return -(-count // _LANES) * _LANES
