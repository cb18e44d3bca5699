"""Prepacked weights compute the same, and are trusted only as far as their digest."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from specops.decoder import Decoder
from specops.models import weight_cache
from specops.models.weight_cache import prepacked_graph
from specops.session import open_session, share_threads


def logits(graph: Path, *, prepacked: bool) -> np.ndarray:
    share_threads(2)
    session = open_session(graph, prepacked=prepacked)
    decoder = Decoder(session, rows=1, capacity=64, max_width=16)
    first = decoder.extend(0, list(range(1, 15))).copy()
    return np.concatenate([first, decoder.decode(0, [9])])


@pytest.mark.parametrize("quant", ["fp32", "int8-128", "int4-128", "int4-32"])
def test_prepacked_weights_compute_the_same_bits(
    tiny_pair: Path, tmp_path: Path, quant: str
) -> None:
    graph = tiny_pair / "target" / "onnx" / quant / "model.onnx"
    prepacked = prepacked_graph(graph, "tiny", tmp_path, print)
    assert prepacked is not None
    assert np.array_equal(logits(prepacked, prepacked=True), logits(graph, prepacked=False))


def test_packed_weights_are_page_aligned(tiny_pair: Path, tmp_path: Path) -> None:
    graph = tiny_pair / "target" / "onnx" / "int4-128" / "model.onnx"
    prepacked = prepacked_graph(graph, "tiny", tmp_path, print)
    assert prepacked is not None
    offsets = []
    model = onnx.load(prepacked, load_external_data=False).graph
    for tensor in model.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked_"):
                offsets.append(int(entry.value.partition("|")[2].split(";")[0]))
    assert len(offsets) == sum(node.op_type == "MatMulNBits" for node in model.node) > 8
    assert all(offset % 4096 == 0 for offset in offsets)


@pytest.fixture
def graph(tiny_pair: Path) -> Path:
    return tiny_pair / "draft" / "onnx" / "int8-128" / "model.onnx"


def test_it_is_made_once(graph: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = prepacked_graph(graph, "tiny", tmp_path, said.append)
    assert first is not None
    changed = first.stat().st_mtime_ns
    assert prepacked_graph(graph, "tiny", tmp_path, said.append) == first
    assert first.stat().st_mtime_ns == changed
    assert len(said) == 2
    assert not list((tmp_path / "prepacked").glob("*.part"))


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "prepacked.json"])
def test_a_damaged_cache_is_made_again(
    graph: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepacked_graph(graph, "tiny", tmp_path, print)
    assert first is not None
    damaged = first.with_name(file)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again = prepacked_graph(graph, "tiny", tmp_path, print)
    assert "is damaged" in caplog.text
    assert again is not None
    digests = json.loads(again.with_name("prepacked.json").read_text())
    assert weight_cache._digests(again.parent) == digests
    assert np.array_equal(logits(again, prepacked=True), logits(graph, prepacked=False))


def test_another_processor_or_runtime_gets_its_own(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {weight_cache._key(graph)}
    monkeypatch.setattr(weight_cache, "_processor", lambda: "another")
    keys.add(weight_cache._key(graph))
    monkeypatch.setattr(weight_cache.session, "VERSION", "0.0")
    keys.add(weight_cache._key(graph))
    assert len(keys) == 3


def test_where_nothing_can_be_written_the_graph_itself_serves(
    graph: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prepacked").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        assert prepacked_graph(graph, "tiny", tmp_path, print) is None
    assert "none could be prepacked" in caplog.text


def test_a_graph_that_cannot_be_prepacked_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with caplog.at_level(logging.WARNING):
        assert prepacked_graph(tmp_path / "model.onnx", "odd", tmp_path, print) is None
    assert "cannot be loaded" in caplog.text
    assert not list((tmp_path / "prepacked").iterdir())


def test_weights_do_not_become_anonymous_memory(tmp_path: Path) -> None:
    """A process that loads prepacked weights holds far less of its own than their size."""
    from specops.export import Quantization, export_checkpoint  # noqa: PLC0415
    from tests.checkpoints import make_llama_checkpoint  # noqa: PLC0415

    make_llama_checkpoint(
        tmp_path / "wide", hidden=1024, layers=4, heads=8, kv_heads=2, ffn=4096, vocab=320
    )
    export_checkpoint(
        tmp_path / "wide", tmp_path / "int8", quantization=Quantization.parse("int8-128")
    )
    graph = tmp_path / "int8" / "model.onnx"
    weights = graph.with_name("model.onnx.data").stat().st_size
    prepacked = prepacked_graph(graph, "wide", tmp_path, print)

    def anonymous(path: Path | None, prepacked: bool) -> int:
        code = f"""
from pathlib import Path
from specops.session import open_session, share_threads
share_threads(2)
def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
before = anonymous()
session = open_session(Path({str(path)!r}), prepacked={prepacked})
print(anonymous() - before)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return int(done.stdout) * 1024

    assert weights > 50e6
    copied = anonymous(graph, False)
    assert copied > weights / 2
    assert anonymous(prepacked, True) < copied / 2
