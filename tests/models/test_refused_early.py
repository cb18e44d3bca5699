"""What cannot run is refused in words before its weights are downloaded or read."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from specops.models import download
from specops.models.folder import GENAI_CONFIG
from specops.models.hub import HubModel, fetch
from specops.models.prepare import ModelError, Source, prepare
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.runner import edit_config
from tests.models.hub_server import Hub, folder_files
from tests.models.tiny_repo import ignore

EXPERTS = "mixture of experts, and only dense models run here"
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "tokenizer.json": b"x"}


def get(source: Source, cache: Path) -> None:
    quant = "gguf" if str(source).endswith(".gguf") else "int8-32"
    prepare(source, quant, name="m", cache_dir=cache, report=lambda text: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint whose config.json says that there are experts."""
    folder = make_llama_checkpoint(tmp_path / "source", vocab=300)
    edit_config(folder, num_experts=8)
    return folder


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A GGUF of 8 MB with experts; its settings are at its beginning."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "granitehybrid")
    writer.add_expert_count(64)
    writer.add_token_list([f"token {number}" for number in range(30_000)])
    writer.add_tensor("token_embd.weight", np.zeros((1024, 2048), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_a_folder_is_refused_before_its_weights_are_read(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"source cannot be converted: .*'num_experts' .*{EXPERTS}"
    ):
        get(source, tmp_path / "cache")
    assert not (tmp_path / "cache" / "converted" / "sources.json").exists()  # it has the digests


def test_a_gguf_is_refused_before_its_weights_are_read(experts: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"'granitehybrid.expert_count' is 64: .*{EXPERTS}"):
        get(experts, tmp_path / "cache")
    assert not (tmp_path / "cache" / "converted" / "sources.json").exists()


def test_a_repository_is_refused_before_its_weights_are_downloaded(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    hub.repos["someone/experts"] = folder_files(source)
    with pytest.raises(ModelError, match=rf"someone/experts@main cannot be .*{EXPERTS}"):
        get(HubModel("someone/experts"), tmp_path)
    assert hub.ranges() == []


def test_of_a_gguf_on_the_hub_only_the_beginning_is_downloaded(
    hub: Hub, experts: Path, tmp_path: Path
) -> None:
    hub.repos["someone/experts"] = {"m.gguf": experts}
    model = HubModel("someone/experts", subfolder="m.gguf")
    for _ in range(2):  # the second time the beginning is there already
        with pytest.raises(ModelError, match=rf"m.gguf cannot be .* is 64: .*{EXPERTS}"):
            get(model, tmp_path)
    part = model.folder(tmp_path) / "m.gguf.part"
    assert download._BEGINNING <= part.stat().st_size < experts.stat().st_size // 2


def test_the_configuration_beside_a_finished_graph_is_not_judged(hub: Hub, tmp_path: Path) -> None:
    """Others convert what we cannot."""
    hub.repos["someone/graph"] = {
        **{"config.json": json.dumps({"num_experts": 8}).encode(), GENAI_CONFIG: b"{}"},
        **{"model.onnx": b"x", "tokenizer.json": b"x"},
    }
    model = HubModel("someone/graph")

    def refuse(file: Path) -> None:
        raise AssertionError(file)

    assert (fetch(model, tmp_path, ignore, check=refuse) / "model.onnx").is_file()


def test_an_adapter_is_called_one(hub: Hub, tmp_path: Path) -> None:
    hub.repos["someone/lora"] = ADAPTER
    folder = tmp_path / "lora"
    folder.mkdir()
    for name, content in ADAPTER.items():
        (folder / name).write_bytes(content)
    for source, called in ((HubModel("someone/lora"), "someone/lora@main"), (folder, "lora")):
        with pytest.raises(ModelError, match=rf"{called} is an adapter \(LoRA\), .*merge it into"):
            get(source, tmp_path / "cache")
    assert hub.ranges() == []
