"""From a name to a folder: presets are valid, and every layout loads."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import ConfigError, Settings
from specops.engine.engine import Engine
from specops.models import prepare as preparing
from specops.models.head_folder import NGRAMS
from specops.models.hub import HubModel
from specops.models.prepare import ModelError, ModelFolder, Source, choose, prepare
from specops.presets import Preset, chat_model, presets
from specops.request import SamplingParams
from specops.runtime.suffixes import NgramTable
from tests.checkpoints import make_llama_checkpoint
from tests.generating import generate
from tests.models.graph.published_graph import write_published

ALL = sorted(presets().items())
every_preset = pytest.mark.parametrize(("name", "preset"), ALL, ids=[name for name, _ in ALL])


def sources(preset: Preset) -> list[str]:
    return [text for text in (preset.target, preset.draft) if text not in ("", "none")]


@every_preset
def test_a_presets_models_are_bundled_or_pinned_to_a_commit(name: str, preset: Preset) -> None:
    for text in sources(preset):
        hub = HubModel.parse(text)
        if hub is None:
            assert text.startswith(("share/specops/", "./demo/", "./smollm2-ngrams"))
            assert text.startswith("./demo/") == (name == "demo")
        else:
            assert re.fullmatch(r"[0-9a-f]{40}", hub.revision), text
            assert str(hub) == text
    assert sources(preset) or name == "custom"


@every_preset
def test_a_presets_settings_are_settings(name: str, preset: Preset) -> None:
    assert set(preset.settings) <= {"context", "drafter", "kv_dtype", "sampling", "system"}
    variables = {f"SPECOPS_{key.upper()}": str(value) for key, value in preset.settings.items()}
    weights = {"SPECOPS_QUANT": preset.quant, "SPECOPS_DRAFT_QUANT": preset.draft_quant}
    settings = Settings.from_env({**variables, **weights, "SPECOPS_MODEL": name})
    assert {key: getattr(settings, key) for key in preset.settings} == preset.settings
    given = {"SPECOPS_MODEL": name, "SPECOPS_CONTEXT": "512"}
    assert Settings.from_env(given).context == 512


def test_the_same_model_is_pinned_to_the_same_commit_everywhere() -> None:
    hubs = [HubModel.parse(text) for _, preset in ALL for text in sources(preset)]
    pinned = {(hub.repo, hub.revision) for hub in hubs if hub is not None}
    assert len(pinned) == len({repo for repo, _ in pinned})


def test_every_part_of_a_preset_can_be_overridden() -> None:
    choice = choose(Settings(model="tinyllama"))
    assert isinstance(choice.target, HubModel)
    assert choice.target.repo == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    assert choice.name == "tinyllama"
    changed = choose(
        Settings(model="tinyllama", target="a/b@c", draft="d/e", quant="int8", draft_quant="fp32")
    )
    assert changed.name == "b"
    assert (changed.target, changed.draft) == (HubModel("a/b", "c"), HubModel("d/e"))
    assert (changed.target_quant, changed.draft_quant) == ("int8-128", "fp32")
    assert choose(Settings(model="tinyllama", draft="none")).draft is None
    assert choose(Settings(model="tinyllama", target="a/b")).draft is None


def test_a_preset_without_a_draft_leaves_drafting_to_the_models_own_block() -> None:
    assert choose(Settings(model="qwen3.5-2b")).uses_mtp
    assert not choose(Settings(model="qwen3.5-2b", draft="none")).uses_mtp


def test_the_custom_preset_wants_a_target() -> None:
    with pytest.raises(ConfigError, match="=custom names no model: set SPECOPS_TARGET to"):
        choose(Settings(model="custom"))
    assert choose(Settings(model="custom", target="a/b")).target == HubModel("a/b")


def test_the_chat_model_is_asked_for_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SmolLM2.*\.gguf, which is missing: .*smollm2-hf"):
        choose(Settings(model="smollm2"))
    assert choose(Settings()).name == "demo"
    chat_model().parent.mkdir(parents=True)
    chat_model().touch()
    for settings in (Settings(), Settings(model="smollm2")):
        choice = choose(settings)
        assert (choice.name, choice.target) == ("smollm2", chat_model())
        assert choice.draft == settings.models_dir / "smollm2-ngrams"
        assert choice.target_quant == "gguf"
    assert choose(Settings(target="a/b")).name == "b"


def test_a_folder_that_exists_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose(Settings(target="org/name")).target == HubModel("org/name")
    (tmp_path / "models" / "org" / "name").mkdir(parents=True)
    settings = Settings(target="org/name", models_dir=tmp_path / "models")
    assert choose(settings).target == tmp_path / "models" / "org" / "name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert choose(settings).target == Path("org/name")


def test_a_bundled_model_is_below_the_folder_of_models(tmp_path: Path) -> None:
    choice = choose(Settings(model="demo", models_dir=tmp_path))
    assert (choice.target, choice.draft) == (tmp_path / "demo/target", tmp_path / "demo/draft")
    with pytest.raises(ModelError, match=str(tmp_path)):
        get(choice.target, tmp_path)
    given = choose(Settings(models_dir=tmp_path, target="./nowhere"))
    assert given.target == Path("nowhere")


# -- layouts -----------------------------------------------------------------------------------


@pytest.fixture
def genai(tiny_pair: Path, tmp_path: Path) -> Path:
    """The tiny target as onnxruntime-genai's model builder lays it out."""
    folder = tmp_path / "published-int4"
    folder.mkdir()
    export = tiny_pair / "target" / "onnx" / "int4-32-rtn"
    write_published(export / "model.onnx", folder / "model.onnx")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(export / name, folder / name)
    model = {
        "type": "llama",
        "bos_token_id": 1,
        "eos_token_id": [0, 7],
        "context_length": 128,
        "vocab_size": 320,
        "decoder": {"filename": "model.onnx", "num_hidden_layers": 2},
    }
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": {}}))
    return folder


def get(source: Source, cache: Path, quant: str = "int4-32-rtn") -> ModelFolder:
    return prepare(source, quant, name="x", cache_dir=cache, report=lambda detail: None)


def test_a_published_graph_is_used_as_it_is(genai: Path, tmp_path: Path) -> None:
    folder = get(genai, tmp_path / "cache")
    assert (folder.path, folder.graph, folder.quant) == (genai, genai / "model.onnx", "onnx")
    assert (folder.bos_token, folder.end_tokens) == (1, {0, 7})
    assert (folder.vocab_size, folder.context_length, folder.parameters) == (320, 128, 0)
    assert not (tmp_path / "cache").exists()


def describe(folder: Path, **changes: object) -> None:
    """Change fields of a description."""
    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"] |= changes
    file.write_text(json.dumps(config))


def test_a_published_graph_may_have_one_end_token_and_say_its_weights(genai: Path) -> None:
    file = "phi3-mini-cpu-int4-rtn-block-32.onnx"
    describe(genai, eos_token_id=3, decoder={"filename": file})
    (genai / file).touch()
    folder = ModelFolder.read_genai(genai, "x")
    assert (folder.end_tokens, folder.quant) == ({3}, "int4")


@pytest.mark.parametrize("missing", ["model.onnx", "tokenizer.json"])
def test_a_published_folder_that_lacks_a_file_is_refused(
    genai: Path, tmp_path: Path, missing: str
) -> None:
    (genai / missing).unlink()
    with pytest.raises(ModelError, match=f"lacks {missing}"):
        get(genai, tmp_path)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        *(
            ({"filename": name}, "is not a file in the folder")
            for name in ("../model.onnx", "/etc/x")
        ),
        ({}, "filename"),
        ({"filename": "model.onnx", "hidden_size": -1}, "-1 is not a size"),
    ],
)
def test_a_damaged_description_is_refused(
    genai: Path, tmp_path: Path, decoder: dict[str, object], message: str
) -> None:
    describe(genai, decoder=decoder)
    with pytest.raises(ModelError, match=rf"genai_config\.json cannot be used.*{message}"):
        get(genai, tmp_path)


def test_a_checkpoint_without_a_tokenizer_is_refused_before_it_is_converted(
    tmp_path: Path,
) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        get(source, tmp_path / "cache")


def test_a_conversion_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_child: None
) -> None:
    monkeypatch.setattr(preparing, "_REPORT_SECONDS", 0.0)
    source = make_llama_checkpoint(tmp_path / "source")
    said: list[str] = []
    prepare(source, "int8-32", name="x", cache_dir=tmp_path / "cache", report=said.append)
    beginning = f"converting {source} to int8-32"
    percents = [int(text.removeprefix(f"{beginning}: ").removesuffix(" %")) for text in said[1:]]
    assert said[0] == beginning
    assert percents == sorted(set(percents))
    assert len(percents) > 2
    assert percents[-1] == 100


def test_a_long_conversion_tells_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    said: list[str] = []
    tell = preparing._percents("converting", said.append)
    for clock[0], line in ((90.0, "0 %"), (150.0, "5 %"), (390.0, "25 %"), (1278.0, "99 %")):
        tell(line)
    assert said == [
        "converting: 0 %",
        "converting: 5 %, about 19 min left",
        "converting: 25 %, about 15 min left",
        "converting: 99 %",
    ]


def test_what_precedes_a_conversion_says_nothing_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large vocabulary's tokenizer takes seven seconds; then everything takes one."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    said: list[str] = []
    tell = preparing._percents("converting", said.append)
    for percent in range(101):
        clock[0] = 7.0 + 1.3 * percent / 100
        tell(f"{percent} %")
    assert said
    assert not [text for text in said if "left" in text]


# -- drafts ------------------------------------------------------------------------------------


def test_a_draft_may_lack_the_targets_last_ids(tmp_path: Path, tiny_settings: Settings) -> None:
    """The draft's vocabulary is the first 300 of the target's 320 entries."""
    draft = make_llama_checkpoint(tmp_path / "narrow", hidden=128, layers=1, ffn=256, vocab=300)
    settings = replace(tiny_settings, draft=str(draft), draft_quant="int8-128")
    engine = Engine.load(settings)
    assert engine.info.vocab_size == 320
    drafted: set[int] = set()
    for number in range(20):
        prompt = (5, 319, 300 + number, 6)  # a chat's markers are such ids
        sampling = SamplingParams(temperature=2.0, seed=number)
        options = {"drafter": "draft", "k_draft": 4, "sampling": sampling}
        pieces, _ = generate(engine, prompt, 12, **options)
        drafted |= {piece.token for piece in pieces if piece.origin == "draft"}
    assert drafted
    assert max(drafted) < 300


def test_a_presets_draft_that_cannot_be_used_is_left_out(
    tiny_head: Path,
    tiny_settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody asked for it, and the model answers without it; what a setting names must be used."""
    shutil.copytree(Path(tiny_settings.target), tmp_path / "target")
    head = shutil.copytree(tiny_head, tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    preset = Preset("", "./target", "./head", "int8-128", "int8-64")
    monkeypatch.setattr(preparing, "presets", lambda: {"tiny": preset})
    own = replace(tiny_settings, model="tiny", target="", draft="", quant="", models_dir=tmp_path)
    refusal = r"^the draft \S+/head cannot be used: .* Set SPECOPS_DRAFT=none to serve without"
    with pytest.raises(ModelError, match=refusal):
        Engine.load(replace(own, draft="head"))
    caplog.clear()
    engine = Engine.load(own)
    assert engine.info.drafters == ("suffix", "cascade", "none")
    (said,) = [message for message in caplog.messages if "without its draft" in message]
    assert said.endswith("'vocab_size' is 7, but the target has 320 tokens")
    assert generate(engine, (5, 6), 4)[1].generated_tokens == 4


def test_a_head_is_no_target(tiny_head: Path, tiny_settings: Settings) -> None:
    with pytest.raises(ModelError, match="is a draft head: set SPECOPS_DRAFT to it"):
        Engine.load(replace(tiny_settings, target=str(tiny_head), draft="none"))


def test_a_head_of_another_kind_is_not_asked_for_a_tokenizer(
    tiny_settings: Settings, tmp_path: Path
) -> None:
    """As those of EAGLE-1 and Medusa, whose configurations do not say that they are heads."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="not a draft model, and it is not an EAGLE-3"):
        Engine.load(replace(tiny_settings, draft=str(tmp_path)))


def test_a_presets_draft_of_another_vocabulary_is_left_out(
    tiny_settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, source in (("target", tiny_settings.target), ("draft", tiny_settings.draft)):
        shutil.copytree(source, tmp_path / name)
    file = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [*vocabulary][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    preset = Preset("", "./target", "./draft", "int8-128", "int8-64")
    monkeypatch.setattr(preparing, "presets", lambda: {"demo": preset})
    own = replace(tiny_settings, model="demo", target="", draft="", quant="", models_dir=tmp_path)
    said = f"2 ids differ, such as {vocabulary[second]} ({first!r} in the target, {second!r} in"
    with pytest.raises(ModelError, match=re.escape(said)):
        Engine.load(replace(own, draft="draft"))
    assert Engine.load(own).info.drafters == ("suffix", "cascade", "none")
    assert "demo is served without its draft" in caplog.text


def test_the_bundled_ngrams_are_small_and_say_which_model_they_are_for() -> None:
    folder = Settings().models_dir / "smollm2-ngrams"
    NgramTable(folder / NGRAMS, 49152)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# N-grams of {Path(presets()['smollm2'].target).stem}\n")
    assert "How it was made" in card
