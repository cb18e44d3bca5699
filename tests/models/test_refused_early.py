"""What cannot run is refused in words before its weights are downloaded or read."""

import filecmp
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from specops.models import download
from specops.models.folder import GENAI_CONFIG
from specops.models.gguf_files import shards_of
from specops.models.hub import HubModel
from specops.models.prepare import ModelError, Source, fetch, located, prepare
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.gguf.files import SIZES, write_and_close, write_gguf
from tests.models.convert.runner import edit_config
from tests.models.hub_server import Hub, folder_files
from tests.models.tiny_repo import ignore

Q4_1 = gguf.GGMLQuantizationType.Q4_1
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
    write_and_close(writer)
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


def test_a_draft_head_as_a_gguf_is_told_in_which_form_heads_are_taken(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "eagle3")
    write_and_close(writer)
    with pytest.raises(ModelError, match=r"as SPECOPS_DRAFT take the checkpoint of an EAGLE-3 h"):
        get(tmp_path / "head.gguf", tmp_path / "cache")


def test_a_repository_is_refused_before_its_weights_are_downloaded(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    hub.repos["someone/experts"] = folder_files(source)
    with pytest.raises(ModelError, match=rf"someone/experts@main cannot be .*{EXPERTS}"):
        get(HubModel("someone/experts"), tmp_path)
    assert hub.ranges() == []


def test_a_draft_on_the_hub_is_refused_likewise_and_a_head_is_not_judged(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    hub.repos["someone/experts"] = files = folder_files(source)
    with pytest.raises(ModelError, match=rf"someone/experts@main cannot be .*{EXPERTS}"):
        located(HubModel("someone/experts"), tmp_path)
    assert hub.ranges() == []
    edit_config(source, architectures=["LlamaForCausalLMEagle3"])
    hub.repos["someone/head"] = folder_files(source)  # some have the target's tokenizer
    hub.repos["someone/other-head"] = {  # whatever its configuration says
        name: content for name, content in files.items() if "tokenizer" not in name
    }
    for name in ("someone/head", "someone/other-head"):
        assert (located(HubModel(name), tmp_path) / "model.safetensors").is_file()


def test_of_a_gguf_on_the_hub_only_the_beginning_is_downloaded(
    hub: Hub, experts: Path, tmp_path: Path
) -> None:
    hub.repos["someone/experts"] = {"m.gguf": experts}
    model = HubModel("someone/experts", subfolder="m.gguf")
    for _ in range(2):  # the second time the beginning is there already
        with pytest.raises(ModelError, match=rf"m.gguf cannot be .* is 64: .*{EXPERTS}"):
            get(model, tmp_path)
    assert hub.ranges() == [f"bytes=0-{download._BEGINNINGS[0] - 1}"]


def give_type(file: Path, tensor: str, kind: gguf.GGMLQuantizationType) -> None:
    """Change the type of a matrix in a GGUF's header."""
    content = bytearray(file.read_bytes())
    name = tensor.encode()
    place = content.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4 + 16
    content[place : place + 4] = int(kind).to_bytes(4, "little")
    file.write_bytes(content)


def call_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["tokenizer.ggml.model"].value = "unheard-of"


def large_gguf(
    folder: Path, *, split: int = 0, change: Callable[[gguf.GGUFWriter], None] | None = None
) -> list[Path]:
    """A GGUF, or its shards, with a header of more than 256 kB and 8 MB behind the tensors."""

    def changed(writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.description", "x" * download._BEGINNINGS[0])
        if change is not None:
            change(writer)

    source = make_llama_checkpoint(folder / "source", **SIZES)
    first = write_gguf(source, folder / "m.gguf", lambda name: Q4_1, split=split, change=changed)
    files = [folder / name for name in shards_of(first.name)]
    for file in files:
        with file.open("ab") as stream:
            stream.truncate(file.stat().st_size + (8 << 20))
    return files


@pytest.mark.parametrize("sends_parts", [True, False])
@pytest.mark.parametrize(
    ("split", "change", "damaged", "message"),
    [
        (0, None, "blk.1.ffn_down.weight", "has type IQ2_S; those that can be read are"),
        (9, None, "blk.1.ffn_down.weight", r"00003-of-00003.* has type IQ2_S; those that can be"),
        (0, call_tokenizer, "", "unheard-of"),
    ],
    ids=["a type", "a type in the last shard", "a tokenizer"],
)
def test_of_a_gguf_on_the_hub_what_the_header_says_is_refused_before_the_weights_come(
    *,
    split: int,
    change: Callable[[gguf.GGUFWriter], None] | None,
    damaged: str,
    message: str,
    sends_parts: bool,
    hub: Hub,
    tmp_path: Path,
) -> None:
    hub.sends_parts = sends_parts
    files = large_gguf(tmp_path, split=split, change=change)
    if damaged:
        give_type(files[-1], damaged, gguf.GGMLQuantizationType.IQ2_S)
    hub.repos["someone/large"] = {file.name: file for file in files}
    model = HubModel("someone/large", subfolder=files[0].name)
    with pytest.raises(ModelError, match=message):
        get(model, tmp_path / "cache")
    parts = [*model.folder(tmp_path / "cache").iterdir()]
    assert len(parts) == len(files)
    assert all(part.stat().st_size < 4 << 20 for part in parts)  # of 8 MB and more


@pytest.mark.parametrize("sends_parts", [True, False])
@pytest.mark.parametrize("split", [0, 9])
def test_a_gguf_whose_header_is_right_comes_whole(
    split: int, sends_parts: bool, hub: Hub, tmp_path: Path
) -> None:
    hub.sends_parts = sends_parts
    files = large_gguf(tmp_path, split=split)
    hub.repos["someone/large"] = {file.name: file for file in files}
    folder = located(HubModel("someone/large", subfolder=files[0].name), tmp_path / "cache").parent
    for file in files:
        assert filecmp.cmp(folder / file.name, file, shallow=False)
    if sends_parts:
        rest = download._BEGINNINGS[1 if not split else 0]
        assert hub.ranges()[-1] == f"bytes={rest}-"


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
