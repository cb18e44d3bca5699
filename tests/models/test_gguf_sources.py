"""A GGUF as a source: a local file or one on the hub, whole or in shards, converted once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from specops.config import ConfigError, Settings
from specops.engine.engine import Engine
from specops.models.convert import export_checkpoint
from specops.models.convert.check import check
from specops.models.graph.prepack import prepack
from specops.models.graph.weight_cache import prepacked_graph
from specops.models.hub import HubModel
from specops.models.prepare import ModelError, ModelFolder, Source, choose, fetch, prepare
from specops.text.chat_template import ChatTemplateError
from tests.checkpoints import make_llama_checkpoint
from tests.generating import generate
from tests.models.convert.gguf.files import SIZES, write_gguf
from tests.models.hub_server import Hub
from tests.models.tiny_repo import ignore, names

REPO = "someone/tiny-GGUF"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as a file and as shards."""
    place = tmp_path_factory.mktemp("gguf")
    source = make_llama_checkpoint(place / "source", **SIZES)
    write_gguf(source, place / "m.gguf", lambda name: Kind.Q4_1)
    write_gguf(source, place / "parts.gguf", lambda name: Kind.Q4_1, split=9)
    return place


def get(source: Source, cache: Path, said: list[str] | None = None) -> ModelFolder:
    report = (said if said is not None else []).append
    return prepare(source, "gguf", name="x", cache_dir=cache, report=report)


def test_a_file_is_converted_once(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = get(folder / "m.gguf", tmp_path, said)
    assert said == [f"converting {folder / 'm.gguf'} to gguf"]
    assert (first.quant, first.vocab_size, first.end_tokens) == ("gguf-Q4_1", 320, {0})
    said.clear()
    assert get(folder / "m.gguf", tmp_path, said) == first
    copy = tmp_path / "another name.gguf"
    copy.write_bytes((folder / "m.gguf").read_bytes())
    assert get(copy, tmp_path, said) == first
    assert said == []


def test_weights_are_on_disk_once_beside_the_file(tmp_path: Path, folder: Path) -> None:
    """The file's own blocks are laid out from where they are; rotations take no room at all."""
    large = {**SIZES, "hidden": 512, "ffn": 2048, "heads": 8, "context": 1 << 15}
    source = make_llama_checkpoint(tmp_path / "source", **large)
    file = write_gguf(source, tmp_path / "large.gguf", lambda name: Kind.Q8_0)
    cache = tmp_path / "cache"
    for number, path in enumerate((file, folder / "m.gguf", next(folder.glob("parts-*.gguf")))):
        found = get(path, cache)
        laid_out = prepacked_graph(found.graph, "x", cache, print)
        plain = export_checkpoint(path, tmp_path / f"plain{number}", quantization=None)
        expected = tmp_path / f"expected{number}" / "model.onnx"
        expected.parent.mkdir()
        prepack(plain.graph_file, expected)
        for name in ("model.onnx", "model.onnx.data"):  # the same rows in the same order
            assert laid_out.with_name(name).read_bytes() == expected.with_name(name).read_bytes()
        if path == file:
            used = sum(one.stat().st_size for one in cache.rglob("*") if one.is_file())
            assert used <= 1.15 * file.stat().st_size


def test_a_file_that_was_changed_under_its_conversion_is_not_laid_out(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes((folder / "m.gguf").read_bytes())
    found = get(file, tmp_path)
    stranger = shutil.copytree(found.path, tmp_path / "stranger" / found.path.name)
    file.write_bytes(bytes(file.stat().st_size))
    for graph in (found.graph, stranger / found.graph.name):  # its location names no file
        with pytest.raises(ModelError, match="it was made from has changed since"):
            prepacked_graph(graph, "x", tmp_path, print)


def test_a_check_makes_no_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large vocabulary that takes most of a conversion's time."""

    def fail(*arguments: object) -> None:
        raise AssertionError("nobody needs the tokenizer yet")

    monkeypatch.setattr("specops.models.convert.gguf.tokenizer._with_merges", fail)
    assert check([folder / "m.gguf"]) == 1


def test_shards_are_converted_by_the_name_of_any(folder: Path, tmp_path: Path) -> None:
    shards = sorted(folder.glob("parts-*.gguf"))
    assert len(shards) == 3
    found = [get(shard, tmp_path) for shard in shards]
    assert found[0] == found[1] == found[2]
    lonely = tmp_path / "alone" / shards[0].name
    lonely.parent.mkdir()
    lonely.write_bytes(shards[0].read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf is missing"):
        get(lonely, tmp_path)


def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes((folder / "m.gguf").read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"m\.gguf cannot be converted: .*cut short"):
        get(damaged, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "converted").glob("*-gguf"))


def test_a_pair_of_files_generates(folder: Path, tiny_settings: Settings) -> None:
    file = str(folder / "m.gguf")
    settings = replace(tiny_settings, target=file, draft=file, quant="", draft_quant="")
    assert choose(settings).target_quant == choose(settings).draft_quant == "gguf"
    engine = Engine.load(settings)
    assert (engine.info.quant, engine.info.draft_quant) == ("gguf-Q4_1", "gguf-Q4_1")
    assert engine.info.batch_invariant
    _, stats = generate(engine, (5, 6, 7), 12, drafter="draft", k_draft=4)
    assert stats.accepted_tokens == stats.draft_tokens > 0  # it is its own draft


def test_a_template_beside_a_file_without_one_is_taken(
    folder: Path, tmp_path: Path, tiny_settings: Settings
) -> None:
    """As the error of such a file advises."""
    file = tmp_path / "m.gguf"
    shutil.copyfile(folder / "m.gguf", file)
    settings = replace(tiny_settings, target=str(file), draft="none", quant="", draft_quant="")
    asked = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja next to the model"):
        Engine.load(settings).render_chat(asked)
    (tmp_path / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    assert Engine.load(settings).render_chat(asked) == "[Hi]"


@pytest.mark.parametrize("source", ["m.gguf", "someone/tiny-GGUF@main:q4/m.gguf"])
def test_weights_cannot_be_asked_for(source: str, tmp_path: Path) -> None:
    settings = Settings(models_dir=tmp_path, target=source)
    (tmp_path / "m.gguf").touch()
    assert choose(settings).target_quant == "gguf"
    with pytest.raises(ConfigError, match=r"SPECOPS_QUANT is int8, but .*m\.gguf is a GGUF"):
        choose(replace(settings, quant="int8"))
    pair = replace(settings, target="a/b", draft=source, draft_quant="int4")
    with pytest.raises(
        ConfigError, match=r"SPECOPS_DRAFT_QUANT is int4.*leave SPECOPS_DRAFT_QUANT"
    ):
        choose(pair)


# -- on the hub ------------------------------------------------------------------------------------


def test_of_a_repository_the_file_alone_is_downloaded(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    shards = {f"q4/{path.name}": path for path in folder.glob("parts-*.gguf")}
    hub.repos[REPO] = {"m.gguf": folder / "m.gguf", "README.md": b"#", **shards}
    whole = HubModel.parse(f"{REPO}@main:m.gguf")
    assert (whole.gguf, whole.repo_folder) == ("m.gguf", "")
    assert names(fetch(whole, tmp_path, ignore)) == {"m.gguf", "download.json"}
    found = get(whole, tmp_path)
    some = HubModel.parse(f"{REPO}:q4/parts-00002-of-00003.gguf")
    assert (some.gguf, some.repo_folder) == ("parts-00002-of-00003.gguf", "q4")
    assert get(some, tmp_path).quant == found.quant
    here = names(fetch(some, tmp_path, ignore))
    assert here == {*(path.name for path in folder.glob("parts-*.gguf")), "download.json"}


def test_the_files_of_a_repository_are_listed(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.repos[REPO] = {"m.gguf": folder / "m.gguf", "other.gguf": b"x"}
    with pytest.raises(ModelError, match=rf"such as {REPO}@main:m.gguf; it has m.gguf, other"):
        fetch(HubModel(REPO), tmp_path, ignore)
    with pytest.raises(ModelError, match=r"contains no missing\.gguf: choose one of its files"):
        fetch(HubModel(REPO, "main", "missing.gguf"), tmp_path, ignore)


def test_a_repository_that_lacks_a_shard_is_refused(hub: Hub, folder: Path, tmp_path: Path) -> None:
    first, _, last = sorted(folder.glob("parts-*.gguf"))
    hub.repos[REPO] = {first.name: first, last.name: last}
    for shard in ("00001", "00002"):
        model = HubModel(REPO, "main", f"parts-{shard}-of-00003.gguf")
        with pytest.raises(ModelError, match=r"whole on the hub: parts-00002-of-00003\.gguf is"):
            fetch(model, tmp_path, ignore)
    assert hub.ranges() == []
