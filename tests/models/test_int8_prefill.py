"""The 8-bit form of a graph: close to it, and the same bits however a prompt is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from specops.config import Settings
from specops.decoder import Decoder
from specops.engine import NO_DRAFTER, Engine
from specops.exactness import exact_align
from specops.export import Quantization, export_checkpoint
from specops.models.int8_prefill import int8_prefill
from specops.models.prepack import prepack_int8_prefill
from specops.models.weight_cache import prepacked_graph
from specops.request import GenerationRequest
from specops.session import ModelLoadError, open_session, share_threads
from tests.checkpoints import make_gpt2_checkpoint, make_llama_checkpoint
from tests.conftest import THREADS

TOKENS = np.random.default_rng(3).integers(1, 320, 96).tolist()


def open_decoder(graph: Path, prefill: Path) -> Decoder:
    share_threads(THREADS)
    return Decoder(
        open_session(graph),
        rows=2,
        capacity=128,
        max_width=96,
        prefill_session=open_session(prefill),
    )


@pytest.fixture(params=["int8-128", "int4-128", "int4-32"])
def decoder(request: pytest.FixtureRequest, tiny_pair: Path, tmp_path: Path) -> Decoder:
    graph = tiny_pair / "target" / "onnx" / request.param / "model.onnx"
    assert int8_prefill(graph, tmp_path / "int8.onnx") == 2 * 5
    return open_decoder(graph, tmp_path / "int8.onnx")


@pytest.mark.parametrize("width", [2, 6, 16, 31, 32, 50])
def test_a_prompt_leaves_the_same_bits_however_it_is_cut(decoder: Decoder, width: int) -> None:
    align = exact_align(decoder)
    assert align is not None
    whole = decoder.prefill(0, TOKENS, align=align).copy()
    for start in range(0, len(TOKENS), width):
        cut = decoder.prefill(1, TOKENS[start : start + width], align=align).copy()
    assert np.array_equal(cut, whole)
    for keys, values in decoder.cache.buffers:
        for part in (keys, values):
            assert np.array_equal(part[1, :, : len(TOKENS)], part[0, :, : len(TOKENS)])


def test_both_graphs_go_on_from_the_same_cache(decoder: Decoder) -> None:
    expected = decoder.extend(0, TOKENS)[64:].copy()
    decoder.prefill(1, TOKENS[:64])
    found = decoder.extend(1, TOKENS[64:])
    assert not np.array_equal(found, expected)  # the prompt was read in 8 bits
    assert np.std(found - expected) < 0.05 * np.std(expected)


@pytest.mark.parametrize("quant", ["int8-128", "int4-128", "int4-128-zp", "int4-32-zp"])
def test_zero_points_biases_and_blocks_that_are_not_full(tmp_path: Path, quant: str) -> None:
    """GPT-2 has biases, and inputs that fill no whole block of 128."""
    source = make_gpt2_checkpoint(tmp_path / "source")
    model = export_checkpoint(source, tmp_path / "onnx", quantization=Quantization.parse(quant))
    graph = model.graph_file
    nodes = onnx.load(graph, load_external_data=False).graph.node
    layers = sum(node.op_type == "MatMulNBits" for node in nodes) - 1
    assert int8_prefill(graph, tmp_path / "int8.onnx") == layers
    decoder = open_decoder(graph, tmp_path / "int8.onnx")
    expected = decoder.extend(0, TOKENS[:32])[-1:].copy()
    assert np.std(decoder.prefill(1, TOKENS[:32]) - expected) < 0.05 * np.std(expected)


def test_a_graph_without_quantized_layers_has_no_8_bit_form(
    tiny_pair: Path, tmp_path: Path
) -> None:
    graph = tiny_pair / "target" / "onnx" / "fp32" / "model.onnx"
    assert int8_prefill(graph, tmp_path / "int8.onnx") == 0
    with pytest.raises(ModelLoadError, match="no layer"):
        prepack_int8_prefill(graph, tmp_path / "packed.onnx")


def test_activations_that_8_bits_cannot_hold_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One channel a thousand times the others': a scale per token rounds the others away."""
    source = make_llama_checkpoint(tmp_path / "source", hidden=256, heads=4, ffn=384)
    tensors = load_file(source / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith("layernorm.weight"):
            values[3] *= 1000
    save_file(tensors, source / "model.safetensors")
    model = export_checkpoint(source, tmp_path / "onnx", quantization=Quantization.parse("int8-32"))
    assert prepacked_graph(model.graph_file, "x", tmp_path, print, int8_prefill=True) is None
    assert "moves its logits by" in caplog.text
    assert "prompts are read with the weights as they are" in caplog.text
    assert prepacked_graph(model.graph_file, "x", tmp_path, print) is not None


def test_both_forms_are_kept_beside_each_other(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "target" / "onnx" / "int8-128" / "model.onnx"

    def kept(*, int8: bool) -> Path | None:
        return prepacked_graph(graph, "tiny", tmp_path, print, int8_prefill=int8)

    first, second = kept(int8=True), kept(int8=False)
    assert first is not None
    assert second is not None
    assert first != second
    assert (kept(int8=True), kept(int8=False)) == (first, second)


def generated(engine: Engine, drafter: str) -> list[int]:
    request = GenerationRequest(
        request_id="one",
        prompt_tokens=tuple(TOKENS[:60]),
        max_new_tokens=40,
        drafter=drafter,
        k_draft=3,
        exact=True,
        ignore_eos=True,
    )
    return [piece.token for output in engine.generate(request) for piece in output.pieces]


def test_speculative_output_stays_plain_output(tiny_settings: Settings) -> None:
    engine = Engine.load(replace(tiny_settings, prefill="int8"))
    plain = generated(engine, NO_DRAFTER)
    assert generated(engine, "ngram") == plain
    assert generated(engine, "draft") == plain


@pytest.mark.parametrize(
    ("room", "kernel", "both"),
    [(1 << 40, None, True), (1 << 10, None, False), (1 << 40, "ours", False)],
)
def test_auto_takes_it_where_onnxruntime_computes_and_both_fit(
    tiny_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    kernel: str | None,
    both: bool,
) -> None:
    monkeypatch.setattr("specops.graphs.page_cache_room", lambda: room)
    loaded: list[bool] = []

    def watched(*args: object, tiles: bool, int8_prefill: bool = False) -> None:
        assert tiles == (kernel is not None)
        loaded.append(int8_prefill)

    monkeypatch.setattr("specops.graphs.kernels.kernel", lambda: kernel)

    monkeypatch.setattr("specops.graphs.prepacked_graph", watched)
    Engine.load(replace(tiny_settings, draft=NO_DRAFTER))
    assert loaded == ([True, False] if both else [False])
