"""Replaces a graph's products and look-ups by our operators, and writes their weights as tiles.

Weights come from MatMulNBits, or are a GGUF's blocks (`specops.models.convert.graph`). A tile holds
the weights of 16 columns in the order in which the kernels read them (`tiles.h`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specops.models.contract import GGUF_GATHER, GGUF_MATMUL, INT8_ACTIVATIONS
from specops.models.graph.nodes import Wiring, attributes_of, input_of, set_nodes, trimmed
from specops.models.graph.outputs import LOGITS
from specops.models.graph.product_inputs import (
    Computable,
    Made,
    own_softcaps,
    pair_gates,
    take_gelus_in,
    take_norms_in,
    take_output_gates_in,
)
from specops.models.graph.tensors import append, values_of
from specops.runtime import kernels
from specops.runtime.kernels.packing import (
    BLOCK,
    TILE,
    Bytes,
    WeightType,
    pack,
    pack_rows,
    row_bytes,
    weight_type,
)

_COLUMNS = 256 * TILE  # packed at a time
_ANY_ACTIVATIONS = 0  # accuracy_level is unset
_MAX_BLOCK = 256  # the kernels' blocks are multiples of BLOCK
_MAX_SEGMENTS = 8  # of our operator (`matmul.h`)
_OPERANDS = ("x", "codes", "scales", "zero_points", "order", "bias")
_TYPES = {
    "codes": TensorProto.UINT8,
    "scales": TensorProto.FLOAT,
    "zero_points": TensorProto.UINT8,
}

_BLOCK_GATHER = "GatherBlockQuantized"
_IDS = "input_ids"  # int64, as our operator's are
_WEIGHTS = {  # inputs
    **{GGUF_MATMUL: (1,), GGUF_GATHER: (0,)},
    **{"MatMulNBits": (1, 2, 3), _BLOCK_GATHER: (0, 2, 3)},
}

Tensors = Mapping[str, TensorProto]
Weights = tuple[Any, ...]
Written = dict[Weights, TensorProto]
"""Tiles and tables by the weights they were made of; graphs may share weights."""


class _Segment(NamedTuple):
    """A product's columns of one type; `pack` makes tiles of some of them."""

    columns: int
    type: WeightType
    pack: Callable[[slice], Bytes]

    def tiles(self) -> Iterator[Bytes]:
        """All tiles, some columns at a time."""
        return map(self.pack, _slabs(self.columns))


def write_tiles(
    model: onnx.ModelProto,
    folder: Path,
    location: str,
    target: BinaryIO,
    written: Written | None = None,
    *,
    most_logits: int | None = None,
) -> tuple[list[TensorProto], list[TensorProto]]:
    """Let the kernels compute every product that they can.

    Args:
        model: the graph; its nodes change, and weights that no node reads any more go.
        folder: where its external weights are.
        location: the name of the file `target`, for the graph.
        target: gets the tiles in the order of the nodes; each product's start on a page.
        written: tiles that other graphs have in `target`; this graph's are added.
        most_logits: largest number of logits, in whole tiles, for the first tokens.

    Returns:
        The tiles, and the tables whose rows are looked up as they are, still in `folder`.
        All are to become initializers of the graph.
    """
    graph = model.graph
    _take_biases_in(graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    written = {} if written is None else written
    found: list[TensorProto] = []
    tied: dict[Weights, onnx.NodeProto] = {}  # products that a look-up may share tiles with
    computable = partial(_computable, tensors=tensors)
    take_gelus_in(graph, computable)
    behind = _join_parts(graph, computable, tensors, folder)

    def whole(node: onnx.NodeProto) -> bool:
        return computable(node) and node.output[0] not in behind

    pairs = pair_gates(
        graph, whole, partial(_alike, tensors=tensors), partial(_width, tensors=tensors)
    )
    behind |= {name: [node] for name, node in pairs.items()}
    for node in filter(computable, graph.node):
        nodes = [node, *behind.get(node.output[0], ())]
        segments = [item for one in nodes for item in _segments(one, tensors, folder)]
        name = f"{node.name or node.output[0]}.tiles"
        weights = tuple(_weights(one, tensors) for one in nodes)
        if weights not in written:
            chunks = (tiles for segment in segments for tiles in segment.tiles())
            written[weights] = append(name, chunks, location, target)
        found.append(named(written[weights], name))
        if len(segments) == 1:
            tied[_weights(node, tensors)] = node
        node.CopyFrom(_product(node, name, segments))
    lookups = [node for node in graph.node if node.op_type in (GGUF_GATHER, _BLOCK_GATHER)]
    tables = [look_up(node, tensors, folder, tied) for node in lookups]
    take_output_gates_in(graph)
    if most_logits is not None:
        found += _fewer_logits(graph, most_logits, found)
    take_norms_in(graph)
    own_softcaps(graph)
    used = {name for node in graph.node for name in node.input}
    for name in tensors.keys() - used:
        graph.initializer.remove(tensors[name])
    found = [tensor for tensor in found if tensor.name in used]
    return found, [table for table in tables if table is not None]


def named(tensor: TensorProto, name: str) -> TensorProto:
    """Return the same weight with a name."""
    copy = TensorProto.FromString(tensor.SerializeToString())
    copy.name = name
    return copy


def _fewer_logits(
    graph: onnx.GraphProto, most: int, found: Sequence[TensorProto]
) -> list[TensorProto]:
    """Let the graph compute the logits of the first tokens only, with the first of their tiles.

    Returns:
        The tiles, the first of all tokens' tiles; none if the graph stays as it is: there are no
        more tokens, the tiles have several types, or the product has a bias.
    """
    node = next((item for item in graph.node if LOGITS in item.output), None)
    if node is None or (node.domain, node.op_type) != (kernels.DOMAIN, kernels.MATMUL):
        return []
    given = attributes_of(node)
    if len(given["N"]) > 1 or given["N"][0] <= most or given["bias"]:
        return []
    whole = next(tensor for tensor in found if tensor.name == node.input[1])
    tiles = named(whole, f"{whole.name}.first")
    length = whole.dims[0] // math.ceil(given["N"][0] / TILE) * (most // TILE)
    tiles.dims[:] = [length]
    next(entry for entry in tiles.external_data if entry.key == "length").value = str(length)
    node.input[1] = tiles.name
    next(item for item in node.attribute if item.name == "N").ints[:] = [most]
    output = next(item for item in graph.output if item.name == LOGITS)
    output.type.tensor_type.shape.dim[-1].dim_value = most
    return [tiles]


def _take_biases_in(graph: onnx.GraphProto) -> None:
    """Turn a weight that is added to a product, and to nothing else, into the product's bias."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    readers = Wiring(graph).readers
    for product in [node for node in graph.node if node.op_type == "MatMulNBits"]:
        (output,), users = product.output, readers.get(product.output[0], [])
        if len(users) != 1 or users[0].op_type != "Add" or "bias" in _operands(product):
            continue
        (bias,) = (tensors.get(name) for name in users[0].input if name != output)
        if bias is None or bias.data_type != TensorProto.FLOAT:
            continue
        if list(bias.dims) != [attributes_of(product)["N"]]:
            continue
        product.input.extend([""] * (len(_OPERANDS) - 1 - len(product.input)))
        product.input.append(bias.name)
        product.output[0] = users[0].output[0]
        graph.node.remove(users[0])


def _join_parts(
    graph: onnx.GraphProto, computable: Computable, tensors: dict[str, TensorProto], folder: Path
) -> dict[str, list[onnx.NodeProto]]:
    """Let one product compute all products whose outputs a Concat joins.

    Returns:
        Output of the product that stays → the products whose columns follow its own.
    """
    wiring, behind, gone = Wiring(graph), dict[str, list[onnx.NodeProto]](), set[str]()
    for concat in [node for node in graph.node if node.op_type == "Concat"]:
        parts = [node for name in concat.input if (node := wiring.makers.get(name))]
        biases = list(filter(None, map(_bias, parts)))
        if (
            len({part.output[0] for part in parts}) < len(concat.input)
            or attributes_of(concat)["axis"] != -1
            or not all(map(computable, parts))
            or not all(wiring.only_read_by(part.output[0], [concat]) for part in parts)
            or len({_input_and_block(part) for part in parts}) > 1
            or len(biases) not in (0, len(parts))
            or not all(name in tensors for name in biases)
            or sum(map(_matrices, parts)) > _MAX_SEGMENTS
        ):
            continue
        first, *others = parts
        if biases:
            name, values = f"{concat.output[0]}.bias", [tensors[bias] for bias in biases]
            together = np.concatenate([values_of(tensor, folder) for tensor in values])
            tensors[name] = numpy_helper.from_array(together, name)
            graph.initializer.append(tensors[name])
            first.input[list(first.input).index(biases[0])] = name
        first.output[0] = concat.output[0]
        behind[first.output[0]] = others
        gone.update(node.output[0] for node in others)
        graph.node.remove(concat)
    set_nodes(graph, [node for node in graph.node if node.output[0] not in gone])
    return behind


def _matrices(product: onnx.NodeProto) -> int:
    """Return how many matrices a product has, which are segments of ours."""
    return len(attributes_of(product).get("types", [None]))


def _input_and_block(product: onnx.NodeProto) -> tuple[Any, ...]:
    given = attributes_of(product)
    return product.input[0], given["K"], given.get("block_size", BLOCK)


def _operands(node: onnx.NodeProto) -> dict[str, str]:
    return {key: name for key, name in zip(_OPERANDS, node.input, strict=False) if name}


def _computable(node: onnx.NodeProto, tensors: Tensors) -> bool:
    """Return whether the kernels compute a node: they know its weights and are exact enough."""
    attributes, operands = attributes_of(node), _operands(node)
    if (node.domain, node.op_type) == (kernels.DOMAIN, GGUF_MATMUL):
        return True
    return (
        node.op_type == "MatMulNBits"
        and attributes.get("accuracy_level", 0) in (_ANY_ACTIVATIONS, INT8_ACTIVATIONS)
        and not attributes.get("weight_prepacked", 0)
        and attributes.get("bits", 4) in (4, 8)
        and attributes["block_size"] % BLOCK == 0
        and attributes["block_size"] <= _MAX_BLOCK
        and "order" not in operands
        and all(
            operands[key] in tensors and tensors[operands[key]].data_type == kind
            for key, kind in _TYPES.items()
            if key in operands
        )
    )


def _alike(one: onnx.NodeProto, other: onnx.NodeProto, tensors: Tensors) -> bool:
    """Return whether two products have the same input, outputs of the same size and no bias."""

    def shape(node: onnx.NodeProto) -> tuple[Any, ...]:
        return *_input_and_block(node), _width(node, tensors)

    return not _bias(one) and not _bias(other) and shape(one) == shape(other)


def _width(node: onnx.NodeProto, tensors: Tensors) -> int:
    """Return how many numbers a product or a Slice of vectors gives; 0 for other nodes."""
    if node.op_type == "Slice" and {*node.input[1:]} <= tensors.keys():
        start, stop, *_ = (numpy_helper.to_array(tensors[name]) for name in node.input[1:])
        return int((stop - start)[-1])
    if node.op_type == GGUF_MATMUL:
        given = attributes_of(node)
        return sum(
            len(given.get(f"order_{at}", ())) or tensors[node.input[1 + at]].dims[0]
            for at in range(len(given["types"]))
        )
    return int(attributes_of(node)["N"]) if node.op_type == "MatMulNBits" else 0


def _bias(node: onnx.NodeProto) -> str:
    """Return the name of a product's bias; empty if it has none."""
    types = attributes_of(node).get("types")  # of a GGUF's rows
    return input_of(node, _OPERANDS.index("bias") if types is None else 1 + len(types))


def _segments(node: onnx.NodeProto, tensors: Tensors, folder: Path) -> list[_Segment]:
    """Return the weights of a product.

    Raises:
        ValueError: weights have another size than the product says.
    """
    given = attributes_of(node)
    depth, found = given["K"], []
    if node.op_type == GGUF_MATMUL:
        for at, (name, number) in enumerate(zip(node.input[1:], given["types"], strict=False)):
            raw, kind = _rows(tensors[name], number, depth, folder), WeightType(number)
            order = np.array(given[f"order_{at}"]) if f"order_{at}" in given else None
            count = len(raw) if order is None else len(order)
            found.append(_Segment(count, kind, partial(_packed_rows, raw, kind, depth, order)))
        return found
    columns, bits, block = given["N"], given.get("bits", 4), given["block_size"]
    arrays: dict[str, NDArray[Any]] = {
        key: values_of(tensors[name], folder).reshape(columns, -1)
        for key, name in _operands(node).items()
        if key in _TYPES
    }
    codes = arrays["codes"].reshape(columns, math.ceil(depth / block), -1)
    scales, points = arrays["scales"], arrays.get("zero_points")

    def factors(part: slice) -> tuple[NDArray[np.float32], Bytes | None]:
        return scales[part], None if points is None else points[part]

    # With float32 scales a type has a higher number.
    kind = max(weight_type(*factors(part), bits) for part in _slabs(columns))

    def packed(part: slice) -> Bytes:
        return pack(codes[part], *factors(part), bits=bits, block=block, type=kind)[1]

    return [_Segment(columns, kind, packed)]


def _slabs(columns: int) -> Iterator[slice]:
    return (slice(start, start + _COLUMNS) for start in range(0, columns, _COLUMNS))


def _rows(tensor: TensorProto, number: int, depth: int, folder: Path) -> Bytes:
    """Return a GGUF's rows, [N, bytes of a row]; ValueError if their size is another one."""
    raw: Bytes = values_of(tensor, folder)
    if raw.dtype != np.uint8 or raw.shape[1:] != (row_bytes(WeightType(number), depth),):
        raise ValueError(f"{tensor.name} is not rows of {depth} weights of type {number}")
    return raw


def _packed_rows(
    raw: Bytes, kind: WeightType, depth: int, order: NDArray[np.int64] | None, part: slice
) -> Bytes:
    return pack_rows(raw[part if order is None else order[part]], kind, depth)


def _product(node: onnx.NodeProto, tiles: str, segments: list[_Segment]) -> onnx.NodeProto:
    """Return the same product, computed by the kernels."""
    given, bias = attributes_of(node), _bias(node)
    return helper.make_node(
        kernels.MATMUL,
        trimmed(node.input[0], tiles, bias),
        list(node.output),
        name=node.name or node.output[0],
        domain=kernels.DOMAIN,
        N=[segment.columns for segment in segments],
        K=given["K"],
        types=[int(segment.type) for segment in segments],
        block_size=given.get("block_size", BLOCK),
        bias=int(bool(bias)),
        input=given.get("input", int(Made.AS_IT_IS)),
        epsilon=0.0,
    )


def look_up(
    node: onnx.NodeProto, tensors: Tensors, folder: Path, tied: Mapping[Weights, onnx.NodeProto]
) -> TensorProto | None:
    """Let our operator look up rows of a GGUF, or of a product's weights.

    Args:
        node: the look-up, which becomes our operator if it is one of these.
        tensors: the graph's weights.
        folder: where they are.
        tied: our products by their weights.

    Returns:
        The table that the operator reads; None if there is none besides the product's tiles.
    """
    product, given, name = tied.get(_weights(node, tensors)), attributes_of(node), node.output[0]
    table = None
    if product is not None and node.input[1] == _IDS:
        source, shape = product.input[1], attributes_of(product)
        (rows,), (kind,), depth, block = (shape[key] for key in ("N", "types", "K", "block_size"))
    elif node.op_type == GGUF_GATHER:
        source, kind, depth, block = f"{name}.table", given["type"], given["K"], BLOCK
        table = TensorProto.FromString(tensors[node.input[0]].SerializeToString())
        table.name = source
        rows = len(_rows(table, kind, depth, folder))
    else:
        return None
    made = helper.make_node(
        kernels.GATHER,
        [node.input[1], source],
        [name],
        name=node.name or name,
        domain=kernels.DOMAIN,
        N=rows,
        K=depth,
        type=kind,
        block_size=block,
        tiled=int(table is None),
    )
    node.CopyFrom(made)
    return table


def _weights(node: onnx.NodeProto, tensors: Tensors) -> Weights:
    """Return a key that is equal for a product and a look-up with the same weights."""
    given, found = attributes_of(node), []
    for name in (input_of(node, place) for place in _WEIGHTS[node.op_type]):
        entries = tensors[name].external_data if name in tensors else ()
        found.append(tuple((entry.key, entry.value) for entry in entries) or name)
    types = given.get("types", [given.get("type")])
    orders = (tuple(order) for key, order in given.items() if key.startswith("order_"))
    return *found, *types, given.get("bits"), given.get("block_size"), *orders
