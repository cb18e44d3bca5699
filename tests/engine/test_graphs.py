"""A model's folder becomes a session with its weights mapped, and says whose its products are."""

from __future__ import annotations

from pathlib import Path

from specops.config import Settings
from specops.engine.graphs import Graph, load_graph
from specops.models.folder import ModelFolder


def loaded(tiny_pair: Path, cache_dir: Path, quant: str, said: list[str]) -> Graph:
    folder = ModelFolder.read(tiny_pair / "target" / "onnx" / quant, "tiny")
    return load_graph(folder, Settings(cache_dir=cache_dir), said.append)


def test_weights_are_mapped_from_the_cache_folder(tiny_pair: Path, tmp_path: Path) -> None:
    said: list[str] = []
    graph = loaded(tiny_pair, tmp_path, "int8-128", said)
    (prepacked,) = (tmp_path / "prepacked").iterdir()
    assert prepacked.name.startswith("tiny-int8-128-")
    stored = sum(path.stat().st_size for path in prepacked.glob("model.onnx*"))
    assert graph.mapped_bytes == stored
    assert [text.split()[0] for text in said] == ["laying", "opening"]


def test_a_graph_of_plain_weights_names_its_products(tiny_pair: Path, tmp_path: Path) -> None:
    assert loaded(tiny_pair, tmp_path, "int8-128", []).foreign_products == ()
    foreign = loaded(tiny_pair, tmp_path, "fp32", []).foreign_products
    assert len(foreign) == 2 * 5 + 1
    assert {"layers.0.qkv", "logits"} <= set(foreign)
