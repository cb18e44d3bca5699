"""Of all files of a repository those that are needed, and no repository for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specops.models.download import choose_files
from specops.models.hub import HubModel, fetch
from specops.models.prepare import ModelError
from tests.checkpoints import make_llama_checkpoint
from tests.models.hub_server import COMMIT, Hub, folder_files
from tests.models.tiny_repo import MODEL, NEEDED, ignore, names

TORCH, SAFE = "pytorch_model.bin", "model.safetensors"


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
    files = dict.fromkeys(("config.json", "vocab.json", "merges.txt", "pytorch_model.bin"), b"x")
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
    graph["tokenizer.json"] = b"{}"
    files = {
        f"{at}/{name}": body for at in ("cpu/int4", "cuda/fp16") for name, body in graph.items()
    }
    hub.repos["someone/onnx"] = files
    with pytest.raises(ModelError, match=r"someone/onnx@main:cpu/int4; there are .*cuda/fp16"):
        fetch(HubModel("someone/onnx"), tmp_path, ignore)
    folder = fetch(HubModel("someone/onnx", "main", "cpu/int4"), tmp_path, ignore)
    assert names(folder) == {*graph, "download.json"}


def test_without_a_tokenizer_no_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.repos["someone/mute"] = {**files, "vocab.json": b"{}"}  # without merges.txt it is half
    with pytest.raises(ModelError, match=r"someone/mute@main has no tokenizer.*tokenizer\.json"):
        fetch(HubModel("someone/mute"), tmp_path, ignore)
    assert hub.ranges() == []


def test_published_repositories_are_read_by_their_files() -> None:
    """What lies beside each other on the hub, and what of it is taken."""
    config = {"config.json", "generation_config.json"}
    old_tokenizer = {"vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json"}
    others = {"README.md", "flax_model.msgpack", "tf_model.h5", "tokenizer.model", "LICENSE.md"}
    others |= {"onnx/decoder_model.onnx", "modeling_phi3.py", "64.tflite", "rust_model.ot"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    phi3_tokenizer = tokenizer | {"added_tokens.json"}
    gpt2_tokenizer = {"tokenizer.json", "vocab.json", "merges.txt"}
    shards = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    torch_shards = {f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)}
    repositories = {
        "facebook/opt-125m": config | old_tokenizer | {TORCH},
        "facebook/opt-6.7b": config | old_tokenizer | torch_shards | {f"{TORCH}.index.json"},
        "JackFram/llama-160m": config | tokenizer | {TORCH},
        "openai-community/gpt2": config | gpt2_tokenizer | {SAFE},
        "microsoft/Phi-3-mini-4k-instruct": config
        | phi3_tokenizer
        | shards
        | {f"{SAFE}.index.json"},
    }
    for wanted in repositories.values():
        assert set(choose_files(wanted | others)) == wanted
    oldest = config | {TORCH, "tokenizer.model", "tokenizer_config.json"}
    assert set(choose_files(oldest | others)) == oldest
    both = repositories["JackFram/llama-160m"] | {SAFE}
    assert set(choose_files(both)) == both - {TORCH}
