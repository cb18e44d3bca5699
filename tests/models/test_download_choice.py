"""Of all files of a repository those that are needed, and no repository for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specops.models.hub import HubModel, fetch
from specops.models.prepare import ModelError
from tests.checkpoints import make_llama_checkpoint
from tests.models.hub_server import COMMIT, Hub, folder_files
from tests.models.tiny_repo import MODEL, NEEDED, ignore, names


def test_only_what_is_needed_is_downloaded(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    folder = fetch(MODEL, tmp_path, ignore)
    assert names(folder) == NEEDED | {"download.json"}
    for name in NEEDED:
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert json.loads((folder / "download.json").read_text())["commit"] == COMMIT


def test_sharded_weights_come_with_their_index(hub: Hub, tmp_path: Path) -> None:
    shards = folder_files(make_llama_checkpoint(tmp_path / "source", vocab=300, shards=2))
    hub.repos["someone/sharded"] = shards
    folder = fetch(HubModel("someone/sharded"), tmp_path, ignore)
    assert names(folder) == {*shards, "download.json"}


def test_a_repository_with_weights_of_torch_alone_is_taken(hub: Hub, tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "vocab.json": b"{}",
        "merges.txt": b"#",
        "pytorch_model.bin": b"x",
    }
    hub.repos["someone/old"] = {**files, "tf_model.h5": b"x", "flax_model.msgpack": b"x"}
    assert names(fetch(HubModel("someone/old"), tmp_path, ignore)) == {*files, "download.json"}


def test_a_repository_without_usable_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos["someone/flax"] = {"config.json": b"{}", "flax_model.msgpack": b"x"}
    with pytest.raises(ModelError, match="neither safetensors nor PyTorch"):
        fetch(HubModel("someone/flax"), tmp_path, ignore)


def test_the_folders_of_a_repository_with_several_graphs_are_listed(
    hub: Hub, tmp_path: Path
) -> None:
    graph = {"genai_config.json": b"{}", "model.onnx": b"x", "model.onnx.data": b"y"}
    files = {
        f"{at}/{name}": body for at in ("cpu/int4", "cuda/fp16") for name, body in graph.items()
    }
    hub.repos["someone/onnx"] = files
    with pytest.raises(ModelError, match=r"someone/onnx@main:cpu/int4; there are .*cuda/fp16"):
        fetch(HubModel("someone/onnx"), tmp_path, ignore)
    folder = fetch(HubModel("someone/onnx", "main", "cpu/int4"), tmp_path, ignore)
    assert names(folder) == {*graph, "download.json"}
