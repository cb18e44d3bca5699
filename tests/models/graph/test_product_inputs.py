"""Norms and gates become parts of the products that read them; results stay the same."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from specops.models.convert import Quantization, export_checkpoint
from specops.models.graph.nodes import attributes_of
from specops.models.graph.product_inputs import Made
from specops.models.graph.tiles import write_tiles
from specops.runtime import kernels
from specops.runtime.kernels.packing import WeightType
from specops.runtime.session import load, plain_options
from tests.checkpoints import make_checkpoint
from tests.models.graph.published_graph import write_published
from tests.models.graph.test_tiles import operators
from tests.passes import Passes, prepared

TOKENS = np.random.default_rng(5).integers(1, 320, 48).tolist()
RMS, SKIP_RMS = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"
LAYER, SKIP_LAYER = "LayerNormalization", "SkipLayerNormalization"
NORMS = (RMS, SKIP_RMS, LAYER, SKIP_LAYER)


def products(graph: Path) -> list[onnx.NodeProto]:
    nodes = onnx.load(graph, load_external_data=False).graph.node
    return [node for node in nodes if node.op_type == kernels.MATMUL]


def inputs_of(graph: Path) -> list[Made]:
    return [Made(attributes_of(node)["input"]) for node in products(graph)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_published_graph_computes_the_same_bits(
    tiny_pair: Path, tmp_path: Path, *, packed: bool
) -> None:
    """Its gate is a sigmoid and two products; queries, keys and values read the same norm."""
    ours = tiny_pair / "target" / "onnx" / "int8-128" / "model.onnx"
    theirs = write_published(ours, tmp_path / "published" / "model.onnx", packed=packed)
    found = prepared(theirs, tmp_path)
    assert not operators(found).keys() & {*NORMS, "Sigmoid", "Mul"}
    assert operators(found)[kernels.NORM] == 1  # the last one, which embeddings are made of, too
    more = [] if packed else [Made.AS_IT_IS] * 2  # read the norm that the first one gives
    layer = [Made.NORM, *more, Made.AS_IT_IS, Made.NORM, Made.SILU_GATE]
    assert inputs_of(found) == [*layer, *layer, Made.AS_IT_IS]
    expected = Passes(prepared(ours, tmp_path / "ours")).step(0, TOKENS)
    assert np.array_equal(Passes(found).step(0, TOKENS), expected)


AS_IT_IS, LAYER_NORM = Made.AS_IT_IS, Made.LAYER_NORM
OPT_LAYER = [LAYER_NORM, AS_IT_IS, LAYER_NORM, AS_IT_IS]
GPT2_LAYER = [LAYER_NORM, AS_IT_IS, LAYER_NORM, Made.GELU]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("gpt2", {}, [*GPT2_LAYER, *GPT2_LAYER, AS_IT_IS]),
        ("opt", {}, [*OPT_LAYER, *OPT_LAYER, AS_IT_IS]),
        (  # norms follow the sums: none stands before the first layer's attention
            "opt",
            {"norm_before": False, "projection": 32},
            [AS_IT_IS, AS_IT_IS, *OPT_LAYER[1:], *OPT_LAYER, LAYER_NORM, AS_IT_IS],
        ),
    ],
    ids=["gpt2", "opt", "opt with norms behind"],
)
def test_layer_norms_and_gelus_go_into_products(
    tmp_path: Path, kind: str, options: dict[str, Any], expected: list[Made]
) -> None:
    source = make_checkpoint(tmp_path / "source", kind, **options)
    logits = []
    for quant in ("fp32", "int8-32"):
        model = export_checkpoint(source, tmp_path / quant, quantization=Quantization.parse(quant))
        graph = prepared(model.graph_file, tmp_path / "prepared")
        logits.append(Passes(graph).step(0, TOKENS))
        assert not operators(graph).keys() & {*NORMS}
    assert inputs_of(graph) == expected
    assert "FastGelu" not in operators(graph)
    assert operators(graph)[kernels.NORM] == (expected[-2:] != [LAYER_NORM, AS_IT_IS])
    assert np.linalg.norm(logits[1] - logits[0]) < 0.05 * np.linalg.norm(logits[0])


# -- graphs of a few nodes -------------------------------------------------------------------------


def written(
    nodes: Sequence[onnx.NodeProto], folder: Path, outputs: Sequence[str], **more: int | list[int]
) -> list[onnx.NodeProto]:
    """Return the nodes after `write_tiles`; `more` are the sizes or values of more weights."""
    tensors = [
        numpy_helper.from_array(
            np.array(given, np.int64) if isinstance(given, list) else np.ones(given, np.float32),
            name,
        )
        for name, given in more.items()
    ]
    for node in nodes:
        if node.op_type == "MatMulNBits":
            given = attributes_of(node)
            codes = np.zeros((given["N"], given["K"] // 32, given["bits"] * 4), np.uint8)
            scales = np.ones((given["N"], given["K"] // 32), np.float32)
            for name, values in zip(node.input[1:3], (codes, scales), strict=True):
                tensors.append(numpy_helper.from_array(values, name))
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    model = helper.make_model(helper.make_graph(nodes, "few", [], declared, tensors))
    write_tiles(model, folder, "tiles", io.BytesIO())
    return list(model.graph.node)


def product(name: str, x: str, *, rows: int = 64, depth: int = 64, bits: int = 8) -> onnx.NodeProto:
    shape = {"N": rows, "K": depth, "bits": bits, "block_size": 32}
    inputs = [x, f"{name}.codes", f"{name}.scales"]
    return helper.make_node("MatMulNBits", inputs, [name], name=name, **shape)


def silu(x: str, alpha: float = 1.0) -> onnx.NodeProto:
    return helper.make_node(
        "QuickGelu", [x], ["opened"], domain="com.microsoft", alpha=alpha, name="opened"
    )


def gated(**up: int) -> list[onnx.NodeProto]:
    return [
        product("gate", "x"),
        product("up", "x", **up),
        silu("gate"),
        helper.make_node("Mul", ["opened", "up"], ["gated"], name="gated"),
        product("down", "gated"),
    ]


def test_a_gate_becomes_part_of_the_product_behind_it(tmp_path: Path) -> None:
    first, second = written(gated(), tmp_path, ["down"])
    assert attributes_of(first)["N"] == [64, 64]
    assert list(first.output) == [second.input[0]] == ["gate"]
    assert attributes_of(second)["input"] == Made.SILU_GATE
    assert attributes_of(second)["K"] == 64


def test_gate_and_up_may_have_different_types(tmp_path: Path) -> None:
    first, second = written(gated(bits=4), tmp_path, ["down"])
    assert attributes_of(first)["types"] == [WeightType.INT8, WeightType.INT4]
    assert attributes_of(second)["input"] == Made.SILU_GATE


@pytest.mark.parametrize("output", ["gate", "up"])
def test_products_that_cannot_become_one_are_put_behind_each_other(
    tmp_path: Path, output: str
) -> None:
    *_, both, last = written(gated(), tmp_path, ["down", output])
    assert (both.op_type, list(both.input)) == ("Concat", ["gate", "up"])
    assert attributes_of(last)["input"] == Made.SILU_GATE
    assert last.input[0] == both.output[0]


def test_a_part_of_a_vector_may_be_gated(tmp_path: Path) -> None:
    """As by Gemma 4's inputs of each layer."""
    nodes = [
        helper.make_node("Slice", ["y", "start", "stop", "axis"], ["up"], name="up"),
        *(node for node in gated() if node.name != "up"),
    ]
    *_, both, last = written(nodes, tmp_path, ["down"], start=[32], stop=[96], axis=[-1])
    assert (both.op_type, list(both.input)) == ("Concat", ["gate", "up"])
    assert attributes_of(last)["input"] == Made.SILU_GATE


@pytest.mark.parametrize("output", ["opened", "gated"])
def test_a_gate_with_another_reader_stays(tmp_path: Path, output: str) -> None:
    found = written(gated(), tmp_path, ["down", output])
    assert [node.op_type for node in found].count("Mul") == 1
    assert all(attributes_of(node).get("input", 0) == Made.AS_IT_IS for node in found)


def other_function() -> list[onnx.NodeProto]:
    nodes = gated()
    nodes[2] = silu("gate", alpha=1.702)
    return nodes


def more_exact() -> list[onnx.NodeProto]:
    nodes = gated()
    nodes[-1].attribute.append(helper.make_attribute("accuracy_level", 1))
    return nodes


@pytest.mark.parametrize("nodes", [gated(rows=32), other_function(), more_exact()])
def test_other_gates_stay(tmp_path: Path, nodes: list[onnx.NodeProto]) -> None:
    assert len(written(nodes, tmp_path, ["down"])) == 5


@pytest.mark.parametrize("shrink", ["Mul", "Div"])
@pytest.mark.parametrize("cap", [30.0, 1.0])
def test_a_soft_cap_becomes_our_own_node(tmp_path: Path, shrink: str, cap: float) -> None:
    x = np.random.default_rng(1).normal(0, 40, (1, 5, 37)).astype(np.float32)
    by = cap if shrink == "Div" else 1 / cap
    numbers = {"by": np.array(by, np.float32), "cap": np.array([cap], np.float32)}
    nodes = [
        helper.make_node(shrink, ["x", "by"], ["less"], name="less"),
        helper.make_node("Tanh", ["less"], ["tanh"], name="tanh"),
        helper.make_node("Mul", ["tanh", "cap"], ["y"], name="y"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy"]
    tensors = [numpy_helper.from_array(value, name) for name, value in numbers.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(kernels.DOMAIN, 1)]
    graph = helper.make_graph(nodes, "cap", values[:1], values[1:], tensors)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    write_tiles(model, tmp_path, "tiles", io.BytesIO())
    assert [node.op_type for node in model.graph.node] == [kernels.NORM]
    found = []
    for kernel in kernels.NAMES:
        kernels.force(kernel)
        found += load(model.SerializeToString(), plain_options()).run(None, {"x": x})
    np.testing.assert_allclose(found[0], cap * np.tanh(x.astype(np.float64) / cap), atol=2e-6 * cap)
    assert all(np.array_equal(one, found[0]) for one in found)


def norm(kind: str, *operands: str, total: str = "", **attributes: int) -> onnx.NodeProto:
    domain = "com.microsoft" if kind.startswith("Skip") else ""
    outputs = ["normed", "", "", total] if total else ["normed"]
    return helper.make_node(kind, operands, outputs, domain=domain, name="normed", **attributes)


def test_a_norm_becomes_part_of_the_first_product_behind_it(tmp_path: Path) -> None:
    nodes = [
        norm(SKIP_LAYER, "x", "residual", "w", "b", total="sum"),
        product("one", "normed"),
        product("two", "normed"),
    ]
    first, second = written(nodes, tmp_path, ["one", "two", "sum"], w=64, b=64)
    assert list(first.input) == ["x", "one.tiles", "", "w", "residual", "b"]
    assert list(first.output) == ["one", "sum", "normed"]
    assert attributes_of(first)["input"] == Made.LAYER_NORM
    assert attributes_of(first)["epsilon"] == pytest.approx(1e-12)
    assert list(second.input) == ["normed", "two.tiles"]


def test_a_norm_that_only_the_product_needs_is_not_written(tmp_path: Path) -> None:
    (only,) = written([norm(RMS, "x", "w"), product("a", "normed")], tmp_path, ["a"], w=64)
    assert list(only.input) == ["x", "a.tiles", "", "w"]
    assert list(only.output) == ["a"]


@pytest.mark.parametrize(
    ("given", "inputs", "kind", "epsilon"),
    [
        (norm(RMS, "x", "w"), ["x", "w"], Made.NORM, 1e-5),
        (norm("RMSNormalization", "x", "w"), ["x", "w"], Made.NORM, 1e-5),
        (norm(LAYER, "x", "w"), ["x", "w"], Made.LAYER_NORM, 1e-5),
        (norm(LAYER, "x", "w", "b"), ["x", "w", "", "b"], Made.LAYER_NORM, 1e-5),
        (norm(SKIP_RMS, "x", "r", "w", total="sum"), ["x", "w", "r"], Made.NORM, 1e-12),
        (norm(SKIP_LAYER, "x", "r", "w", "b"), ["x", "w", "r", "b"], Made.LAYER_NORM, 1e-12),
    ],
)
def test_a_norm_that_no_product_reads_is_the_kernels(
    tmp_path: Path, given: onnx.NodeProto, inputs: list[str], kind: Made, epsilon: float
) -> None:
    added = helper.make_node("Add", ["normed", "y"], ["z"], name="z")
    outputs = ["z", *given.output[3:]]
    found, last = written([given, added], tmp_path, outputs, w=64, b=64)
    assert (found.domain, found.op_type) == (kernels.DOMAIN, kernels.NORM)
    assert list(found.input) == inputs
    assert list(found.output) == ["normed", *given.output[3:]]
    assert attributes_of(found) == {"input": kind, "epsilon": pytest.approx(epsilon)}
    assert last == added


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (norm(RMS, "x", "w", axis=1), {"w": 64}),
        (norm(RMS, "x", "w"), {"w": 1}),
        (norm(RMS, "x", "computed"), {}),
        (norm(SKIP_RMS, "x", "residual", "w", "bias"), {"w": 64, "bias": 64}),
        (norm(LAYER, "x", "w", "b"), {"w": 64, "b": 1}),
        (norm(LAYER, "x", "w", "computed"), {"w": 64}),
    ],
    ids=["other axis", "one weight", "no weight", "bias", "one shift", "no shift"],
)
def test_other_norms_stay(tmp_path: Path, given: onnx.NodeProto, sizes: dict[str, int]) -> None:
    found = written([given, product("a", "normed")], tmp_path, ["a"], **sizes)
    assert [node.op_type for node in found] == [given.op_type, kernels.MATMUL]


def gelu(*operands: str) -> list[onnx.NodeProto]:
    opened = helper.make_node(
        "FastGelu", operands, ["opened"], domain="com.microsoft", name="opened"
    )
    return [opened, product("down", "opened")]


def test_a_gelu_becomes_part_of_the_product_that_reads_it(tmp_path: Path) -> None:
    (only,) = written(gelu("x"), tmp_path, ["down"])
    assert list(only.input) == ["x", "down.tiles"]
    assert attributes_of(only)["input"] == Made.GELU


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (gelu("x", "bias"), ["down"]),
        (gelu("x"), ["down", "opened"]),
        ([*gelu("x"), product("other", "opened")], ["down", "other"]),
    ],
    ids=["bias", "output", "two readers"],
)
def test_other_gelus_stay(tmp_path: Path, nodes: list[onnx.NodeProto], outputs: list[str]) -> None:
    found = written(nodes, tmp_path, outputs)
    assert found[0].op_type == "FastGelu"
    assert all(attributes_of(node)["input"] == Made.AS_IT_IS for node in found[1:])
