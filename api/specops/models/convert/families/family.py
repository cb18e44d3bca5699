"""The interface between the export and a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape

Shapes = dict[str, tuple[int, ...]]


BY_ARCHITECTURE: dict[str, type[Family]] = {}
BY_MODEL_TYPE: dict[str, type[Family]] = {}  # for a config.json without an architecture


class Family(ABC):
    """A kind of decoder, read from one config.json.

    The constructor raises ExportError for every setting that the family does not support. The
    export must never make a graph that computes anything but the checkpoint's model.

    A subclass names the architectures and model types of config.json that it builds, separated by
    spaces: `class Llama(GatedDecoder, architectures="LlamaForCausalLM")`. The model type is by
    default the family's `name`.
    """

    name: ClassVar[str]
    has_mtp = False  # whether checkpoints may have an MTP block, see `build_mtp`
    ignored_tensors: tuple[str, ...] = ()  # patterns of tensors that may exist and are not read
    shape: ModelShape
    graph: DecoderGraph
    checkpoint: Checkpoint

    def __init_subclass__(cls, *, architectures: str = "", model_types: str = "") -> None:
        if architectures:
            BY_ARCHITECTURE.update(dict.fromkeys(architectures.split(), cls))
            BY_MODEL_TYPE.update(dict.fromkeys((model_types or cls.name).split(), cls))

    @abstractmethod
    def __init__(self, config: ModelConfig) -> None: ...

    @abstractmethod
    def tensors(self) -> Shapes:
        """The names and shapes of all tensors that `build` reads."""

    @abstractmethod
    def build(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Builds the forward pass of `checkpoint` into `graph`, from `input_ids` to the logits."""

    def mtp_tensors(self) -> Shapes:
        """The names and shapes of the MTP block's own tensors; none without one."""
        return {}

    def build_mtp(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Builds the model's MTP block into a graph of its own.

        A block for multi-token prediction guesses the token after the next one. Like every draft
        head it takes tokens and `states`, and gives logits and `next_states`.
        """
        raise NotImplementedError
