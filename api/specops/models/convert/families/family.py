"""The interface between the export and a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape

Config = dict[str, Any]  # a config.json
Shapes = dict[str, tuple[int, ...]]


BY_ARCHITECTURE: dict[str, type[Family]] = {}
BY_MODEL_TYPE: dict[str, type[Family]] = {}  # for a config.json without an architecture
BY_GGUF: dict[str, list[type[Family]]] = {}
"""By llama.cpp's architectures; where there are two, the second reads files with a window."""


class Family(ABC):
    """A kind of decoder, read from one config.json.

    The constructor raises ExportError for every setting that the family does not support. The
    export must never make a graph that computes anything but the checkpoint's model.

    A subclass names the architectures and model types of config.json that it builds, and
    llama.cpp's architectures, separated by spaces:
    `class Llama(GatedDecoder, architectures="LlamaForCausalLM", gguf="llama")`. The model type is
    by default the family's `name`.

    For a GGUF a config.json is made from its metadata; keys of metadata begin with `{arch}`.

    Attributes:
        has_mtp: whether checkpoints may have an MTP block, see `build_mtp`.
        interleaved: whether pairs of neighbours are rotated, not the halves of a head.
        query_parts: 2 if each head of queries has as many rows again, which are no queries.
        offset_norms: whether checkpoints store the weights of norms minus 1; a GGUF does not.
        gguf_interleaved: whether only a GGUF interleaves the two halves of each head in q and k.
        gguf_integers: keys of metadata by the keys of config.json that have the same integers.
        gguf_numbers: the same for numbers that are absent or 0 where they have no effect.
        gguf_keys: other keys of metadata that `gguf_settings` reads, and most families cannot have.
        ignored_tensors: patterns of tensors that may exist and are not read.
    """

    name: ClassVar[str]
    architecture: ClassVar[str]  # the first one
    query_parts = 1
    has_mtp = interleaved = offset_norms = gguf_interleaved = False
    gguf_integers: ClassVar[Mapping[str, str]] = {}
    gguf_numbers: ClassVar[Mapping[str, str]] = {}
    gguf_keys: ClassVar[Collection[str]] = ()
    ignored_tensors: tuple[str, ...] = ()
    shape: ModelShape
    graph: DecoderGraph
    checkpoint: Checkpoint

    def __init_subclass__(
        cls, *, architectures: str = "", model_types: str = "", gguf: str = ""
    ) -> None:
        if architectures:
            cls.architecture, *_ = names = architectures.split()
            BY_ARCHITECTURE.update(dict.fromkeys(names, cls))
            BY_MODEL_TYPE.update(dict.fromkeys((model_types or cls.name).split(), cls))
        for name in gguf.split():
            BY_GGUF.setdefault(name, []).append(cls)

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
        """Builds the model's MTP block as a separate graph.

        A block for multi-token prediction guesses the token after the next one. Like every draft
        head it takes tokens and `states`, and gives logits and `next_states`.
        """
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def gguf_tensors(cls) -> Mapping[str, str]:
        """The names of a checkpoint's tensors by those in a GGUF, without `.weight` and `.bias`.

        `blk` is what the names of layers begin with. Names in a layer have `blk.` in front, and
        stand for what follows the layer's number. Names with a kind or without any are whole.
        """

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """What a GGUF adds to the `config` that has been made so far.

        Raises ExportError for a setting that the family does not support.

        Args:
            metadata: of the GGUF.
            tensors: shape and type of each tensor.
            config: what other families' settings gave; not changed.
        """
        del metadata, tensors, config
        return {}
