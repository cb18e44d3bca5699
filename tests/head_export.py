"""Writes a head of the bundled one's format as a graph for the engine, with weights in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.parser
from onnx import numpy_helper

from specops.models.contract import INT8_ACTIVATIONS
from specops.models.convert.opset import model_of
from specops.models.convert.quantize import quantize_blockwise
from specops.models.head_folder import HEAD_GRAPH, HeadFolder
from specops.runtime.sampling import Floats

_BITS, _BLOCK = 8, 64
_EPSILON = 1e-5  # of the norms
# The whole head. The rows of the table are decoded from their codes, which are padded to
# whole blocks. QuickGelu with alpha = 1 is SiLU.
_GRAPH = """
draft_head (int64[rows] codes, float[rows, {size}] states)
    => (float[rows, {table}] logits, float[rows, {size}] next_states)
    <float middle = {{{middle}}}, int64[2] width = {{0, -1}}, int64[1] first = {{0}},
     int64[1] last = {{-1}}, int64[1] within = {{{size}}}>
{{
    row_scales = Gather <axis = 0> (table_scales, codes)
    row_factors = Unsqueeze (row_scales, last)
    row_codes = Gather <axis = 0> (table_codes, codes)
    row_numbers = Cast <to = 1> (row_codes)
    row_centred = Sub (row_numbers, middle)
    row_blocks = Mul (row_centred, row_factors)
    row_whole = Reshape (row_blocks, width)
    row_values = Slice (row_whole, first, within, last)
    token = {norm} (row_values, token_norm_weight)
    state = {norm} (states, state_norm_weight)
    both = Concat <axis = -1> (token, state)
    x = {mix} (both, mix_codes, mix_scales)
    inner = {norm} (x, inner_norm_weight)
    gated = {gate} (inner, gate_codes, gate_scales)
    up = {up} (inner, up_codes, up_scales)
    act = com.microsoft.QuickGelu <alpha = 1.0> (gated)
    product = Mul (act, up)
    down = {down} (product, down_codes, down_scales)
    sum = Add (x, down)
    next_states = {norm} (sum, last_norm_weight)
    logits = {table_product} (next_states, table_codes, table_scales)
}}
"""


def write_head(head: HeadFolder, weights: Mapping[str, Floats]) -> None:
    """Write graph and manifest.

    Args:
        head: the manifest; its folder exists.
        weights: of its layers as `NAME.weight`, and its table as `table`.
    """
    products, initializers = {}, []
    for name, values in weights.items():
        base = name.removesuffix(".weight")
        if values.ndim == 1:
            initializers.append(numpy_helper.from_array(values, f"{base}_weight"))
            continue
        quantized = quantize_blockwise(values, _BITS, _BLOCK)
        initializers.append(numpy_helper.from_array(quantized.packed, f"{base}_codes"))
        initializers.append(numpy_helper.from_array(quantized.scales, f"{base}_scales"))
        columns, depth = values.shape
        products[base] = (
            f"com.microsoft.MatMulNBits <K = {depth}, N = {columns}, bits = {_BITS}, "
            f"block_size = {_BLOCK}, accuracy_level = {INT8_ACTIVATIONS}>"
        )
    text = _GRAPH.format(
        size=head.hidden_size,
        table=len(head.tokens) + 1,
        middle=float(1 << (_BITS - 1)),
        norm=f"SimplifiedLayerNormalization <axis = -1, epsilon = {_EPSILON}>",
        table_product=products.pop("table"),
        **products,
    )
    graph = onnx.parser.parse_graph(text)
    for node in graph.node:
        node.name = node.output[0]
    graph.initializer.extend(initializers)
    onnx.save(model_of(graph), head.path / HEAD_GRAPH)
    head.write()
