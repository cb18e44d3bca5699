"""What families with recurrent layers share, whose state has a fixed size, or with convolutions."""

from abc import abstractmethod

import numpy as np

from specops.models.convert.families.family import Config, Shapes
from specops.models.convert.families.gated_decoder import FULL, Float, GatedDecoder, layer_kinds
from specops.models.convert.gguf.header import GgufTensors, Metadata
from specops.models.convert.model_config import ModelConfig

LINEAR = "linear_attention"
# The kernels' vectors, and their limits.
CHANNELS_MULTIPLE, VALUES_MULTIPLE = 16, 32
_MAX_TAPS, _MAX_HEAD = 8, 256
_MAX_HEADS, _MAX_STATE = 1024, 1 << 15


class Hybrid(GatedDecoder):
    """Some layers have attention, the others a recurrence or a convolution in its place."""

    other = LINEAR  # the kind of the other layers
    kernel_size = ("", 4)  # of their convolution: the key and its default

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        key, usual = self.kernel_size
        self._kernel_size = self.config.integer(key, usual)
        if self._kernel_size > _MAX_TAPS:
            raise self.config.error(key, f"must be 1 to {_MAX_TAPS}")
        listed = layer_kinds(self.config, self.shape.num_layers, self.other)
        self._kinds = listed or self.usual_kinds()
        if FULL not in self._kinds:
            problem = "has no layer with attention, and the engine needs one"
            raise self.config.error("layer_types", problem)

    @classmethod
    def gguf_settings(cls, metadata: Metadata, tensors: GgufTensors, config: Config) -> Config:
        """The kinds of layers: those without heads of keys have no attention."""
        heads = metadata.per_layer("{arch}.attention.head_count_kv")
        kinds = [FULL if count else cls.other for count in heads]
        return super().gguf_settings(metadata, tensors, config) | {"layer_types": kinds}

    @abstractmethod
    def usual_kinds(self) -> list[str]:
        """The kinds of layers where config.json has no list of them."""

    @abstractmethod
    def other_tensors(self) -> Shapes:
        """What the other layers have in the place of attention, by the names in a layer."""

    @abstractmethod
    def mix_otherwise(self, index: int, x: str) -> str:
        """What they compute there."""

    def layer_tensors(self, index: int) -> Shapes:
        """The tensors of a layer of either kind."""
        layer = super().layer_tensors(index)
        if self._is_full(index):
            return layer
        layer = {part: shape for part, shape in layer.items() if not part.startswith("self_attn")}
        return layer | self.other_tensors()

    def mix(self, index: int, x: str, rotary: tuple[str, str] | None, window: int | None) -> str:
        """Attention, or its replacement."""
        if self._is_full(index):
            return super().mix(index, x, rotary, window)
        return self.mix_otherwise(index, x)

    def convolution(self, index: int, part: str, x: str, bias: Float | None = None) -> str:
        """The short convolution with the stored weight [channels, 1, kernel_size] of a `part`.

        Args:
            index: number of the layer, from 0.
            part: the weight's stored name within the layer.
            x: name of its input [batch, sequence, channels].
            bias: [channels] to add; None: nothing.
        """
        weight = self.checkpoint.vector(f"{self.layer(index)}.{part}.weight")
        name = f"layers.{index}.convolution"
        return self.graph.short_convolution(name, x, weight.reshape(-1, self._kernel_size), bias)

    def decay(self, index: int, part: str) -> Float:
        """The decay of a layer's states, from the checkpoint's logarithms."""
        logarithms = self.checkpoint.vector(f"{self.layer(index)}.{part}.A_log")
        return -np.exp(logarithms.astype(np.float64)).astype(np.float32)

    def check_size(self, key: str, size: int, multiple: int) -> None:
        """Raises ExportError for a size that the kernels do not have.

        Args:
            key: that gives the size.
            size: numbers in a vector.
            multiple: a number that must divide it.
        """
        if size % multiple or size > _MAX_HEAD:
            problem = f"must be a multiple of {multiple}, up to {_MAX_HEAD}"
            raise self.config.error(key, problem)

    def check_state(self, heads: tuple[str, int], size: tuple[str, int]) -> None:
        """Raises ExportError for too many heads, or too many numbers of each one's state.

        Each is a key, for the message, and the number.
        """
        (heads_key, count), (key, numbers) = heads, size
        if count > _MAX_HEADS:
            raise self.config.error(heads_key, f"must be at most {_MAX_HEADS}")
        if numbers > _MAX_STATE:
            problem = f"makes a head's state {numbers} numbers; at most {_MAX_STATE}"
            raise self.config.error(key, f"{problem} are supported")

    def _is_full(self, index: int) -> bool:
        """Whether a layer has attention; the one after the last, an MTP block's, has."""
        return index >= len(self._kinds) or self._kinds[index] == FULL
