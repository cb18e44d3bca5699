"""What each layer of a graph keeps of a request's tokens: one table, in the graph's own metadata.

`prepack` writes it. The KV cache's blocks, the kept inputs of layers without attention and the
memory plan follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

KEY = "specops.layers"


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of all tokens, in the cache's blocks."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class ShortConv:
    """The convolution's inputs of the last tokens, in float32: `channels` of each, of `taps`."""

    channels: int
    taps: int


LayerShape = Attention | ShortConv
_KINDS: dict[str, type[LayerShape]] = {"attention": Attention, "short_conv": ShortConv}


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
        raise ValueError(f"{KEY} is missing or no table of layers ({error!r})") from error
