"""What GPT-2 and OPT share: learned positions, layer norms, biases, one key per query head.

A family names its tensors in a `StoredNames` and chooses the activation; the block is drawn here,
with its norms before attention and feed-forward or after them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.families.family import Family
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.rope import HEAD_DIM_MULTIPLE

_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class StoredNames:
    """What a checkpoint calls the parts; `.weight` and `.bias` are added where a part has both.

    `layer` holds `{}` for the index, and the names after it stand below it. `qkv` is one fused
    tensor or three.
    """

    embedding: str
    positions: str
    final_norm: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]
    attention_output: str
    feed_forward_norm: str
    up: str
    down: str


class LayerNormDecoder(Family):
    """Draws a block of attention and feed-forward, each summed with what went in and normalized."""

    # What config.json calls width, layers, heads and positions.
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    names: ClassVar[StoredNames]
    conv1d = False  # whether weights are stored [inputs, outputs], as of a convolution of width 1
    first_position = 0  # the row of the position table that the first token takes
    norm_before = True  # False: a norm follows the sum, and its result goes on as the residual

    def __init__(self, config: ModelConfig, feed_forward_size: int, epsilon: float) -> None:
        """Takes what is not read from a key of the same meaning in every family."""
        width, layers, number, context = self.sizes
        hidden, heads = config.integer(width), config.integer(number)
        head_dim, rest = divmod(hidden, heads)
        if rest or head_dim % HEAD_DIM_MULTIPLE:
            raise config.error(
                width,
                f"is {hidden}; attention of {heads} heads needs a multiple of "
                f"{heads * HEAD_DIM_MULTIPLE}",
            )
        self.shape = ModelShape(
            hidden_size=hidden,
            num_layers=config.layers(layers),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            vocab_size=config.integer("vocab_size"),
            context_length=config.integer(context),
        )
        self.feed_forward_size = feed_forward_size
        self.embedding_size = hidden
        self._epsilon = epsilon
        self._tied = config.flag("tie_word_embeddings", True)
        if self._tied:  # and yet stored, in some checkpoints
            self.ignored_tensors = (*self.ignored_tensors, _HEAD)

    @abstractmethod
    def activation(self, name: str, x: str) -> str:
        """Draws what stands between the two products of the feed-forward."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Both tables, the norms, and weight and bias of every product."""
        names, hidden = self.names, self.shape.hidden_size
        table = (self.shape.vocab_size, self.embedding_size)
        shapes: dict[str, tuple[int, ...]] = {
            f"{names.embedding}.weight": table,
            f"{names.positions}.weight": (self.shape.context_length + self.first_position, hidden),
        }
        if not self._tied:
            shapes[_HEAD] = table
        if self.norm_before:
            shapes |= _norm_shapes(names.final_norm, hidden)
        for index in range(self.shape.num_layers):
            layer = names.layer.format(index)
            shapes |= _norm_shapes(f"{layer}.{names.attention_norm}", hidden)
            for part in names.qkv:
                outputs = 3 * hidden // len(names.qkv)
                shapes |= self._linear_shapes(f"{layer}.{part}", outputs, hidden)
            shapes |= self._linear_shapes(f"{layer}.{names.attention_output}", hidden, hidden)
            shapes |= _norm_shapes(f"{layer}.{names.feed_forward_norm}", hidden)
            shapes |= self._linear_shapes(f"{layer}.{names.up}", self.feed_forward_size, hidden)
            shapes |= self._linear_shapes(f"{layer}.{names.down}", hidden, self.feed_forward_size)
        return shapes

    def draw(self, graph: DecoderGraph, checkpoint: Checkpoint) -> None:
        """Each sum with the residual is fused with the norm that follows it."""
        self.graph, self.checkpoint = graph, checkpoint
        # The first stands before the first attention or after it: from there on they alternate.
        norms = iter(self._norms())
        table = self.checkpoint.matrix_rows(f"{self.names.positions}.weight", self.first_position)
        tokens, positions = self.draw_embedding(), self.graph.learned_positions(table)
        if self.norm_before:
            x, residual = self._add_norm(next(norms), tokens, positions)
        else:
            x = residual = self.graph.add("tokens_and_positions", tokens, positions)
        for index in range(self.shape.num_layers):
            x = self._attention(index, x)
            x, residual = self._add_norm(next(norms), x, residual)
            x = self._feed_forward(index, x)
            x, residual = self._add_norm(next(norms), x, residual)
        self.draw_head(x)

    def draw_embedding(self) -> str:
        """The tokens as [batch, sequence, hidden], without their positions."""
        return self.graph.embedding(self.checkpoint.matrix(f"{self.names.embedding}.weight"))

    def draw_head(self, x: str) -> None:
        """The logits from what the last norm gave."""
        stored = f"{self.names.embedding}.weight" if self._tied else _HEAD
        self.graph.head(x, self.checkpoint.matrix(stored))

    def _norms(self) -> Iterator[str]:
        """The norms' stored names in the order of the forward pass."""
        for index in range(self.shape.num_layers):
            layer = self.names.layer.format(index)
            yield f"{layer}.{self.names.attention_norm}"
            yield f"{layer}.{self.names.feed_forward_norm}"
        if self.norm_before:
            yield self.names.final_norm

    def _add_norm(self, stored: str, x: str, residual: str) -> tuple[str, str]:
        """The normalized sum, and what goes around the next part."""
        weight, bias = (self.checkpoint.vector(f"{stored}.{kind}") for kind in ("weight", "bias"))
        x, total = self.graph.add_layer_norm(
            stored, x, residual, weight, bias, epsilon=self._epsilon
        )
        return x, total if self.norm_before else x

    def _attention(self, index: int, x: str) -> str:
        name, layer = f"layers.{index}", self.names.layer.format(index)
        heads = [f"{layer}.{part}" for part in self.names.qkv]
        x = self.graph.attention(index, self._linear(f"{name}.qkv", x, *heads))
        output = f"{layer}.{self.names.attention_output}"
        return self._linear(f"{name}.attention_output", x, output)

    def _feed_forward(self, index: int, x: str) -> str:
        name, layer = f"layers.{index}", self.names.layer.format(index)
        x = self._linear(f"{name}.up", x, f"{layer}.{self.names.up}")
        x = self.activation(f"{name}.activation", x)
        return self._linear(f"{name}.down", x, f"{layer}.{self.names.down}")

    def _linear(self, name: str, x: str, *stored: str) -> str:
        """One product with stored weights, one after the other, and their biases."""
        weight = self.checkpoint.matrix(
            *(f"{part}.weight" for part in stored), transposed=self.conv1d
        )
        bias = self.checkpoint.vectors(*(f"{part}.bias" for part in stored))
        return self.graph.linear(name, x, weight, bias)

    def _linear_shapes(self, name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        weight = (inputs, outputs) if self.conv1d else (outputs, inputs)
        return {f"{name}.weight": weight, f"{name}.bias": (outputs,)}


def _norm_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
