"""Writes a checkpoint as an OpenVINO model: a stateful graph with weights in NNCF's int4.

It runs in the peers' environment:
`python -m bench.peers.openvino_model CHECKPOINT MODEL_XML [TEXTS]`.
The graph has the form that optimum-intel exports and openvino-genai loads: OpenVINO's operations, a
stateful cache of keys and values with `beam_idx`, scaled dot-product attention, and logits only for
the positions in `logit_positions`.
NNCF rounds linear layers symmetrically in groups of 128 (ratio 1.0). With TEXTS, a JSON file with
lists of token ids, it uses its best settings: asymmetric in groups of 32, with AWQ and scale
estimation over these texts. Embedding and head stay at 8 bits per row, like ours.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo
from safetensors import safe_open

Node = ov.Node
Array = npt.NDArray[Any]
_HIDDEN = np.float32(-65504.0)  # the score of a masked position
_END = np.iinfo(np.int64).max


def _whole(value: int | list[int]) -> Node:
    return ops.constant(np.array(value, np.int64))


class Llama:
    """Builds the graph, layer by layer.

    Args:
        config: the checkpoint's config.json.
        read: returns a tensor of the checkpoint by name.
    """

    def __init__(self, config: dict[str, Any], read: Callable[[str], Array]) -> None:
        self._read = read
        self._layers = config["num_hidden_layers"]
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._head = config["hidden_size"] // self._heads
        self._epsilon, self._theta = config["rms_norm_eps"], config["rope_theta"]
        self._ids = ops.parameter([-1, -1], np.int64, name="input_ids")
        self._mask = ops.parameter([-1, -1], np.int64, name="attention_mask")
        self._positions = ops.parameter([-1, -1], np.int64, name="position_ids")
        self._beam = ops.parameter([-1], np.int32, name="beam_idx")
        self._logit_positions = ops.parameter([-1], np.int64, name="logit_positions")
        self._sinks: list[Node] = []

    def model(self) -> ov.Model:
        """The whole graph."""
        shape = ops.shape_of(self._ids)
        self._batch, self._width = (ops.gather(shape, _whole([axis]), _whole(0)) for axis in (0, 1))
        table = self._weights("model.embed_tokens.weight")
        hidden = ops.gather(table, ops.convert(self._ids, np.int32), _whole(0))
        visible, rotation = self._visible(), self._rotation()
        for layer in range(self._layers):
            hidden = self._layer(f"model.layers.{layer}", layer, hidden, visible, rotation)
        hidden = ops.gather(hidden, self._logit_positions, _whole(1))
        hidden = self._norm("model.norm", hidden)
        logits = ops.matmul(hidden, self._weights("lm_head.weight"), False, True)
        result = ops.result(logits, name="logits")
        result.output(0).get_tensor().set_names({"logits"})
        inputs = [self._ids, self._mask, self._positions, self._beam, self._logit_positions]
        for item in inputs:
            item.output(0).get_tensor().set_names({item.get_friendly_name()})
        return ov.Model([result], self._sinks, inputs, "llama")

    def _visible(self) -> Node:
        """[B, 1, S, T]: 0 where a token may attend, a large negative number elsewhere."""
        total = ops.gather(ops.shape_of(self._mask), _whole(1), _whole(0))
        first = ops.subtract(total, ops.squeeze(self._width, _whole(0)))
        keys = ops.range(_whole(0), total, _whole(1), "i64")
        queries = ops.range(first, total, _whole(1), "i64")
        causal = ops.less_equal(keys, ops.unsqueeze(queries, _whole(1)))
        real = ops.not_equal(ops.unsqueeze(self._mask, _whole([1, 2])), _whole(0))
        seen = ops.logical_and(causal, real)
        return ops.select(seen, ops.constant(np.float32(0)), ops.constant(_HIDDEN))

    def _rotation(self) -> tuple[Node, Node]:
        """[B, 1, S, head] cosines and sines."""
        steps = np.arange(0, self._head, 2, dtype=np.float32) / self._head
        frequencies = (1 / self._theta**steps).astype(np.float32).reshape(1, -1, 1)
        spread = ops.concat([self._batch, _whole([1, 1])], 0)
        positions = ops.convert(ops.unsqueeze(self._positions, _whole(1)), np.float32)
        wide = ops.broadcast(ops.constant(frequencies), spread, broadcast_spec="BIDIRECTIONAL")
        angles = ops.matmul(wide, positions, False, False)
        turned = ops.transpose(angles, _whole([0, 2, 1]))
        both = ops.concat([turned, turned], -1)
        return tuple(ops.unsqueeze(item, _whole(1)) for item in (ops.cos(both), ops.sin(both)))

    def _norm(self, name: str, hidden: Node) -> Node:
        squares = ops.power(hidden, ops.constant(np.float32([[[2]]])))
        mean = ops.reduce_mean(squares, _whole([-1]), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32([[[self._epsilon]]]))))
        scaled = ops.multiply(hidden, ops.divide(ops.constant(np.float32([[[1]]])), root))
        weight = self._read(f"{name}.weight").astype(np.float32).reshape(1, 1, -1)
        return ops.multiply(ops.constant(weight), scaled)

    def _linear(self, name: str, hidden: Node) -> Node:
        return ops.matmul(hidden, self._weights(f"{name}.weight"), False, True)

    def _weights(self, name: str) -> Node:
        return ops.constant(self._read(name).astype(np.float32))

    def _layer(
        self, name: str, layer: int, hidden: Node, visible: Node, rotation: tuple[Node, Node]
    ) -> Node:
        normed = self._norm(f"{name}.input_layernorm", hidden)
        attended = self._attention(f"{name}.self_attn", layer, normed, visible, rotation)
        hidden = ops.add(hidden, self._linear(f"{name}.self_attn.o_proj", attended))
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = ops.swish(self._linear(f"{name}.mlp.gate_proj", normed))
        product = ops.multiply(gate, self._linear(f"{name}.mlp.up_proj", normed))
        return ops.add(hidden, self._linear(f"{name}.mlp.down_proj", product))

    def _attention(
        self, name: str, layer: int, hidden: Node, visible: Node, rotation: tuple[Node, Node]
    ) -> Node:
        def split(part: str, heads: int) -> Node:
            flat = self._linear(f"{name}.{part}_proj", hidden)
            shaped = ops.reshape(flat, _whole([0, 0, heads, self._head]), True)
            return ops.transpose(shaped, _whole([0, 2, 1, 3]))

        queries = self._rotated(split("q", self._heads), rotation)
        keys = self._kept(layer, "key", self._rotated(split("k", self._kv_heads), rotation))
        values = self._kept(layer, "value", split("v", self._kv_heads))
        mixed = ops.scaled_dot_product_attention(queries, keys, values, visible)
        rows = ops.transpose(mixed, _whole([0, 2, 1, 3]))
        return ops.reshape(rows, _whole([0, 0, self._heads * self._head]), True)

    def _rotated(self, vectors: Node, rotation: tuple[Node, Node]) -> Node:
        cosines, sines = rotation
        half, one, axis = self._head // 2, _whole([1]), _whole([3])
        first = ops.slice(vectors, _whole([0]), _whole([half]), one, axis)
        second = ops.slice(vectors, _whole([half]), _whole([_END]), one, axis)
        negative = ops.multiply(second, ops.constant(np.float32([[[[-1]]]])))
        turned = ops.concat([negative, first], -1)
        return ops.add(ops.multiply(vectors, cosines), ops.multiply(turned, sines))

    def _kept(self, layer: int, part: str, new: Node) -> Node:
        """Append to the layer's state and repeat it for every query head."""
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, self._kv_heads, -1, self._head])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_key_values.{layer}.{part}present.{layer}.{part}"
        variable = Variable(info)
        extent = ops.concat([self._batch, _whole([self._kv_heads, 0, self._head])], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), extent)
        past = ops.gather(ops.read_value(empty, variable), self._beam, _whole(0))
        whole = ops.concat([past, new], 2)
        self._sinks.append(ops.assign(whole, variable))
        if self._heads == self._kv_heads:
            return whole
        shape = ops.shape_of(whole)
        batch, length = (ops.gather(shape, _whole([axis]), _whole(0)) for axis in (0, 2))
        copies = _whole([self._kv_heads, self._heads // self._kv_heads])
        spread = ops.concat([batch, copies, length, _whole([self._head])], 0)
        copied = ops.unsqueeze(whole, _whole(2))
        wide = ops.broadcast(copied, spread, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, _whole([0, self._heads, -1, self._head]), True)


def inputs(text: list[int]) -> dict[str, Any]:
    """The graph's inputs for a whole text."""
    positions = np.arange(len(text), dtype=np.int64)
    return {
        "input_ids": np.array([text], np.int64),
        "attention_mask": np.ones((1, len(text)), np.int64),
        "position_ids": positions[None],
        "beam_idx": np.zeros(1, np.int32),
        "logit_positions": positions,
    }


def main(checkpoint: Path, destination: Path, texts: Path | None = None) -> None:
    """Write the model's two files; see the module's docstring."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    with safe_open(checkpoint / "model.safetensors", framework="np") as tensors:
        names = set(tensors.keys())

        def read(name: str) -> Array:
            tied = name == "lm_head.weight" and name not in names
            return tensors.get_tensor("model.embed_tokens.weight" if tied else name)

        model = Llama(config, read).model()
    rounding: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 128}
    if texts is not None:
        samples = json.loads(texts.read_text(encoding="utf-8"))
        rounding = {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 32, "awq": True}
        rounding |= {"scale_estimation": True, "dataset": nncf.Dataset(samples, inputs)}
    ov.save_model(nncf.compress_weights(model, ratio=1.0, **rounding), destination)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
