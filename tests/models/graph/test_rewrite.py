"""Graphs of several origins become the engine's; an unknown part is refused by name."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from specops.models.convert import Quantization, export_checkpoint
from specops.models.errors import ModelError
from specops.models.graph.nodes import RefusedGraphError, attributes_of
from specops.models.graph.prepack import prepack
from specops.models.graph.rewrite import rewrite
from specops.runtime import kernels
from specops.runtime.layer_shapes import Attention, SharedAttention
from tests.checkpoints import make_checkpoint
from tests.models.convert.runner import Runner
from tests.models.graph.published_graph import write_published
from tests.passes import Passes, prepared, random_chunks

FAMILIES = ("llama", "qwen2", "phi3", "opt", "gpt2")
TOKENS = np.random.default_rng(7).integers(1, 320, 60).tolist()


def exported(folder: Path, family: str, quant: str = "int8-32", **sizes: int) -> Path:
    """The graph of an export of a tiny checkpoint."""
    source = make_checkpoint(folder / f"{family}-source", family, **sizes)
    quantization = Quantization.parse(quant)
    return export_checkpoint(source, folder / family, quantization=quantization).graph_file


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("rewrite"), "llama")


@pytest.fixture
def model(llama: Path) -> onnx.ModelProto:
    """An export that a test may change, without its weights."""
    return onnx.load(llama, load_external_data=False)


def node_of(model: onnx.ModelProto, op: str, place: int = 0) -> onnx.NodeProto:
    return [node for node in model.graph.node if node.op_type == op][place]


def shapes(items: list[onnx.ValueInfoProto]) -> dict[str, list[str | int]]:
    return {
        item.name: [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]
        for item in items
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rewritten_graph_has_the_engines_inputs(tmp_path: Path, family: str) -> None:
    model = onnx.load(exported(tmp_path, family), load_external_data=False)
    kv_heads = 2 if family in ("llama", "qwen2") else 4
    assert rewrite(model) == [Attention(kv_heads, head_size=16)] * 2
    tokens: dict[str, list[str | int]] = {"input_ids": [1, "tokens"]}
    if family in ("opt", "gpt2"):
        tokens["position_ids"] = [1, "tokens"]
    assert shapes(list(model.graph.input)) == {
        **tokens,
        "spans": ["spans", 3],
        "block_tables": ["slots", "blocks"],
        "cache": [4],
        "logit_rows": ["logit_rows"],
        "scored_rows": ["scored_rows"],
    }
    assert shapes(list(model.graph.output)) == {
        "logits": [1, "scored_rows", 320],
        "hidden": [1, "logit_rows", 64],
    }
    assert {node.op_type for node in model.graph.node}.isdisjoint(
        {"GroupQueryAttention", "ReduceSum", "Shape", "Slice"}
    )
    assert [opset.version for opset in model.opset_import if opset.domain == "specops"] == [1]
    # Two tensors cross the last attention: its own output and the residual around it.
    gathered = [node.input[0] for node in model.graph.node if "logit_rows" in node.input]
    assert len(gathered) == 2
    assert node_of(model, kernels.ATTENTION, 1).output[0] in gathered


def test_attention_says_what_it_said(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "phi3", config={"sliding_window": 40})
    int8 = Quantization.parse("int8-32")
    graph = export_checkpoint(source, tmp_path / "onnx", quantization=int8).graph_file
    model = onnx.load(graph, load_external_data=False)
    rewrite(model)
    for layer in range(2):
        node = node_of(model, kernels.ATTENTION, layer)
        given = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        assert given.pop("epsilon") == pytest.approx(1e-6)
        assert given == {
            "layer": layer,
            "num_heads": 4,
            "kv_num_heads": [4, 4],
            "head_size": [16, 16],
            "rotary_interleaved": 0,
            "rotary_factor": 1.0,
            "rotary_within": 0,
            "window": 40,
            "scale": 0.25,
            "softcap": 0.0,
        }
        assert list(node.input) == [
            *(f"layers.{layer}.qkv", "", "", "spans", "block_tables", "cache"),
            "frequencies",
        ]


def test_layers_with_the_same_keys_and_values_keep_them_once(tmp_path: Path) -> None:
    """Gemma 4's last layers; rows without logits do not go through them, unless a head reads."""
    source = make_checkpoint(tmp_path / "source", "gemma4_text")
    int8 = Quantization.parse("int8-32")
    graph = export_checkpoint(source, tmp_path / "onnx", quantization=int8).graph_file
    of_window, full = Attention(kv_heads=2, head_size=16), Attention(kv_heads=2, head_size=32)
    table = [of_window, full, SharedAttention(0), SharedAttention(0), SharedAttention(1)]
    for states in ((), (4,)):
        model = onnx.load(graph, load_external_data=False)
        assert rewrite(model, states) == table
        nodes = [node for node in model.graph.node if node.op_type == kernels.ATTENTION]
        assert [bool(node.input[1]) for node in nodes] == [True, True, False, False, False]
        places = [attributes_of(node)["layer"] for node in nodes]
        assert places == [0, 1, 0, 0, 1]
        behind = ["spans" if states else "logit_spans"] * 3
        assert [node.input[3] for node in nodes] == ["spans", "spans", *behind]
        assert {*attributes_of(nodes[0])["head_size"]} == {16, 32}


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_a_published_graph_computes_what_our_export_does(
    tmp_path: Path, family: str, packed: bool
) -> None:
    graph = exported(tmp_path, family)
    published = write_published(graph, tmp_path / "published" / "model.onnx", packed=packed)
    expected = Passes(prepared(graph, tmp_path)).step(0, TOKENS)
    ready = prepared(published, tmp_path)
    nodes = onnx.load(ready, load_external_data=False).graph.node
    assert not {node.op_type for node in nodes} & {"Add", "MatMulNBits"}  # biases went, too
    passes = Passes(ready)
    found = passes.step(0, TOKENS)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    chunks = [passes.step(1, piece) for piece in random_chunks(TOKENS, seed=1)]
    np.testing.assert_array_equal(np.concatenate(chunks), found)


def test_norms_of_heads_go_into_attention(tmp_path: Path) -> None:
    """Qwen3 has such norms. ONNX Runtime runs the published graph for comparison."""
    graph = exported(tmp_path, "llama")
    published = write_published(graph, tmp_path / "published" / "model.onnx", normed=True)
    expected = Runner.of_graph(published, kv_heads=2, head_dim=16, layers=2, vocab=320).step(TOKENS)
    found = prepared(published, tmp_path)
    nodes = onnx.load(found, load_external_data=False).graph.node
    attention = [node for node in nodes if node.op_type == kernels.ATTENTION]
    assert [len(node.input) for node in attention] == [10, 10]
    assert "Reshape" not in {node.op_type for node in nodes}
    passes = Passes(found)
    logits = passes.step(0, TOKENS)
    assert np.std(logits - expected) < 0.03 * np.std(expected)
    chunks = [passes.step(1, piece) for piece in random_chunks(TOKENS, seed=2)]
    np.testing.assert_array_equal(np.concatenate(chunks), logits)
    plain = Passes(prepared(graph, tmp_path)).step(0, TOKENS)
    assert np.std(logits - plain) > 0.1 * np.std(expected)


def test_norms_of_queries_alone_are_refused(tmp_path: Path) -> None:
    published = tmp_path / "published" / "model.onnx"
    write_published(exported(tmp_path, "llama"), published, normed=True)
    model = onnx.load(published, load_external_data=False)
    node = node_of(model, "GroupQueryAttention")
    node.input[1] = node.input[1].removesuffix("/normed")
    with pytest.raises(RefusedGraphError, match="has different norms for queries and keys"):
        rewrite(model)


# -- what is refused, by name ----------------------------------------------------------------------

Change = Callable[[onnx.ModelProto], None]


def attention(place: int, name: str) -> Change:
    """Make `name` an input of the first attention."""

    def change(model: onnx.ModelProto) -> None:
        node = node_of(model, "GroupQueryAttention")
        node.input.extend([""] * (place + 1 - len(node.input)))
        node.input[place] = name

    return change


def attribute(**values: int | str | float) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = node_of(model, "GroupQueryAttention")
        node.attribute.extend(helper.make_attribute(key, value) for key, value in values.items())

    return change


def between(op: str, *more: str, domain: str = "", **attributes: object) -> Change:
    """Put a node between the embedding and its readers."""

    def change(model: onnx.ModelProto) -> None:
        graph = model.graph
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name == "embedding":
                    node.input[place] = "changed"
        graph.initializer.append(
            numpy_helper.from_array(np.array([1, -1, 64], np.int64), "any_tokens")
        )
        graph.initializer.append(numpy_helper.from_array(np.ones((7, 64), np.float32), "per_token"))
        graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axis_of_tokens"))
        made = helper.make_node(
            op, ["embedding", *more], ["changed"], "in_between", domain=domain, **attributes
        )
        place = next(at for at, node in enumerate(graph.node) if "embedding" in node.output)
        graph.node.insert(place + 1, made)

    return change


@pytest.mark.parametrize("part", [".norm", "embed_tokens.weight", "q.layers.1.qkv.scales"])
def test_a_published_weight_with_nan_is_refused_by_name(part: str, tmp_path: Path) -> None:
    file = tmp_path / "published" / "model.onnx"
    write_published(exported(tmp_path, "llama"), file, normed=True)
    model = onnx.load(file)
    found = next(item for item in model.graph.initializer if item.name.endswith(part))
    values = numpy_helper.to_array(found).copy()
    values.flat[-1] = np.nan
    found.CopyFrom(numpy_helper.from_array(values, found.name))
    onnx.save(model, file)
    with pytest.raises(ModelError, match=rf"the weight {re.escape(found.name)} contains NaN"):
        prepack(file, tmp_path / "laid out.onnx")


def no_attention(model: onnx.ModelProto) -> None:
    for place in (1, 0):
        model.graph.node.remove(node_of(model, "GroupQueryAttention", place))


def half_a_table(model: onnx.ModelProto) -> None:
    table = next(tensor for tensor in model.graph.initializer if tensor.name == "frequencies")
    table.data_type = TensorProto.FLOAT16


def half_the_cache(model: onnx.ModelProto) -> None:
    for item in (*model.graph.input, *model.graph.output):
        if item.name.startswith(("past_key_values", "present")):
            item.type.tensor_type.elem_type = TensorProto.FLOAT16


def narrow_ids(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32


REFUSED: dict[str, tuple[Change, str]] = {
    "bias": (attention(10, "bias"), r"layers\.0\.attention .*has an attention bias, input 10"),
    "sinks": (attention(11, "sinks"), r"has attention sinks, input 11"),
    "scales": (attention(12, "scales"), r"has a quantized cache, input 12"),
    "positions": (attention(9, "mask_sum"), r"takes its positions from mask_sum"),
    "table": (attention(8, ""), r"has a rotary table that is not a pair of float32 weights"),
    "half table": (half_a_table, r"has a rotary table that is not a pair of float32 weights"),
    "half cache": (half_the_cache, r"past_key_values\.0\.key is not float32: the graph was made"),
    "one norm": (attention(14, "cos_cache"), r"has norms of queries and keys that is not a pair"),
    "one past": (attention(4, "past_key_values.0.key"), r"has no past of its own"),
    "smooth softmax": (attribute(smooth_softmax=1), r"has the attribute smooth_softmax=1"),
    "bidirectional": (attribute(causal=0), r"has the attribute causal=0"),
    "quantized": (attribute(k_quant_type="PER_TENSOR"), r"has the attribute k_quant_type="),
    "future": (attribute(something_new=1), r"has the attribute something_new=1"),
    "no attention": (no_attention, r"has no node GroupQueryAttention"),
    "no logits": (lambda model: model.graph.output.pop(0), r"has no output logits"),
    "cache": (
        between("Add", "present.0.key"),
        r"in_between \(Add\) reads the cache, present\.0\.key",
    ),
    "mask": (
        between("Mul", "mask_sum"),
        r"\(ReduceSum\) reads attention_mask, which is neither a weight",
    ),
    "ids": (narrow_ids, r"its input input_ids is not int64"),
    "unknown": (between("CumSum", "axis_of_tokens"), r"in_between \(CumSum\) cannot be part of a"),
    "domain": (
        between("MultiHeadAttention", domain="com.microsoft", num_heads=4),
        r"in_between \(com\.microsoft\.MultiHeadAttention\) cannot be part",
    ),
    "own domain": (between("Norm", domain="somebody"), r"in_between \(somebody\.Norm\) cannot"),
    "convolution": (
        between("ShortConv", "per_token", domain="somebody"),
        r"in_between \(somebody\.ShortConv\) cannot be part",
    ),
    "reshape": (between("Reshape", "any_tokens"), r"\(Reshape\).*does not begin with 0, 0"),
    "softmax": (between("Softmax", axis=1), r"\(Softmax\).*along the token axis"),
    "mean": (between("ReduceMean", axes=[1]), r"\(ReduceMean\).*along the token axis"),
    "transpose": (between("Transpose", perm=[0, 2, 1]), r"\(Transpose\).*moves the token axis"),
    "per token": (between("Add", "per_token"), r"\(Add\).*a weight differs between tokens"),
    "ranks": (between("Add", "input_ids"), r"\(Add\).*different numbers of dimensions"),
    "scores": (between("MatMul", "embedding"), r"\(MatMul\).*should be a weight"),
    "norm": (
        between("LayerNormalization", "layers.0.input_norm.weight", axis=1),
        r"\(LayerNormalization\).*along the token axis",
    ),
    "dynamic": (
        between("DynamicQuantizeMatMul", "per_token", domain="com.microsoft"),
        r"\(com\.microsoft\.DynamicQuantizeMatMul\) cannot be part",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(model: onnx.ModelProto, case: str) -> None:
    change, message = REFUSED[case]
    change(model)
    with pytest.raises(RefusedGraphError, match=message):
        rewrite(model)


def in_a_branch(model: onnx.ModelProto) -> None:
    """Put the engine's operator into a graph that is a node's attribute."""
    made = helper.make_node(kernels.MATMUL, ["embedding"], ["product"], domain=kernels.DOMAIN)
    result = helper.make_tensor_value_info("product", TensorProto.FLOAT, None)
    branch = helper.make_graph([made], "branch", [], [result])
    between("If", then_branch=branch, else_branch=branch)(model)


def in_a_constant_branch(model: onnx.ModelProto) -> None:
    """A node that depends on weights alone runs already when the graph is laid out."""
    in_a_branch(model)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    node_of(model, "If").input[:] = ["always"]


def in_a_function(model: onnx.ModelProto) -> None:
    """A function could hide any operator behind a name that is known."""
    body = helper.make_node("Identity", ["x"], ["y"])
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("somebody", "Disguise", ["x"], ["y"], [body], opset_imports=imports)
    )


OWN_OPERATOR = r"is an operator of the engine's own"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (between(kernels.ATTENTION, domain=kernels.DOMAIN), OWN_OPERATOR),
        (between("AnythingNew", domain=kernels.DOMAIN), OWN_OPERATOR),
        (in_a_branch, r"in_between.* has a graph of its own"),
        (in_a_constant_branch, r"in_between.* has a graph of its own"),
        (in_a_function, "defines a function, Disguise"),
    ],
)
def test_the_engines_own_operators_are_refused_wherever_they_are(
    model: onnx.ModelProto, change: Change, message: str
) -> None:
    """They trust the cache address that they are given; an export has none to give."""
    change(model)
    with pytest.raises(RefusedGraphError, match=message):
        rewrite(model)


ALLOWED: dict[str, Change] = {
    "positions": attention(9, "position_ids"),
    "defaults": attribute(smooth_softmax=0, qk_output=0, k_quant_type="NONE", causal=1),
    "scale of 0": attribute(scale=0.0),
    "softmax": between("Softmax"),
    "mean": between("ReduceMean", axes=[2]),
    "cast": between("Cast", to=TensorProto.FLOAT),
    "add": between("Add", "layers.0.input_norm.weight"),
    "itself": between("Mul", "embedding"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_looks_at_one_token_is_no_problem(model: onnx.ModelProto, case: str) -> None:
    ALLOWED[case](model)
    assert len(rewrite(model)) == 2
