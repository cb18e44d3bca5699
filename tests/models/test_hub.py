"""Models on the hub: their names, their folders, and which of their files are downloaded."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from specops.config import Settings
from specops.models.hub import HubModel, choose_files, is_complete
from specops.models.prepare import ModelError, choose, fetch
from tests.checkpoints import make_llama_checkpoint
from tests.models.hub_server import COMMIT, Hub, folder_files
from tests.models.tiny_repo import MODEL, NEEDED, REPO, ignore, names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/na-me.1@main:cpu/int4", HubModel("org/na-me.1", "main", "cpu/int4")),
        ("org/name:cpu/int4/", HubModel("org/name", "main", "cpu/int4")),
        *((text, None) for text in ("name", "/nowhere", "./nowhere", "~/nowhere", "../nowhere")),
        *((text, None) for text in ("a/b/c", "org/name@", "org/na me")),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_path(text: str, expected: HubModel | None) -> None:
    assert HubModel.parse(text) == expected


def test_models_do_not_share_folders(tmp_path: Path) -> None:
    models = [MODEL, replace(MODEL, revision="v1"), replace(MODEL, subfolder="a/b")]
    assert len({model.folder(tmp_path) for model in models}) == len(models)
    escape = HubModel("a/b", "../../x", "../..").folder(tmp_path)
    assert escape.resolve().is_relative_to(tmp_path / "hub" / "a--b")


def test_a_second_start_asks_for_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"someone/tiny@main.*HF_HUB_OFFLINE"):
        fetch(MODEL, tmp_path, ignore)
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = fetch(MODEL, tmp_path, ignore)
    hub.requests.clear()
    assert fetch(MODEL, tmp_path, ignore) == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(MODEL, tmp_path, ignore) == folder
    assert hub.requests == []


def test_a_file_that_shrank_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(MODEL, tmp_path, ignore)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)


def test_two_that_want_the_same_model_download_it_once(hub: Hub, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: fetch(MODEL, tmp_path, ignore), range(2)))
    assert folders[0] == folders[1]
    assert len(hub.ranges()) == 1


def test_a_cache_that_cannot_be_written_is_an_error(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="SPECOPS_CACHE_DIR"):
        fetch(MODEL, tmp_path, ignore)


# -- which files -----------------------------------------------------------------------------------


def test_only_needed_files_are_downloaded(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    folder = fetch(MODEL, tmp_path, ignore)
    assert names(folder) == NEEDED | {"download.json"}
    for name in NEEDED:
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert json.loads((folder / "download.json").read_text())["commit"] == COMMIT


def test_the_template_for_tools_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    tools = "additional_chat_templates/tool_use.jinja"
    other = "additional_chat_templates/rag.jinja"
    repo = {**hub.repos[MODEL.repo], tools: b"{{ tools }}", other: b"{{ documents }}"}
    hub.repos["someone/tools"] = repo
    hub.repos["someone/below"] = {f"sub/{name}": content for name, content in repo.items()}
    for model in (HubModel("someone/tools"), HubModel("someone/below", subfolder="sub")):
        folder = fetch(model, tmp_path, ignore)
        assert (folder / tools).read_bytes() == b"{{ tools }}"
        assert not (folder / other).exists()


def test_sharded_weights_come_with_their_index(hub: Hub, tmp_path: Path) -> None:
    shards = folder_files(make_llama_checkpoint(tmp_path / "source", vocab=300, shards=2))
    hub.repos["someone/sharded"] = shards
    folder = fetch(HubModel("someone/sharded"), tmp_path, ignore)
    assert names(folder) == {*shards, "download.json"}


def test_a_repository_that_lacks_a_shard_is_refused(hub: Hub, tmp_path: Path) -> None:
    shards = folder_files(make_llama_checkpoint(tmp_path / "source", vocab=300, shards=2))
    del shards["model-00002-of-00002.safetensors"]
    hub.repos["someone/sharded"] = shards
    with pytest.raises(ModelError, match=r"is not whole on the hub: model-00002-of-00002\.safet"):
        fetch(HubModel("someone/sharded"), tmp_path, ignore)
    assert hub.ranges() == []


def test_a_repository_without_usable_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos["someone/flax"] = {"config.json": b"{}", "flax_model.msgpack": b"x"}
    with pytest.raises(ModelError, match="neither safetensors nor PyTorch"):
        fetch(HubModel("someone/flax"), tmp_path, ignore)


def test_the_folders_of_a_repository_with_several_graphs_are_listed(
    hub: Hub, tmp_path: Path
) -> None:
    graph = dict.fromkeys(
        ("genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json"), b"x"
    )
    hub.repos["someone/onnx"] = {
        f"{at}/{name}": body for at in ("cpu/int4", "cuda/fp16") for name, body in graph.items()
    }
    with pytest.raises(ModelError, match=r"someone/onnx@main:cpu/int4; it has .*cuda/fp16"):
        fetch(HubModel("someone/onnx"), tmp_path, ignore)
    folder = fetch(HubModel("someone/onnx", "main", "cpu/int4"), tmp_path, ignore)
    assert names(folder) == {*graph, "download.json"}


def test_without_a_tokenizer_no_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.repos["someone/mute"] = {**files, "vocab.json": b"{}"}  # without merges.txt it is half
    with pytest.raises(ModelError, match=r"someone/mute@main has no tokenizer.*tokenizer\.json"):
        fetch(HubModel("someone/mute"), tmp_path, ignore)
    assert hub.ranges() == []


def test_a_draft_head_needs_no_tokenizer(hub: Hub, tmp_path: Path) -> None:
    hub.repos["someone/head"] = {
        name: content for name, content in hub.repos[REPO].items() if "tokenizer" not in name
    }
    folder = fetch(HubModel("someone/head"), tmp_path, ignore, tokenizer=False)
    assert names(folder) == {"config.json", "model.safetensors", "download.json"}


TORCH, SAFE = "pytorch_model.bin", "model.safetensors"
CONFIG = {"config.json", "generation_config.json"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
OLD_TOKENIZER = {"vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json"}
OTHERS = {"README.md", "flax_model.msgpack", "tf_model.h5", "tokenizer.model", "LICENSE.md"}
OTHERS |= {"onnx/decoder_model.onnx", "modeling_phi3.py", "64.tflite", "rust_model.ot"}


@pytest.mark.parametrize(
    "wanted",
    [
        CONFIG | OLD_TOKENIZER | {TORCH},
        CONFIG | OLD_TOKENIZER | {"pytorch_model-00001-of-00001.bin", f"{TORCH}.index.json"},
        CONFIG | {"tokenizer.json", "vocab.json", "merges.txt", SAFE},
        CONFIG
        | TOKENIZER
        | {"added_tokens.json", "model-00001-of-00001.safetensors"}
        | {f"{SAFE}.index.json"},
        CONFIG | {TORCH, "tokenizer.model", "tokenizer_config.json"},
        CONFIG | TOKENIZER | {SAFE, "ngrams.npy"},
    ],
    ids=["opt-125m", "opt-6.7b", "gpt2", "phi-3", "oldest", "a head with n-grams"],
)
def test_of_a_published_repository_the_needed_files_are_chosen(wanted: set[str]) -> None:
    assert set(choose_files(wanted | OTHERS)) == wanted
    if SAFE in wanted:
        assert set(choose_files(wanted | OTHERS | {TORCH})) == wanted


# -- names that the hub does not allow -------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("org/name.git", "org/my--model", "my--org/model", "org/a..b", "org/name-", "org/name."),
        *("org-/name", f"org/{'x' * 97}", f"{'x' * 97}/name"),
    ],
)
def test_it_is_refused_with_the_rules(name: str) -> None:
    with pytest.raises(HFValidationError):
        validate_repo_id(name)
    for text in (name, f"{name}@main", f"{name}:folder"):
        with pytest.raises(
            ModelError, match="neither a local path nor a name on the hub: such a name has no"
        ):
            HubModel.parse(text)
    with pytest.raises(ModelError, match="neither a local path nor a name on the hub"):
        choose(Settings(target=name))


def test_a_url_is_refused_with_how_models_are_named() -> None:
    with pytest.raises(ModelError, match="is a URL: a model on the hub is named org/name"):
        choose(Settings(target="https://hub.example/org/name"))


@pytest.mark.parametrize("name", ["org/name.gitx", "org/a-b.c_d", f"org/{'x' * 96}", "o/n_"])
def test_all_others_are_taken(name: str) -> None:
    validate_repo_id(name)
    assert HubModel.parse(name) == HubModel(name)
    assert HubModel.parse(f"{name}@a--b") == HubModel(name, "a--b")
