"""Builds the graph of an EAGLE-3 head: one decoder layer over a target's hidden states and tokens.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (2025). At each position the layer reads the embedding of the token there and a state: hidden
states of several of the target's layers at the token before, joined by `fc`, or else the state that
its own guess came from. EAGLE-3.1 has more norms: over each layer's part, and of the state that is
passed on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from specops.models.contract import FUSED, MAX_GUESSABLE, NEXT_STATES, STATES
from specops.models.convert import ExportError
from specops.models.convert.checkpoint import HEAD, Matrix
from specops.models.convert.families.family import Shapes
from specops.models.convert.families.gated_decoder import GatedDecoder
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.opset import model_of
from specops.models.convert.quantization import Quantization
from specops.models.convert.weights import WeightStore
from specops.models.eagle.checkpoint import HeadCheckpoint
from specops.models.head_folder import is_eagle, settings_of_head

_EMBEDDING, _FC = "embed_tokens.weight", "fc"
_D2T, _T2D = "d2t", "t2d"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


class Target(NamedTuple):
    """What a head must know of its target; the sizes are in tokens, values and layers."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context: int


class EagleLayer(GatedDecoder):
    """The layer of a checkpoint, for one target.

    Args:
        checkpoint: the head's; its tensors get the names that are used here.
        target: the target.

    Attributes:
        layers_read: the target's layers whose inputs it reads, in their order.
        tokens: the target's tokens that it can guess, in the order of its output rows.
        shared: which of the target's tables it uses: `embed_tokens.weight`, `lm_head.weight`.

    Raises:
        ExportError: it is another kind of head, or another target's, or tensors are missing or left
            over; the message says which.
    """

    checkpoint: HeadCheckpoint
    full_layer_every = 1  # a window is used only where `layer_types` says so

    def __init__(self, checkpoint: HeadCheckpoint, target: Target) -> None:
        self.checkpoint = checkpoint
        _rename(checkpoint)
        stored = checkpoint.tensors
        values, self.file = settings_of_head(checkpoint.config), checkpoint.config_file
        for part, flag in (("self_attn.q_proj", "attention_bias"), ("mlp.gate_proj", "mlp_bias")):
            values[flag] = f"layers.0.{part}.bias" in stored
        given = ModelConfig(values, self.file)
        name = given.first_text("architectures") or "not given"
        if not is_eagle(name, says_rows="draft_vocab_size" in given):
            raise given.error("architectures", f"is {name}; only EAGLE-3 heads can be run")
        if given.layers("num_hidden_layers") != 1:
            raise given.error("num_hidden_layers", "must be 1 in an EAGLE-3 head")
        if not given.flag("use_aux_hidden_state", True):
            raise given.error(
                "use_aux_hidden_state",
                "is false; only heads that read the inputs of the target's layers can be run",
            )
        if not given.flag("use_sliding_window", True):
            values.pop("sliding_window", None)
        vocab_size = given.integer("vocab_size")
        if vocab_size != target.vocab_size:
            raise given.error(
                "vocab_size", f"is {vocab_size}, but the target has {target.vocab_size} tokens"
            )
        rows = given.integer("draft_vocab_size", vocab_size)
        trained = given.integer("max_position_embeddings", target.context)
        values = {"original_max_position_embeddings": trained} | values
        # The target decides how long texts may be. All rows of a large vocabulary are too many.
        self._stored_rows, everything = rows, rows == vocab_size and not {_D2T, _T2D} & set(stored)
        values |= {
            "max_position_embeddings": target.context,
            "vocab_size": min(rows, MAX_GUESSABLE) if everything else rows,
        }
        super().__init__(ModelConfig(values, self.file))
        self.target, hidden = target, self.shape.hidden_size
        self.head_norms = "layers.0.self_attn.q_norm.weight" in stored
        if (width := given.integer("target_hidden_size", hidden)) != target.hidden_size:
            raise given.error(
                "target_hidden_size" if "target_hidden_size" in given else "hidden_size",
                f"is {width}, but the target's states have {target.hidden_size} values",
            )
        self.norm_before_residual = given.flag("norm_before_residual", False)
        self.norm_output = given.flag("norm_output", False)
        self.norm_before_fc = given.flag("norm_before_fc", False)
        self.fc_norm = given.flag("fc_norm", False)
        self.layers_read = self._layers(given)
        if not self.fuses and hidden != target.hidden_size:
            raise ExportError(f"{self.file}: {_FC}.weight is missing, between the two widths")
        self._tied &= _EMBEDDING in stored and HEAD not in stored
        lacking = tuple(name for name in (_EMBEDDING, HEAD) if name not in stored)
        self.shared = () if self._tied else lacking
        if self.shared and hidden != target.hidden_size:
            raise ExportError(
                f"{checkpoint.path}: {' and '.join(self.shared)} must be in the checkpoint: the "
                f"target's have {target.hidden_size} values a token, and the head's are {hidden}"
            )
        checkpoint.expect(self.tensors(), ("*rotary_emb.inv_freq", _D2T, _T2D))
        self.tokens = self._tokens(self.shape.vocab_size)

    @property
    def fuses(self) -> bool:
        """Whether states are joined and projected before the layer reads them."""
        return f"{_FC}.weight" in self.checkpoint.tensors

    @property
    def width(self) -> int:
        """Number of values of a token that the head takes from the target."""
        return len(self.layers_read) * self.target.hidden_size

    def layer(self, index: int) -> str:
        """There is one."""
        return f"layers.{index}"

    def tensors(self) -> Shapes:
        """Return the shapes of the required tensors, and of optional ones that are stored."""
        hidden, shapes = self.shape.hidden_size, self.layer_tensors(0)
        shapes["hidden_norm.weight"] = (hidden,)
        for part in self.qkv:  # they read tokens and states
            shapes[f"{part}.weight"] = shapes[f"{part}.weight"][0], 2 * hidden
        shapes = {f"layers.0.{name}": shape for name, shape in shapes.items()}
        shapes["norm.weight"] = (hidden,)
        if self.fuses:
            shapes[f"{_FC}.weight"] = hidden, self.width
            if f"{_FC}.bias" in self.checkpoint.tensors:
                shapes[f"{_FC}.bias"] = (hidden,)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.width,)
        for index in range(len(self.layers_read) if self.fc_norm else 0):
            shapes[f"fc_norm.{index}.weight"] = (self.target.hidden_size,)
        own = {_EMBEDDING: (self.target.vocab_size, hidden), HEAD: (self._stored_rows, hidden)}
        stored = self.checkpoint.tensors
        return shapes | {name: shape for name, shape in own.items() if name in stored}

    # -- the graphs ---------------------------------------------------------------------------

    def head_graph(
        self, quantization: Quantization, weights: WeightStore, tables: Mapping[str, Matrix]
    ) -> onnx.ModelProto:
        """The layer, from tokens and states to logits and the states of the next guess.

        Args:
            quantization: of its weights.
            weights: where they are written.
            tables: the target's own for `shared`.
        """
        graph = self.graph = DecoderGraph(self.shape, quantization, weights)
        rotary = graph.rotary("", self.rotaries[""])
        token, state = (
            graph.norm(f"{name}_norm", x, self.norm(f"layers.0.{stored}"), self._epsilon)
            for name, x, stored in (
                ("token", graph.embedding(self._table(_EMBEDDING, tables)), "input_layernorm"),
                ("state", STATES, "hidden_norm"),
            )
        )
        residual = state if self.norm_before_residual else STATES
        both = graph.concatenate("both", [token, state])
        attended = self.mix(0, both, rotary, self.layers[0].window)
        after = self.norm("layers.0.post_attention_layernorm")
        x, residual = graph.add_norm(
            "feed_forward_norm", attended, residual, after, epsilon=self._epsilon
        )
        x = self._feed_forward(0, x)
        x, residual = graph.add_norm(
            "final_norm", x, residual, self.norm("norm"), epsilon=self._epsilon
        )
        graph.head(x, self._table(HEAD, tables))
        size = self.shape.hidden_size
        graph.also_takes(STATES, size)
        graph.also_gives(NEXT_STATES, x if self.norm_output else residual, size)
        return graph.finish("eagle3")

    def fusion_graph(self, quantization: Quantization, weights: WeightStore) -> onnx.ModelProto:
        """What joins the states of several layers [1, n, all] to `fused` [1, n, size]."""
        graph = DecoderGraph(self.shape, quantization, weights)
        x = STATES
        if self.norm_before_fc:
            x = graph.norm("input_norm", x, self.norm("input_norm"), self._epsilon)
        if self.fc_norm:
            size = self.target.hidden_size
            parts = graph.split("parts", x, [size] * len(self.layers_read))
            normed = [
                graph.norm(f"{part}.norm", part, self.norm(f"fc_norm.{index}"), self._epsilon)
                for index, part in enumerate(parts)
            ]
            x = graph.concatenate("normed_parts", normed)
        bias = f"{_FC}.bias"
        graph.linear(
            FUSED,
            x,
            self.checkpoint.matrix(f"{_FC}.weight"),
            self.checkpoint.vector(bias) if bias in self.checkpoint.tensors else None,
        )
        return model_of(
            helper.make_graph(
                graph.nodes_for(FUSED),
                FUSED,
                [_vectors(STATES, self.width)],
                [_vectors(FUSED, self.shape.hidden_size)],
                weights.initializers,
            )
        )

    def _table(self, name: str, tables: Mapping[str, Matrix]) -> Matrix:
        if name == HEAD and self._tied:
            return self.checkpoint.matrix(_EMBEDDING).reordered([np.array(self.tokens)])
        if name in self.shared:
            return tables[name]
        matrix = self.checkpoint.matrix(name)
        if name == HEAD and len(self.tokens) < self._stored_rows:
            return matrix.divided(len(self.tokens))[0]
        return matrix

    # -- settings -----------------------------------------------------------------------------

    def _layers(self, given: ModelConfig) -> tuple[int, ...]:
        """The layers whose inputs it reads, as many as `fc` joins.

        Settings name them, in `eagle_aux_hidden_state_layer_ids`, or else the layers whose outputs
        it reads, in `target_layer_ids`. Without either they are the usual three. Some programs
        write the layers before these three into the first key; others run such heads all the same.
        """
        count, size, most = 1, self.target.hidden_size, self.target.num_layers
        if self.fuses:
            shape = self.checkpoint.tensors[f"{_FC}.weight"].shape
            columns = shape[-1] if shape else 0
            count = columns // size
            if columns % size or not count:
                raise ExportError(
                    f"{self.checkpoint.path}: {_FC}.weight reads {columns} values, but the "
                    f"target's states have {size}: it is another model's"
                )
        usual = [2, most // 2, most - 3]
        key = "target_layer_ids" if "target_layer_ids" in given else _LAYERS
        found = given.list_of(int, key) or None
        if key != _LAYERS or found == [layer - 1 for layer in usual]:
            found = [layer + 1 for layer in found or ()]
        if found is None and count == len(usual):
            found = usual
        if found is None and not self.fuses:
            raise ExportError(f"{self.file}: {_FC}.weight is missing, which joins the states")
        if found is None or len(found) != count:
            raise given.error(key, f"must name {count} of the target's layers")
        if not all(0 <= layer < most for layer in found):
            raise given.error(key, f"leads to the inputs of {found}, but there are {most} layers")
        return tuple(found)

    def _tokens(self, rows: int) -> tuple[int, ...]:
        """The target's tokens: `d2t` has the distance of each from the number of its row."""
        size, stored = self.target.vocab_size, self.checkpoint.tensors
        if _D2T in stored:
            found = self.checkpoint.integers(_D2T, rows) + np.arange(rows)
        elif _T2D in stored:
            found = np.flatnonzero(self.checkpoint.integers(_T2D, size))
        elif self._stored_rows == size:
            found = np.arange(rows)
        else:
            raise ExportError(
                f"{self.checkpoint.path}: {_D2T} is missing, for {rows} of the tokens"
            )
        different = np.unique(found)
        if len(different) != rows or different[0] < 0 or different[-1] >= size:
            raise ExportError(
                f"{self.checkpoint.path}: {_D2T} is damaged: it must name {rows} of the target's "
                f"{size} tokens, each once"
            )
        return tuple(found.tolist())


def _rename(checkpoint: HeadCheckpoint) -> None:
    """Let the layer's tensors have one spelling."""
    for name in list(checkpoint.tensors):
        plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        stored = checkpoint.tensors.pop(name)
        if plain in checkpoint.tensors:
            raise ExportError(f"{stored.file}: tensor {plain} is there twice, also as {name}")
        checkpoint.tensors[plain] = replace(stored, name=plain)


def _vectors(name: str, size: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence", size])
