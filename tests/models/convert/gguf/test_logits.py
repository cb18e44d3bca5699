"""A GGUF's graph computes what the same weights give in float32, up to the activations' rounding.

Activations have 8 bits in every product of the kernels. Weights in the file's own blocks add no
further error.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from onnx import numpy_helper

from specops.models.convert import ExportedModel, ExportError, Quantization, export_checkpoint
from specops.models.convert.checkpoint import Matrix
from specops.models.convert.weights import WeightStore
from specops.models.eagle.target_rows import output_blocks, output_rows
from specops.models.graph.nodes import attributes_of
from specops.models.graph.weight_cache import used_bytes
from specops.runtime import kernels
from tests.checkpoints import FAMILIES, RELATIVES, make_checkpoint, make_llama_checkpoint
from tests.models.convert.gguf.files import (
    BLOCKS,
    DRAWN,
    SIZES,
    WRITTEN,
    KindOf,
    stored_tensors,
    write_and_close,
    write_gguf,
)
from tests.models.convert.runner import edit_config, embedded, is_tied
from tests.passes import Passes, prepared

TOKENS = np.random.default_rng(7).integers(1, 320, 24).tolist()
MIXED = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "embed_tokens": Kind.Q6_K}
HALF = {"q_proj": Kind.Q5_0, "k_proj": Kind.Q4_0, "v_proj": Kind.Q8_0, "embed_tokens": Kind.F16}


# Files do not hold the kinds of layers; these configs have the architecture's usual ones.
HEADS: dict[str, Any] = {"config": {"head_dim": 64}}
OPTIONS: dict[str, dict[str, Any]] = {
    "smollm3": {"layers": 4, "config": {"no_rope_layers": [1, 1, 1, 0]}},
    "gemma2": {"config": {"head_dim": 64, "query_pre_attn_scalar": 64}},
    "gemma3_text": {
        "layers": 6,
        "config": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window_pattern": 6},
    },
    "phi": {"kv_heads": 4},
}
WIDE_HEADS = {"head_dim": 64, "global_head_dim": 128}
# The language models of models that see images, which have architectures of their own in files.
MROPE_2 = {"gguf": "qwen2vl", "mrope_section": [16, 24, 24]}
MROPE_3 = {"gguf": "qwen3vl", "mrope_section": [24, 20, 20], "head_dim": 64}
LONG_ROPE = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": np.linspace(1.0, 1.4, 32).tolist(),
        "long_factor": np.linspace(1.1, 6.0, 32).tolist(),
    },
}


def by_part(parts: dict[str, Kind], other: Kind) -> KindOf:
    """Types by the part of a name, as in a file of a mixture."""
    return lambda name: next((kind for part, kind in parts.items() if part in name), other)


def converted(
    folder: Path, source: Path, kind_of: KindOf, **options: Any
) -> tuple[ExportedModel, ExportedModel]:
    """The exports of a file, and of its weights in float32."""
    file = write_gguf(source, folder / "m.gguf", kind_of, dequantized=folder / "plain", **options)
    model = export_checkpoint(file, folder / "own", quantization=None)
    plain = export_checkpoint(
        folder / "plain", folder / "fp32", quantization=Quantization.parse("fp32")
    )
    return model, plain


def error(folder: Path, model: ExportedModel, plain: ExportedModel) -> float:
    """Of the logits, relative."""
    found, expected = (
        Passes(prepared(graph.graph_file, folder / name)).step(0, TOKENS)
        for name, graph in (("a", model), ("b", plain))
    )
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def constants(model: ExportedModel) -> dict[str, np.ndarray]:
    """A graph's weights by their names."""
    tensors = onnx.load(model.graph_file).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}


def products(graph: Path) -> list[dict[str, Any]]:
    """The attributes of a prepared graph's products, all of which are the kernels'."""
    nodes = onnx.load(graph, load_external_data=False).graph.node
    assert all(node.domain == kernels.DOMAIN for node in nodes if "MatMul" in node.op_type)
    return [attributes_of(node) for node in nodes if node.op_type == kernels.MATMUL]


@pytest.mark.parametrize("kind", [*BLOCKS, Kind.F16], ids=lambda kind: kind.name)
def test_llama_of_one_type(kind: Kind, tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **SIZES)
    model, plain = converted(tmp_path, source, lambda name: kind)
    assert model.quantization.name.startswith("gguf-")
    assert error(tmp_path, model, plain) < (0.03 if kind == Kind.F16 else 0.02)
    stored = Kind.Q8_0 if kind == Kind.F16 else kind
    layer = [[stored] * 3, [stored], [stored] * 2, [stored]]  # q, k and v; gate and up
    types = [product["types"] for product in products(prepared(model.graph_file, tmp_path / "a"))]
    assert types == [*layer, *layer, [stored]]


def test_parts_of_a_product_keep_their_types(tmp_path: Path) -> None:
    """Queries, keys and values are one product, and so are gate and up."""
    kinds = {"q_proj": Kind.Q4_K, "k_proj": Kind.Q3_K, "v_proj": Kind.Q6_K}
    kinds |= {"gate_proj": Kind.Q2_K, "up_proj": Kind.IQ4_XS}
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    model, plain = converted(tmp_path, source, by_part(kinds, Kind.Q5_0))
    assert error(tmp_path, model, plain) < 0.03
    attention, _, feed_forward, *_ = products(prepared(model.graph_file, tmp_path / "a"))
    assert attention["types"] == [Kind.Q4_K, Kind.Q3_K, Kind.Q6_K]
    assert attention["N"] == [256, 128, 128]
    assert feed_forward["types"] == [Kind.Q2_K, Kind.IQ4_XS]


@pytest.mark.parametrize(
    ("kind", "options", "kind_of"),
    [
        ("llama", {}, by_part(MIXED, Kind.Q4_K)),
        ("llama", {}, by_part(HALF, Kind.Q4_1)),
        ("qwen2", {}, by_part(MIXED, Kind.Q4_K)),
        ("qwen2", {"config": MROPE_2}, by_part({}, Kind.Q8_0)),
        ("phi3", {"kv_heads": 4}, by_part({}, Kind.Q4_1)),
        ("phi3", {"kv_heads": 4, "config": LONG_ROPE}, by_part({}, Kind.Q8_0)),
        *((kind, OPTIONS.get(kind, HEADS), by_part(HALF, Kind.Q8_0)) for kind in RELATIVES),
        ("mistral", {}, by_part(HALF, Kind.Q4_1)),
        ("qwen3", {}, by_part(HALF, Kind.Q5_1)),
        ("qwen3", {"config": MROPE_3}, by_part({}, Kind.Q8_0)),
        ("smollm3", OPTIONS["smollm3"], by_part({}, Kind.Q5_K)),
        ("lfm2", {}, by_part({"conv.in_proj": Kind.Q4_K}, Kind.Q8_0)),
        (
            "gemma4_text",
            {"layers": 5, "config": WIDE_HEADS},
            by_part({"per_layer": Kind.Q5_1, "v_proj": Kind.Q6_K}, Kind.Q8_0),
        ),
        (
            "gemma4_text",
            {"layers": 5, "kv_heads": 1, "config": {**WIDE_HEADS, "use_double_wide_mlp": True}},
            by_part({"embed_tokens": Kind.F16}, Kind.Q8_0),
        ),
        ("granitemoehybrid", {}, by_part({"mamba.in_proj": Kind.Q4_K}, Kind.Q8_0)),
        ("qwen3_5_text", {}, by_part({"in_proj_a": Kind.F32}, Kind.Q8_0)),
        ("qwen3_5_text", {}, by_part({"in_proj_qkv": Kind.Q4_0}, Kind.Q5_1)),
        ("gpt2", {}, by_part({}, Kind.Q5_K)),
        ("gpt2", {}, by_part({"c_attn": Kind.Q8_0}, Kind.IQ4_NL)),
    ],
)
def test_families_and_mixtures(
    kind: str, options: dict[str, Any], kind_of: KindOf, tmp_path: Path
) -> None:
    sizes = {name: SIZES[name] for name in FAMILIES[kind].keys}
    source = make_checkpoint(tmp_path / "source", kind, **{**sizes, **options})
    model, plain = converted(tmp_path, source, kind_of)
    # Keys and queries of unit length scale rounding errors up.
    assert error(tmp_path, model, plain) < (0.04 if kind == "qwen3_5_text" else 0.03)
    for key in ("shape", "family", "num_parameters"):
        assert getattr(model, key) == getattr(plain, key)
    tables = [
        {name: value for name, value in constants(graph).items() if name.endswith("_cache")}
        for graph in (model, plain)
    ]
    assert tables[0].keys() == tables[1].keys()
    for name in tables[0]:
        np.testing.assert_allclose(tables[0][name], tables[1][name], atol=1e-5)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", [*WRITTEN, *DRAWN], ids=lambda kind: kind.name)
def test_tokens_are_looked_up_exactly(kind: Kind, tmp_path: Path, *, tie: bool) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie=tie, **{**SIZES, "layers": 1})
    file = write_gguf(
        source,
        tmp_path / "m.gguf",
        by_part({"embed_tokens": kind}, Kind.Q4_0),
        dequantized=tmp_path / "plain",
    )
    model = export_checkpoint(file, tmp_path / "own", quantization=None)
    graph = prepared(model.graph_file, tmp_path / "a")
    table = stored_tensors(tmp_path / "plain")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedded(graph, range(320)), table)
    if kind in BLOCKS:
        assert is_tied(graph) == tie


def test_a_table_whose_rows_are_looked_up_need_not_fit_into_memory(tmp_path: Path) -> None:
    """It lies behind everything of which a pass reads all, as it is in the file."""
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    file = write_gguf(source, tmp_path / "m.gguf", lambda _: Kind.Q4_K)
    model = export_checkpoint(file, tmp_path / "own", quantization=None)
    graph = prepared(model.graph_file, tmp_path / "a")
    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    (table,) = (tensor for tensor in tensors if tensor.name == "embedding.table")
    place = {entry.key: int(entry.value) for entry in table.external_data if entry.value.isdigit()}
    assert used_bytes(graph.parent) - graph.stat().st_size <= place["offset"]
    raw = graph.with_name("model.onnx.data").read_bytes()[place["offset"] :][: place["length"]]
    stored = next(item for item in GGUFReader(file).tensors if item.name == "token_embd.weight")
    assert raw == stored.data.tobytes()


def test_rows_of_the_head_are_those_of_the_file(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    model, _ = converted(tmp_path, source, lambda _: Kind.Q6_K)
    tokens = [3, 319, 7]
    expected = stored_tensors(tmp_path / "plain")["lm_head.weight"][tokens]
    np.testing.assert_array_equal(output_rows(model.graph_file, tokens, 256), expected)
    blocks = output_blocks(model.graph_file, tokens)
    assert blocks is not None
    assert blocks.shape == (3, 256)
    np.testing.assert_array_equal(dequantize(blocks[1:].blocks(), Kind.Q6_K), expected[1:])
    with WeightStore(tmp_path / "rows", lambda nbytes: None) as store:  # as a draft head takes them
        store.file_rows("head", Matrix("the target's rows", (blocks,)))
    assert (tmp_path / "rows").read_bytes().startswith(blocks.blocks().tobytes())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("keys", "factors", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, 1.0, 4.0),  # no type: linear
        ({"rope.scale_linear": 4.0}, 1.0, 4.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 8.0}, 1.0, 4.0),
        ({"rope.scaling.factor": 0.0}, 1.0, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0, 1.0),
        ({"rope.scaling.type": "linear"}, 1.0, 1.0),
        ({"rope.scaling.factor": 4.0}, 2.0, 8.0),  # beside divisors of the frequencies
    ],
)
def test_a_factor_of_the_rotation_is_read_as_llama_cpp_does(
    keys: dict[str, Any], factors: float, expected: float, tmp_path: Path
) -> None:
    scaling = {"type": "linear", "factor": expected}
    source = make_llama_checkpoint(tmp_path / "source", **SIZES, config={"rope_scaling": scaling})

    def change(writer: GGUFWriter) -> None:
        for key, value in keys.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(f"llama.{key}", value)
        if factors != 1:
            writer.add_tensor("rope_freqs.weight", np.full(32, factors, np.float32))

    model, plain = converted(tmp_path, source, lambda name: Kind.Q8_0, change=change)
    tables = [constants(graph)["frequencies"] for graph in (model, plain)]
    np.testing.assert_allclose(*tables, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("glm4", "glm4.rope.dimension_sections", [8, 12, 12, 0], "must be 0 or absent"),
        ("exaone4", "exaone4.rope.freq_base_swa", 5000.0, "must be the same as"),
        ("olmo3", "olmo2.rope.scaling.attn_factor", 2.0, "is 2.0; this cannot be exported"),
    ],
)
def test_settings_of_an_architecture_that_no_family_supports(
    kind: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", kind, **{**SIZES, **HEADS})

    def change(writer: GGUFWriter) -> None:
        (writer.add_array if isinstance(value, list) else writer.add_float32)(key, value)

    file = write_gguf(source, tmp_path / "m.gguf", lambda _: Kind.Q8_0, change=change)
    with pytest.raises(ExportError, match=message):
        export_checkpoint(file, tmp_path / "own", quantization=None)


@pytest.mark.parametrize("pattern", [[True, False, True], 0, None])
def test_the_local_layers_of_gemma_3(pattern: list[bool] | int | None, tmp_path: Path) -> None:
    """A list of layers; a window of 0 and an absent window: all layers are global."""
    config: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 40}
    kinds = {True: "sliding_attention", False: "full_attention"}
    config["layer_types"] = [kinds[local] for local in pattern or [False] * 3]
    source = make_checkpoint(
        tmp_path / "source", "gemma3_text", **{**SIZES, "layers": 3}, config=config
    )
    window = {"sliding_window": 40} if pattern else {"sliding_window": pattern}
    edit_config(source, **window)

    def change(writer: GGUFWriter) -> None:
        if pattern:
            writer.add_sliding_window_pattern(pattern)

    file = write_gguf(
        source, tmp_path / "m.gguf", lambda _: Kind.Q8_0, change=change, dequantized=tmp_path / "p"
    )
    edit_config(tmp_path / "p", sliding_window=40)
    model = export_checkpoint(file, tmp_path / "own", quantization=None)
    fp32 = Quantization.parse("fp32")
    plain = export_checkpoint(tmp_path / "p", tmp_path / "fp32", quantization=fp32)
    assert len(windows(model)) == 3
    assert windows(model) == windows(plain)
    assert error(tmp_path, model, plain) < 0.05


def windows(model: ExportedModel) -> list[tuple[int, str]]:
    """The window of each layer's attention, and the table that rotates it."""
    nodes = onnx.load(model.graph_file, load_external_data=False).graph.node
    return [
        (next((item.i for item in node.attribute if "window" in item.name), 0), node.input[-1])
        for node in nodes
        if "Attention" in node.op_type
    ]


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 4.0}])
def test_scalings_of_the_rotation_are_kept(scaling: dict[str, Any], tmp_path: Path) -> None:
    """A file holds divisors of the frequencies where a config.json has Llama 3's parameters."""
    source = make_llama_checkpoint(tmp_path / "source", **SIZES, config={"rope_scaling": scaling})
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(0, 64, 2) / 64)
    blend = np.clip((64 / wavelengths - 1.0) / 3.0, 0, 1)

    def change(writer: GGUFWriter) -> None:
        if scaling is LLAMA3:
            factors = (1 / (blend + (1 - blend) / 8)).astype(np.float32)
            writer.add_tensor("rope_freqs.weight", factors)
        else:
            writer.add_string("llama.rope.scaling.type", "linear")
            writer.add_float32("llama.rope.scaling.factor", 4.0)

    model, plain = converted(tmp_path, source, lambda name: Kind.Q8_0, change=change)
    tables = [constants(graph)["frequencies"] for graph in (model, plain)]
    np.testing.assert_allclose(*tables, rtol=1e-5)


def test_shards_are_one_model(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **SIZES)
    whole = write_gguf(source, tmp_path / "whole.gguf", lambda name: Kind.Q4_1)
    first = write_gguf(source, tmp_path / "parts.gguf", lambda name: Kind.Q4_1, split=5)
    assert first.name == "parts-00001-of-00005.gguf"
    (tmp_path / "exports").mkdir()
    exports = [
        export_checkpoint(file, tmp_path / "exports" / str(index), quantization=None)
        for index, file in enumerate((whole, first, first.with_name("parts-00003-of-00005.gguf")))
    ]
    weights = [model.path / "model.onnx.data" for model in exports]
    assert weights[0].read_bytes() == weights[1].read_bytes() == weights[2].read_bytes()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_fused_queries_keys_and_values_are_those_of_three_tensors(
    kind: str, tmp_path: Path
) -> None:
    config = {"attention_bias": True} if kind == "llama" else {}
    source = make_checkpoint(tmp_path / "source", kind, **SIZES, config=config)
    weights = []
    for fused in (False, True):
        file = write_gguf(source, tmp_path / f"{fused}.gguf", lambda _: Kind.Q8_0, fused=fused)
        assert (
            any(item.name.endswith("attn_k.weight") for item in GGUFReader(file).tensors) != fused
        )
        model = export_checkpoint(file, tmp_path / f"onnx-{fused}", quantization=None)
        weights.append((model.path / "model.onnx.data").read_bytes())
    assert weights[0] == weights[1]


def test_a_file_may_list_the_layers_that_have_a_state(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_5_text", **{**SIZES, "layers": 4})

    def exported(*recurrent: bool) -> bytes:
        key = "qwen35.attention.recurrent_layers"
        file = write_gguf(
            source,
            tmp_path / "m.gguf",
            lambda _: Kind.Q8_0,
            change=lambda writer: writer.add_array(key, list(recurrent)),
        )
        return export_checkpoint(file, tmp_path / "onnx", quantization=None).graph_file.read_bytes()

    assert exported(True, False, True, False)
    with pytest.raises(ExportError, match=r"layers\.2\.self_attn\.\S+ is missing"):
        exported(True, False, False, False)


def test_a_granite_file_says_whether_attention_rotates(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "granite", **SIZES, **HEADS)
    for rotates in (True, False):
        file = write_gguf(
            source,
            tmp_path / "m.gguf",
            lambda _: Kind.Q8_0,
            change=partial(GGUFWriter.add_rope_scaling_finetuned, value=rotates),
        )
        model = export_checkpoint(file, tmp_path / "onnx", quantization=None)
        nodes = onnx.load(model.graph_file, load_external_data=False).graph.node
        attention = [attributes_of(node) for node in nodes if "Attention" in node.op_type]
        assert [given["do_rotary"] for given in attention] == [rotates, rotates]


def test_what_reads_images_and_sound_beside_a_model_is_left_out(tmp_path: Path) -> None:
    """Ollama's files have everything, in any type."""
    source = make_checkpoint(
        tmp_path / "source", "gemma4_text", **{**SIZES, "layers": 5}, config={**WIDE_HEADS}
    )

    def beside(writer: GGUFWriter) -> None:
        writer.add_uint32("gemma4.vision.block_count", 1)
        for name in ("v.blk.0.attn_q.weight", "a.conv1d.0.weight", "mm.input_projection.weight"):
            writer.add_tensor(name, np.zeros((2, 64), np.int8))

    weights = []
    for change in (None, beside):
        file = write_gguf(source, tmp_path / "m.gguf", lambda _: Kind.Q8_0, change=change)
        model = export_checkpoint(file, tmp_path / "onnx", quantization=None)
        weights.append((model.path / "model.onnx.data").read_bytes())
    assert weights[0] == weights[1]


def test_an_mtp_block_alone_is_no_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "mtp.gguf", "qwen35")
    writer.add_block_count(25)
    writer.add_nextn_predict_layers(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float32))
    writer.add_tensor("blk.24.nextn.enorm.weight", np.zeros(32, np.float32))
    write_and_close(writer)
    with pytest.raises(ExportError, match=r"an MTP block alone: take the file of the whole model"):
        export_checkpoint(tmp_path / "mtp.gguf", tmp_path / "onnx", quantization=None)
