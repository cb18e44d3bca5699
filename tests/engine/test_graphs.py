"""A model's folder becomes a session with its weights mapped."""

from __future__ import annotations

from pathlib import Path

from specops.config import Settings
from specops.engine.graphs import load_graph
from specops.models.folder import ModelFolder


def test_weights_are_mapped_from_the_cache_folder(tiny_pair: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = ModelFolder.read(tiny_pair / "target" / "onnx" / "int8-128", "tiny")
    graph = load_graph(folder, Settings(cache_dir=tmp_path), said.append)
    (prepacked,) = (tmp_path / "prepacked").iterdir()
    assert prepacked.name.startswith("tiny-int8-128-")
    stored = sum(path.stat().st_size for path in prepacked.glob("model.onnx*"))
    assert graph.mapped_bytes == stored
    assert [text.split()[0] for text in said] == ["laying", "opening"]
