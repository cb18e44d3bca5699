"""What a model family must say of itself to be exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape


class Family(ABC):
    """A kind of decoder, read from one config.json.

    The constructor raises ExportError for every setting that the family's drawing does not
    cover: a graph that computes something else than the checkpoint must not come to exist.
    """

    name: ClassVar[str]
    ignored_tensors: tuple[str, ...] = ()  # names, with `*`, that may be there and are not read
    shape: ModelShape
    graph: DecoderGraph  # that it draws
    checkpoint: Checkpoint  # that it draws from

    @abstractmethod
    def __init__(self, config: ModelConfig) -> None: ...

    @abstractmethod
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that `draw` reads, with its shape."""

    @abstractmethod
    def draw(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Draws the forward pass of `checkpoint` into `graph`, from `input_ids` to the head."""
