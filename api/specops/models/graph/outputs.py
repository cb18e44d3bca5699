"""Sets a rewritten graph's outputs: logits and last hidden states of the tokens that need them.

After the last attention no token depends on other tokens. So the graph continues there only with
the tokens whose logits are wanted.
"""

from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from specops.models.contract import GGUF_MATMUL, NEXT_STATES, STATES
from specops.models.graph.nodes import RefusedGraphError, Wiring, attributes_of, mixers, set_nodes

LOGIT_SPANS = "logit_spans"  # of graphs in which the last layers keep nothing
LOGITS, LOGIT_ROWS, STATE_ROWS = "logits", "logit_rows", "state_rows"
FINAL_ROWS = "final_rows"  # of a target with an MTP block
SCORED_ROWS = "scored_rows"  # of graphs that give hidden states: places in `logit_rows`
CONTROL: dict[str, list[str | int]] = {
    "spans": ["spans", 3],
    "block_tables": ["slots", "blocks"],
    "cache": [4],
}
# Of graphs with layers without attention; the second one only if those layers have states.
RECURRENCE: dict[str, list[str | int]] = {"kept_inputs": [5], "progress": ["spans", 2]}
_HIDDEN = "hidden"
_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", GGUF_MATMUL)
_NORMS = ("SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization")
_SKIP_NORMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
_SUM = 3  # the output with the sum, of the two Skip operators


def keep_what_gives_logits(graph: onnx.GraphProto) -> None:
    """Remove every node and weight that the logits do not depend on."""
    if LOGITS not in {item.name for item in graph.output}:
        raise RefusedGraphError("it has no output logits")
    needed, kept = {LOGITS, NEXT_STATES}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(filter(None, node.input))
            kept.append(node)
    set_nodes(graph, reversed(kept))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in needed]:
        graph.initializer.remove(tensor)


def gather_logit_rows(
    graph: onnx.GraphProto, taken: str = LOGIT_ROWS, reading: Collection[str] = ()
) -> None:
    """After the last layer that keeps something, take the rows `taken` of every tensor before it.

    Args:
        graph: a rewritten graph.
        taken: an input with places of tokens.
        reading: outputs of the attention that reads what other layers keep: after the cut it goes
            over the spans of these rows alone.
    """
    constants = {*CONTROL, *(tensor.name for tensor in graph.initializer)}
    last = [node for node in mixers(graph.node) if node.output[0] not in reading][-1]
    behind = _descendants(graph, last)
    wiring = Wiring(graph)
    for node in reversed(graph.node):  # of a vector's parts the vector: its rows are taken once
        readers = wiring.readers.get(node.output[0], [])
        if node.op_type == "Slice" and all(behind.intersection(item.output) for item in readers):
            behind.update(node.output)
    gathered: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if behind.intersection(node.output):
            for place, name in enumerate(node.input):
                if not name or name in constants or name in behind:
                    continue
                rows = f"{name}.at_{taken}"
                if name not in gathered:
                    gathered.add(name)
                    nodes.append(
                        helper.make_node("Gather", [name, taken], [rows], name=rows, axis=1)
                    )
                node.input[place] = rows
            if node.output[0] in reading:
                node.input[list(node.input).index("spans")] = LOGIT_SPANS
        nodes.append(node)
    set_nodes(graph, nodes)


def _descendants(graph: onnx.GraphProto, start: onnx.NodeProto) -> set[str]:
    """Return the tensors that depend on a node's outputs, without these outputs."""
    reached = set(start.output)
    for node in graph.node:
        if reached.intersection(node.input):
            reached.update(filter(None, node.output))
    return reached - set(start.output)


def declare(graph: onnx.GraphProto) -> None:
    """Declare inputs and outputs as the engine binds them; old notes on shapes go."""
    read = {name for node in graph.node for name in node.input}
    logits = next(item for item in graph.output if item.name == LOGITS)
    dims = logits.type.tensor_type.shape.dim
    if logits.type.tensor_type.elem_type != TensorProto.FLOAT or not (dims and dims[-1].dim_value):
        raise RefusedGraphError("its logits are not float32 over a vocabulary of a fixed size")
    vocabulary = dims[-1].dim_value
    shapes: dict[str, list[str | int]] = {
        **{name: [1, "tokens"] for name in ("input_ids", "position_ids") if name in read},
        **CONTROL,
        LOGIT_ROWS: ["logit_rows"],
    }
    shapes |= {name: shape for name, shape in RECURRENCE.items() if name in read}
    for rows in (STATE_ROWS, FINAL_ROWS):
        if rows in read:
            shapes[rows] = [rows]
    if LOGIT_SPANS in read:
        shapes[LOGIT_SPANS] = CONTROL["spans"]
    given = [item for item in graph.input if item.name == STATES]  # of a draft head
    follows = [item for item in graph.output if item.name == NEXT_STATES]
    states = [item for item in graph.output if item.name == STATES]
    del graph.input[:], graph.output[:], graph.value_info[:]
    for name, shape in shapes.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
    _add_output(graph, LOGITS, vocabulary)
    _output_hidden_states(graph)
    for item in given:
        dims = [1, "tokens", item.type.tensor_type.shape.dim[-1].dim_value]
        graph.input.append(helper.make_tensor_value_info(STATES, TensorProto.FLOAT, dims))
        _add_output(graph, NEXT_STATES, follows[0].type.tensor_type.shape.dim[-1].dim_value)
    graph.output.extend(states)


def output_states(graph: onnx.GraphProto, layers: Sequence[int]) -> None:
    """Add an output `states`: the inputs of these layers, side by side, of the rows `state_rows`.

    A layer's input is the sum of the embedding and of all parts before it, before the layer's own
    norm. This runs before `gather_logit_rows`: tokens without logits have states, too.

    Raises:
        RefusedGraphError: there is no such layer, or its input cannot be found.
    """
    makers = {name: node for node in graph.node for name in node.output}
    weights, found = _weights(graph), mixers(graph.node)
    width, rows, nodes = 0, list[str](), list[onnx.NodeProto]()
    for layer in layers:
        if not 0 <= layer < len(found):
            raise RefusedGraphError(
                f"a draft head reads what enters layer {layer}, and there are {len(found)}"
            )
        product = makers.get(found[layer].input[0])
        while product is not None and not _has_weights(product, weights):
            product = makers.get(product.input[0])
        if product is None:
            raise RefusedGraphError(f"what enters layer {layer}, for a draft head, is not found")
        name, norm = product.input[0], makers.get(product.input[0])
        readers = (node for node in graph.node if name in node.input)
        if norm is None or not all(_has_weights(node, weights) for node in readers):
            pass  # it is added to a later sum, too: the layer has no norm before
        elif norm.op_type in _SKIP_NORMS:
            norm.output.extend([""] * (_SUM + 1 - len(norm.output)))
            norm.output[_SUM] = name = norm.output[_SUM] or f"{norm.output[0]}.residual"
        elif norm.op_type in _NORMS:
            name = norm.input[0]
        width += _input_size(product, weights)[1]
        taken = f"{name}.at_state_rows"
        if taken not in rows:  # of few layers, two of the usual three are the same
            nodes.append(helper.make_node("Gather", [name, STATE_ROWS], [taken], taken, axis=1))
        rows.append(taken)
    nodes.append(helper.make_node("Concat", rows, [STATES], STATES, axis=-1))
    graph.node.extend(nodes)
    shape = [1, STATE_ROWS, width]
    graph.output.append(helper.make_tensor_value_info(STATES, TensorProto.FLOAT, shape))


def output_final_states(graph: onnx.GraphProto) -> None:
    """Add an output `states`: the input of the output rows, of the rows `final_rows`.

    An MTP block reads this: the last state, after the final norm. Logits are computed for some of
    these rows: `logit_rows` are places in `final_rows`.

    Raises:
        RefusedGraphError: the logits are not a product with weights.
    """
    gather_logit_rows(graph, FINAL_ROWS)
    product = output_product(graph)
    if product is None:
        raise RefusedGraphError("its logits are not a product with weights, which an MTP block has")
    (name, size), chosen = (product.input[0], _input_size(product, _weights(graph))[1]), "final"
    _rename(graph, name, STATES)
    product.input[0] = chosen
    gather = helper.make_node("Gather", [STATES, LOGIT_ROWS], [chosen], name=chosen, axis=1)
    graph.node.insert(list(graph.node).index(product), gather)
    shape = [1, FINAL_ROWS, size]
    graph.output.append(helper.make_tensor_value_info(STATES, TensorProto.FLOAT, shape))


def output_product(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """Return the product with weights that the logits come from; None if there is no such node.

    Between it and the logits there may be steps of one input each: a bias, a factor, a soft cap.
    """
    weights = _weights(graph)
    makers = {name: node for node in graph.node for name in node.output}
    node = makers.get(LOGITS)
    while node is not None and not _has_weights(node, weights):
        before = [name for name in node.input if name and name not in weights]
        node = makers.get(before[0]) if len(before) == 1 else None
    return node


def _output_hidden_states(graph: onnx.GraphProto) -> None:
    """Make the input of the last product an output, if the product's weights tell its size."""
    product = output_product(graph)
    if product is None:
        return
    kind, size = _input_size(product, _weights(graph))
    if kind != TensorProto.FLOAT:
        return
    _rename(graph, product.input[0], _HIDDEN)
    _add_output(graph, _HIDDEN, size)
    # Whoever wants the state alone, for an embedding, needs no product with the vocabulary.
    scored = f"{_HIDDEN}.at_{SCORED_ROWS}"
    gather = helper.make_node("Gather", [_HIDDEN, SCORED_ROWS], [scored], name=scored, axis=1)
    graph.node.insert(list(graph.node).index(product), gather)
    product.input[0] = scored
    rows = helper.make_tensor_value_info(SCORED_ROWS, TensorProto.INT64, [SCORED_ROWS])
    graph.input.append(rows)
    logits = next(item for item in graph.output if item.name == LOGITS)
    logits.type.tensor_type.shape.dim[1].dim_param = SCORED_ROWS


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Give a tensor another name in all nodes."""
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new


def _weights(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in graph.initializer}


def _has_weights(node: onnx.NodeProto, weights: Mapping[str, TensorProto]) -> bool:
    return node.op_type in _PRODUCTS and node.input[1] in weights


def _input_size(product: onnx.NodeProto, weights: Mapping[str, TensorProto]) -> tuple[int, int]:
    """Return the type and the number of values of a token that a product reads."""
    if product.op_type == GGUF_MATMUL:
        return TensorProto.FLOAT, attributes_of(product)["K"]
    if product.op_type == "MatMulNBits":
        return weights[product.input[2]].data_type, attributes_of(product)["K"]
    weight = weights[product.input[1]]
    return weight.data_type, weight.dims[attributes_of(product).get("transB", 0)]


def _add_output(graph: onnx.GraphProto, name: str, size: int) -> None:
    shape = [1, LOGIT_ROWS, size]
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
