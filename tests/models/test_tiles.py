"""Weights in tiles: every product that the kernels know is theirs, and what is computed stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from specops import kernels
from specops.decoder import Decoder
from specops.exactness import exact_align
from specops.export import Quantization, export_checkpoint
from specops.models.weight_cache import prepacked_graph, used_bytes
from specops.session import open_session, share_threads
from tests.checkpoints import make_gpt2_checkpoint
from tests.conftest import THREADS

pytestmark = pytest.mark.skipif(kernels.kernel() is None, reason="no kernel for this processor")

TOKENS = np.random.default_rng(5).integers(1, 320, 48).tolist()


def open_decoder(graph: Path, *, prepacked: bool) -> Decoder:
    share_threads(THREADS)
    session = open_session(graph, prepacked=prepacked)
    return Decoder(session, rows=2, capacity=64, max_width=48)


def tiled(graph: Path, cache: Path) -> Path:
    found = prepacked_graph(graph, "tiny", cache, print, tiles=True)
    assert found is not None
    return found


def operators(graph: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(graph, load_external_data=False).graph.node)


@pytest.mark.parametrize("quant", ["fp32", "int8-128", "int4-128", "int4-32"])
def test_the_kernels_compute_what_onnxruntime_does(
    tiny_pair: Path, tmp_path: Path, quant: str
) -> None:
    graph = tiny_pair / "target" / "onnx" / quant / "model.onnx"
    found = tiled(graph, tmp_path)
    products = operators(graph)["MatMulNBits"]
    assert operators(found)[kernels.OPERATOR] == products
    assert operators(found)["MatMulNBits"] == 0
    assert (products == 0) == (quant == "fp32")
    expected = open_decoder(graph, prepacked=False).extend(0, TOKENS).copy()
    logits = open_decoder(found, prepacked=True).extend(0, TOKENS)
    assert np.std(logits - expected) < 0.03 * np.std(expected)


@pytest.mark.parametrize("quant", ["int8-128", "int4-128", "int4-128-zp", "int4-32-zp"])
def test_zero_points_biases_and_blocks_that_are_not_full(tmp_path: Path, quant: str) -> None:
    """GPT-2 has biases, inputs that fill no whole block of 128, and its embedding as its head."""
    source = make_gpt2_checkpoint(tmp_path / "source")
    model = export_checkpoint(source, tmp_path / "onnx", quantization=Quantization.parse(quant))
    found = tiled(model.graph_file, tmp_path)
    assert operators(found)["MatMulNBits"] == 0
    expected = open_decoder(model.graph_file, prepacked=False).extend(0, TOKENS).copy()
    logits = open_decoder(found, prepacked=True).extend(0, TOKENS)
    assert np.std(logits - expected) < 0.03 * np.std(expected)


@pytest.mark.parametrize("quant", ["int8-128", "int4-128"])
def test_a_pass_of_any_width_leaves_the_same_bits(
    tiny_pair: Path, tmp_path: Path, quant: str
) -> None:
    """But for one token, which takes another attention kernel."""
    graph = tiny_pair / "target" / "onnx" / quant / "model.onnx"
    decoder = open_decoder(tiled(graph, tmp_path), prepacked=True)
    assert exact_align(decoder) == 2
    whole = decoder.extend(0, TOKENS).copy()
    for width in (2, 3, 5, 7, 16):
        parts = [
            decoder.extend(1, TOKENS[start : start + width]).copy()
            for start in range(0, len(TOKENS) - len(TOKENS) % width, width)
        ]
        assert np.array_equal(np.concatenate(parts), whole[: len(parts) * width])
        decoder.cache.truncate(1, 0)


def test_tiles_start_on_pages_and_are_all_that_is_kept(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "target" / "onnx" / "int4-128" / "model.onnx"
    found = tiled(graph, tmp_path)
    model = onnx.load(found, load_external_data=False).graph
    lengths = 0
    for tensor in model.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert int(entries["offset"]) % 4096 == 0
            lengths += int(entries["length"])
            assert any(tensor.name in node.input for node in model.node)
    data = found.with_name("model.onnx.data").stat().st_size
    assert lengths <= data
    assert used_bytes(found.parent) == data + found.stat().st_size
    # Scales and whole tiles take a little more than codes alone; nothing is there twice.
    assert data < 1.3 * graph.with_name("model.onnx.data").stat().st_size


@pytest.fixture
def exacting(tiny_pair: Path, tmp_path: Path) -> Path:
    """A graph one of whose products asks for float activations."""
    source = tiny_pair / "target" / "onnx" / "int4-128"
    model = onnx.load(source / "model.onnx", load_external_data=False)
    first = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    next(item for item in first.attribute if item.name == "accuracy_level").i = 0
    folder = tmp_path / "exacting"
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    shutil.copy(source / "model.onnx.data", folder)
    return folder / "model.onnx"


def test_a_product_that_asks_for_more_exactness_stays_onnxruntimes(
    exacting: Path, tmp_path: Path
) -> None:
    found = operators(tiled(exacting, tmp_path))
    assert found["MatMulNBits"] == 1
    assert found[kernels.OPERATOR] > 8


def test_both_forms_are_kept_beside_each_other(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "draft" / "onnx" / "int8-128" / "model.onnx"
    other = prepacked_graph(graph, "tiny", tmp_path, print)
    assert other is not None
    assert tiled(graph, tmp_path) != other
    assert other.exists()


def test_tiles_that_compute_something_else_are_refused(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "target" / "onnx" / "int4-128" / "model.onnx"
    code = f"""
from pathlib import Path
from specops.models import prepack, tiles
pack = tiles.pack
tiles.pack = lambda codes, *rest, **shape: pack(codes[::-1], *rest, **shape)
prepack.prepack(Path({str(graph)!r}), Path({str(tmp_path / "model.onnx")!r}), tiles=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "does not compute the same" in done.stderr
