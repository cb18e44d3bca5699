"""Prepacked weights compute the same, and are trusted only as far as their digest."""

from __future__ import annotations

import json
import logging
import os
import shutil
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


@pytest.mark.parametrize("quant", ["int8-128", "int4-128"])
def test_what_kernels_read_comes_first_and_originals_of_packed_weights_last(
    tiny_pair: Path, tmp_path: Path, quant: str
) -> None:
    graph = tiny_pair / "target" / "onnx" / quant / "model.onnx"
    prepacked = prepacked_graph(graph, "tiny", tmp_path, print)
    assert prepacked is not None
    used = weight_cache.used_bytes(prepacked.parent) - prepacked.stat().st_size
    data = prepacked.with_name("model.onnx.data").stat().st_size
    assert 0 < used < data
    unused = 0
    for tensor in onnx.load(prepacked, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not entries:
            continue
        begin, length = int(entries["offset"]), int(entries["length"])
        packed = [value for key, value in entries.items() if key.startswith("prepacked_")]
        for value in packed:
            fields = value.partition("|")[2].split(";")
            blobs = range(0, len(fields) - 2, 3)
            assert all(int(fields[at]) + int(fields[at + 1]) <= used for at in blobs)
        if packed:
            unused += length
            assert begin >= used
        else:
            assert begin + length <= used
    assert unused > 0


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
    assert [text.split()[0] for text in said] == ["laying", "reading"]
    assert not list((tmp_path / "prepacked").glob("*.part"))


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "prepacked.json", "used"])
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
    assert weight_cache._digests(again.parent, 1 << 40, lambda done: None) == digests
    assert np.array_equal(logits(again, prepacked=True), logits(graph, prepacked=False))


def test_another_processor_or_runtime_gets_its_own(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {weight_cache.graph_key(graph)}
    monkeypatch.setattr(weight_cache, "_processor", lambda: "another")
    keys.add(weight_cache.graph_key(graph))
    monkeypatch.setattr(weight_cache.session, "VERSION", "0.0")
    keys.add(weight_cache.graph_key(graph))
    assert len(keys) == 3


def test_reading_ahead_tells_how_far_it_is(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(weight_cache, "_PIECE", 1 << 14)
    prepacked = prepacked_graph(graph, "tiny", tmp_path, print)
    assert prepacked is not None
    said: list[str] = []
    assert prepacked_graph(graph, "tiny", tmp_path, said.append) == prepacked
    percents = [int(text.removeprefix(f"reading {prepacked.parent}: ")[:-2]) for text in said]
    assert percents == sorted(percents)
    assert percents[0] == 0
    assert percents[-1] >= 90
    assert len(percents) > 10


@pytest.mark.parametrize("room", [0, 200_000, 1 << 40])
def test_what_has_no_room_is_checked_and_let_go(
    graph: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    monkeypatch.setattr(weight_cache, "_PIECE", 1 << 14)
    prepacked = prepacked_graph(graph, "tiny", tmp_path, print)
    assert prepacked is not None
    sizes = [path.stat().st_size for path in sorted(prepacked.parent.glob("model.onnx*"))]
    assert sum(sizes) > 300_000
    let_go: list[int] = []

    def advise(handle: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        let_go.append(length)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(weight_cache, "page_cache_room", lambda: room)
    assert prepacked_graph(graph, "tiny", tmp_path, print) == prepacked
    used = weight_cache.used_bytes(prepacked.parent)
    assert sum(let_go) == sum(sizes) - min(room, used)
    assert ("has room for" in caplog.text) == (room < used)
    with prepacked.with_name("model.onnx.data").open("r+b") as file:  # in the last piece
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0xFF]))
    assert prepacked_graph(graph, "tiny", tmp_path, print) == prepacked
    assert "is damaged" in caplog.text


def test_an_export_and_a_copy_or_link_of_it_share_one(graph: Path, tmp_path: Path) -> None:
    first = prepacked_graph(graph, "target", tmp_path, print)
    for name, place in (("link", os.link), ("copy", shutil.copy2)):
        other = tmp_path / name
        shutil.copytree(graph.parent, other, copy_function=place)
        assert prepacked_graph(other / graph.name, name, tmp_path, print) == first
    assert len(list((tmp_path / "prepacked").iterdir())) == 1


def test_exports_of_other_weights_never_share_one(graph: Path, tmp_path: Path) -> None:
    """Not even where the graph, the sizes and the times are equal, as images normalize them."""
    other = tmp_path / "other"
    shutil.copytree(graph.parent, other)
    manifest = json.loads((other / "specops.json").read_text())
    (other / "specops.json").write_text(json.dumps({**manifest, "source_digest": "sha256:0"}))
    assert weight_cache.graph_key(other / graph.name) != weight_cache.graph_key(graph)


def test_graphs_without_a_manifest_are_told_apart_by_their_path(
    graph: Path, tmp_path: Path
) -> None:
    keys = set()
    for name in ("one", "two"):
        shutil.copytree(graph.parent, tmp_path / name)
        (tmp_path / name / "specops.json").unlink()
        keys.add(weight_cache.graph_key(tmp_path / name / graph.name))
    assert len(keys) == 2


def test_outdated_ones_and_leftovers_are_removed(
    tiny_pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = tiny_pair / "draft" / "onnx" / "int8-128" / "model.onnx"
    other = prepacked_graph(graph, "tiny-draft", tmp_path, print)
    assert other is not None
    leftover = tmp_path / "prepacked" / "tiny-0123456789abcdef.part"
    leftover.mkdir()
    (leftover / "model.onnx").touch()
    made = []
    for age, processor in enumerate(("first", "second", "third")):
        monkeypatch.setattr(weight_cache, "_processor", lambda text=processor: text)
        path = prepacked_graph(graph, "tiny", tmp_path, print)
        assert path is not None
        os.utime(path.parent, (age, age))
        made.append(path)
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(weight_cache, "_processor", lambda: "fourth")
        assert prepacked_graph(graph, "tiny", tmp_path, print) is not None
    assert [path.exists() for path in made] == [False, False, True]
    assert f"removing {made[1].parent}" in caplog.text
    assert other.exists()
    assert not leftover.exists()


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
