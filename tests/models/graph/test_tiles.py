"""Weights in tiles: the kernels compute every product that they know."""

import io
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from specops.models.convert import Quantization, export_checkpoint
from specops.models.graph.nodes import attributes_of
from specops.models.graph.tiles import write_tiles
from specops.models.graph.weight_cache import used_bytes
from specops.runtime import kernels
from specops.runtime.kernels.packing import WeightType, pack
from specops.runtime.session import open_session
from tests.checkpoints import make_checkpoint, make_llama_checkpoint
from tests.models.convert.runner import Runner, embedded, is_tied
from tests.passes import Passes, prepared

TOKENS = np.random.default_rng(5).integers(1, 320, 48).tolist()


def operators(graph: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(graph, load_external_data=False).graph.node)


def foreign(graph: Path) -> list[str]:
    """Return the products that ONNX Runtime computes, as the prepared graph names them."""
    metadata = open_session(graph).get_modelmeta().custom_metadata_map
    return list(filter(None, metadata["specops.foreign_products"].split(",")))


def test_only_a_product_whose_every_scale_float16_has_gets_such_scales(tmp_path: Path) -> None:
    """There are so many columns that they are packed in two parts."""
    columns, rng = 4096 + 16, np.random.default_rng(1)
    scales = rng.standard_normal((columns, 2)).astype(np.float16).astype(np.float32)
    other = scales.copy()
    other[-1, -1] = 1 / 3
    codes = rng.integers(0, 256, (columns, 2, 16), np.uint8)
    tensors = {"codes": codes, "halves": scales, "floats": other}
    shape = {"K": 64, "N": columns, "bits": 4, "block_size": 32}
    nodes = [
        helper.make_node("MatMulNBits", ["x", "codes", kind], [kind[0]], name=kind, **shape)
        for kind in ("halves", "floats")
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    model = helper.make_model(helper.make_graph(nodes, "products", [], [], initializers))
    target = io.BytesIO()
    found, tables = write_tiles(model, tmp_path, "tiles", target)
    assert not tables
    types = [attributes_of(node)["types"] for node in model.graph.node]
    assert types == [[WeightType.INT4], [WeightType.INT4_FLOAT]]
    for tensor, stored in zip(found, (scales, other), strict=True):
        start = int(next(entry.value for entry in tensor.external_data if entry.key == "offset"))
        _, expected = pack(codes, stored, None, bits=4, block=32)
        assert target.getvalue()[start : start + tensor.dims[0]] == expected.tobytes()


@pytest.mark.parametrize(
    ("dims", "number", "message"),
    [
        ([16, 36], WeightType.Q4_0, None),
        ([16, 35], WeightType.Q4_0, "is not rows of 64 weights"),
        ([576], WeightType.Q4_0, "is not rows of 64 weights"),
        ([16, 36], WeightType.Q4_K, "no rows of 64 weights"),
        ([16, 36], WeightType.INT4, "no rows of 64 weights"),
        ([16, 36], 99, "99 is not a valid"),
    ],
)
def test_rows_of_another_size_are_refused(
    dims: list[int], number: int, message: str | None, tmp_path: Path
) -> None:
    """Anybody may have written the graph."""
    rows = numpy_helper.from_array(np.zeros(dims, np.uint8), "rows")
    own = {"domain": kernels.DOMAIN, "K": 64}
    for node in (
        helper.make_node("GgufMatMul", ["x", "rows"], ["y"], types=[number], **own),
        helper.make_node("GgufGather", ["rows", "ids"], ["y"], type=number, **own),
    ):
        model = helper.make_model(helper.make_graph([node], "one", [], [], [rows]))
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            write_tiles(model, tmp_path, "tiles", io.BytesIO())


@pytest.mark.parametrize("quant", ["int8-128", "int4-128-rtn", "int4-32-rtn"])
def test_the_kernels_compute_what_onnxruntime_does(
    tiny_pair: Path, tmp_path: Path, quant: str
) -> None:
    graph = tiny_pair / "target" / "onnx" / quant / "model.onnx"
    found = prepared(graph, tmp_path)
    layers = 2  # in each, gate and up are one
    assert operators(found)[kernels.MATMUL] == operators(graph)["MatMulNBits"] - layers == 9
    assert operators(found)["MatMulNBits"] == 0
    assert foreign(found) == []
    expected = Runner.of_graph(graph, kv_heads=2, head_dim=64, layers=2, vocab=320).step(TOKENS)
    logits = Passes(found).step(0, TOKENS)
    assert np.std(logits - expected) < 0.03 * np.std(expected)


def test_zero_points_biases_and_blocks_that_are_not_full(tmp_path: Path) -> None:
    """GPT-2 has biases, inputs that do not fill a block of 128, and its embedding as its head."""
    source = make_checkpoint(tmp_path / "source", "gpt2")
    exported = [
        export_checkpoint(source, tmp_path / name, quantization=Quantization.parse(name))
        for name in ("int4-128-rtn", "fp32")
    ]
    graphs = [prepared(model.graph_file, tmp_path) for model in exported]
    assert operators(graphs[0])["MatMulNBits"] == 0
    logits, expected = (Passes(graph).step(0, TOKENS) for graph in graphs)
    assert np.linalg.norm(logits - expected) < 0.4 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_products_that_are_put_behind_each_other_are_one(kind: str, tmp_path: Path) -> None:
    """A mix has its values in 8 bits; each part keeps its type, and its bias if there are any."""
    source = make_checkpoint(tmp_path / "source", kind)
    quantization = Quantization.parse("int4-32-mixed-rtn")
    model = export_checkpoint(source, tmp_path / "mixed", quantization=quantization)
    graph = prepared(model.graph_file, tmp_path)
    assert not operators(graph)["Concat"]
    nodes = onnx.load(graph, load_external_data=False).graph.node
    types = [attributes_of(node)["types"] for node in nodes if node.op_type == kernels.MATMUL]
    assert types.count([WeightType.INT4_ZERO, WeightType.INT8]) == 2  # layers
    expected, logits = Runner(model).step(TOKENS), Passes(graph).step(0, TOKENS)
    assert np.std(logits - expected) < 0.03 * np.std(expected)


def products_of(names: str, x: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Products of 16 columns, one for each letter, which is the name of its output."""
    tensors = {"codes": np.zeros((16, 2, 16), np.uint8), "scales": np.ones((16, 2), np.float32)}
    shape = {"K": 64, "N": 16, "bits": 4, "block_size": 32}
    nodes = [helper.make_node("MatMulNBits", [x, *tensors], [name], **shape) for name in names]
    return nodes, [numpy_helper.from_array(value, name) for name, value in tensors.items()]


@pytest.mark.parametrize(
    ("names", "parts", "kept"),
    [
        ("ab", "ab", {"y": [16, 16]}),
        ("a", "aa", {"a": [16]}),  # there twice
        (
            "abcdefghi",
            "abcdefghi",
            {name: [16] for name in "abcdefghi"},
        ),  # too many for the operator
    ],
    ids=["two", "twice", "nine"],
)
def test_parts_that_one_product_cannot_compute_stay_apart(
    names: str, parts: str, kept: dict[str, list[int]], tmp_path: Path
) -> None:
    nodes, tensors = products_of(names, "x")
    nodes.append(helper.make_node("Concat", list(parts), ["y"], axis=-1))
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph(nodes, "parts", [], [output], tensors))
    write_tiles(model, tmp_path, "tiles", io.BytesIO())
    made = [node for node in model.graph.node if node.op_type == kernels.MATMUL]
    assert {node.output[0]: attributes_of(node)["N"] for node in made} == kept
    assert ("Concat" in {node.op_type for node in model.graph.node}) == ("y" not in kept)


def test_a_gate_in_parts_keeps_all_of_them(tmp_path: Path) -> None:
    nodes, tensors = products_of("abcd", "x")
    nodes += [
        helper.make_node("Concat", ["a", "b"], ["gate"], axis=-1),
        helper.make_node("Concat", ["c", "d"], ["up"], axis=-1),
        helper.make_node("QuickGelu", ["gate"], ["opened"], domain="com.microsoft", alpha=1.0),
        helper.make_node("Mul", ["opened", "up"], ["h"]),
    ]
    ends, _ = products_of("y", "h")
    attribute = next(item for item in ends[0].attribute if item.name == "K")
    attribute.i = 32
    ends[0].input[1:] = ["narrow", "one"]
    tensors += [
        numpy_helper.from_array(np.zeros((16, 1, 16), np.uint8), "narrow"),
        numpy_helper.from_array(np.ones((16, 1), np.float32), "one"),
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([*nodes, *ends], "gate", [], [output], tensors)
    model = helper.make_model(graph)
    write_tiles(model, tmp_path, "tiles", io.BytesIO())
    made = [node for node in model.graph.node if node.op_type == kernels.MATMUL]
    columns = {node.output[0]: attributes_of(node)["N"] for node in made}
    assert columns == {"gate": [16, 16], "up": [16, 16], "y": [16]}


def test_products_with_plain_weights_are_named(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "target" / "onnx" / "fp32" / "model.onnx"
    found = prepared(graph, tmp_path)
    products = [
        node.name
        for node in onnx.load(graph, load_external_data=False).graph.node
        if node.op_type == "MatMul"
    ]
    assert foreign(found) == products
    assert len(products) == 2 * 5 + 1


def test_blocks_that_no_kernel_knows_stay_onnxruntimes(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "gpt2")
    quantization = Quantization.parse("int8-16")
    model = export_checkpoint(source, tmp_path / "onnx", quantization=quantization)
    found = prepared(model.graph_file, tmp_path)
    assert operators(found)["MatMulNBits"] == len(foreign(found)) == 2 * 4 + 1
    fp32 = export_checkpoint(source, tmp_path / "fp32", quantization=Quantization.parse("fp32"))
    expected = Passes(prepared(fp32.graph_file, tmp_path)).step(0, TOKENS)
    logits = Passes(found).step(0, TOKENS)
    assert np.linalg.norm(logits - expected) < 0.05 * np.linalg.norm(expected)


def test_tiles_start_on_pages_and_are_all_that_is_kept(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "target" / "onnx" / "int4-128-rtn" / "model.onnx"
    found = prepared(graph, tmp_path)
    model = onnx.load(found, load_external_data=False).graph
    used = used_bytes(found.parent) - found.stat().st_size
    lengths = 0
    for tensor in model.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert int(entries["offset"]) % 4096 == 0
            lengths += int(entries["length"])
            readers = {node.op_type for node in model.node if tensor.name in node.input}
            assert readers
            if int(entries["offset"]) >= used:  # tables, of which a pass reads few rows
                assert readers <= {kernels.ATTENTION, kernels.GATHER, "Gather"}
    data = found.with_name("model.onnx.data").stat().st_size
    assert lengths <= data
    assert used <= data
    # Scales and whole tiles take a little more than codes alone; nothing is there twice.
    assert data < 1.3 * graph.with_name("model.onnx.data").stat().st_size


@pytest.mark.parametrize("quant", ["int8-32", "int8-128", "int4-128-rtn"])
def test_a_tied_embedding_shares_the_heads_tiles(tmp_path: Path, quant: str) -> None:
    source = make_llama_checkpoint(tmp_path / "source", hidden=128, heads=4, kv_heads=2, tie=True)
    quantization = Quantization.parse(quant)
    model = export_checkpoint(source, tmp_path / "onnx", quantization=quantization)
    graph = prepared(model.graph_file, tmp_path)
    assert is_tied(graph)
    expected = embedded(model.graph_file, range(320))  # by ONNX Runtime's operator
    np.testing.assert_array_equal(embedded(graph, range(320)), expected)


def asking(tiny_pair: Path, folder: Path, level: int) -> tuple[Path, str]:
    """Write a graph whose first product asks for a level of accuracy; return both."""
    source = tiny_pair / "target" / "onnx" / "int4-128-rtn"
    model = onnx.load(source / "model.onnx", load_external_data=False)
    first = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    next(item for item in first.attribute if item.name == "accuracy_level").i = level
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    shutil.copy(source / "model.onnx.data", folder)
    return folder / "model.onnx", first.name


def test_a_product_that_asks_for_more_exactness_stays_onnxruntimes(
    tiny_pair: Path, tmp_path: Path
) -> None:
    graph, name = asking(tiny_pair, tmp_path / "exacting", level=1)
    assert foreign(prepared(graph, tmp_path)) == [name]
    graph, _ = asking(tiny_pair, tmp_path / "any", level=0)
    assert foreign(prepared(graph, tmp_path)) == []
