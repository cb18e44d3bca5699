"""A model's own MTP block drafts for it: as its format says, and without changing any output."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specops.config import Settings
from specops.engine.engine import Engine
from specops.models.convert import ExportError, Quantization, export_checkpoint
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.folder import ModelFolder
from specops.models.graph import prepack
from specops.models.graph.weight_cache import used_bytes
from specops.models.head_folder import NGRAMS
from specops.ngrams.storage import Conversation
from specops.ngrams.table import make_table
from specops.request import SamplingParams
from specops.speculation.drafters import accept_probs
from tests.engine import test_eagle_head
from tests.engine.test_eagle_head import (
    DEPTH,
    SAMPLED,
    Guess,
    everything,
    prompt,
    request,
    texts,
)
from tests.generating import run
from tests.models.convert.gguf.files import write_gguf
from tests.mtp_blocks import Reference, make_checkpoint
from tests.passes import Passes, prepared

ONE = np.ones(1, np.float32)
guesses = test_eagle_head.guesses


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mtp") / "target")


@pytest.fixture(scope="module")
def settings(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return test_eagle_head.exact(checkpoint, tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is trusted: chains become as long as they may."""
    monkeypatch.setattr(accept_probs, "_MAX_LOGIT", -5.0)  # above 0.99


def test_guesses_are_the_reference_s(
    checkpoint: Path, settings: Settings, guesses: list[Guess]
) -> None:
    """In chains, among others, after rejections and preemptions, and behind cached beginnings."""
    engine = Engine.load(settings)
    assert engine.info.default_drafter == "cascade"
    everything(engine)
    compare(checkpoint, guesses)


def compare(checkpoint: Path, guesses: list[Guess]) -> None:
    """Compare a sample of guesses, chains among them, with the reference."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    transformers = pytest.importorskip("transformers")
    assert max(len(item.before) for item in guesses) == DEPTH - 1
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    reference = Reference(checkpoint)
    for guess in (*guesses[:: len(guesses) // 20], *guesses[-40::4]):
        with torch.no_grad():
            states = model.model(torch.tensor([guess.text])).last_hidden_state[0]
            expected = reference.logits(guess.text, guess.before, states).numpy()
        np.testing.assert_allclose(guess.logits, expected[: len(guess.logits)], atol=1e-4)


def test_a_gguf_has_the_same_block(checkpoint: Path, settings: Settings, tmp_path: Path) -> None:
    """llama.cpp counts the block as one more layer, and has names of its own for its tensors."""
    plain = gguf.GGMLQuantizationType.F32
    file = write_gguf(checkpoint, tmp_path / "model.gguf", lambda name: plain)
    read = GgufCheckpoint(file)
    for name, values in load_file(checkpoint / "model.safetensors").items():
        found = read.vector(name) if values.ndim == 1 else np.asarray(read._view(name))
        np.testing.assert_array_equal(found, values)
    engine = Engine.load(replace(settings, target=str(file), quant=""))
    assert engine.info.head is not None
    assert everything(engine, drafter="head") == everything(engine, drafter="none")


def test_a_block_reads_states_behind_layers_without_attention(
    settings: Settings, tmp_path: Path, guesses: list[Guess]
) -> None:
    """Qwen3.5's: its attention has a gate and turns a part of each head, its norms are offsets."""
    folder = make_checkpoint(tmp_path / "target", with_states=True)
    settings = replace(settings, target=str(folder))
    run(Engine.load(settings), *(request(prompt(seed, 5 + 40 * seed)) for seed in range(3)))
    compare(folder, guesses)
    kind = gguf.GGMLQuantizationType.Q8_0
    file = write_gguf(folder, tmp_path / "model.gguf", lambda name: kind)
    for target, quant in ((folder, "int8-32"), (file, "")):
        engine = Engine.load(replace(settings, target=str(target), quant=quant))
        assert everything(engine, drafter="head") == everything(engine, drafter="none")


@pytest.mark.parametrize("parting", [100, 140])
def test_beginnings_behind_states_are_used_though_a_block_lacks_the_last_entry(
    parting: int, settings: Settings, tmp_path: Path
) -> None:
    """Two texts part where a snapshot is taken, then where an answer left one, in mid-text."""
    folder = make_checkpoint(tmp_path / "target", with_states=True)
    engine = Engine.load(replace(settings, target=str(folder)))
    common, tails = prompt(1, parting), [prompt(seed, 30) for seed in (2, 3, 4, 5)]
    alike = [request(common + tail, max_new_tokens=4) for tail in tails]
    assert [texts(engine, item)[2] for item in alike] == [0, 0, parting - 1, parting - 1]
    answered = request(prompt(6, 100), max_new_tokens=20)
    ((said,), *_) = texts(engine, answered)
    follows = request([*answered.prompt_tokens, *said[:-1], *prompt(7, 20)])
    assert texts(engine, follows)[2] == 119


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
def test_output_is_that_of_plain_decoding(sampling: SamplingParams, settings: Settings) -> None:
    settings = replace(settings, quant="int4-32-mixed-rtn")
    engine = Engine.load(settings)
    plain = everything(engine, drafter="none", sampling=sampling)
    assert everything(engine, drafter="head", sampling=sampling) == plain
    alone = Engine.load(replace(settings, draft="none"))
    assert set(alone.info.drafters) == {"suffix", "cascade", "none"}
    assert alone.info.head is None
    assert everything(alone, drafter="none", sampling=sampling) == plain


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("mtp.fc.weight"), "mtp.fc.weight is missing"),
        (lambda tensors: tensors.pop("mtp.layers.0.mlp.up_proj.weight"), "up_proj.weight is miss"),
        (lambda tensors: tensors.update({"mtp.more.weight": ONE}), "mtp.more.weight is not part"),
        (lambda tensors: tensors.update({"mtp.layers.1.mlp.up_proj.weight": ONE}), "is not part"),
        (lambda tensors: tensors.update({"mtp.norm.weight": ONE}), r"\[1\], .* expects \[64\]"),
    ],
)
def test_a_block_that_is_not_whole_is_left_out(
    edit: Callable[[dict[str, Any]], object],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model answers without it as well; what is wrong with the model itself is refused."""
    folder = make_checkpoint(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    export_checkpoint(folder, tmp_path / "made", quantization=Quantization.parse("fp32"))
    assert ModelFolder.read(tmp_path / "made", "model").mtp is None
    (warning,) = caplog.messages
    assert warning.startswith("the model's own MTP block is left out: ")
    assert re.search(message, warning)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportError, match=r"norm\.weight is missing"):
        export_checkpoint(folder, tmp_path / "made", quantization=Quantization.parse("fp32"))


@pytest.mark.parametrize("quant", ["int8-32", "int4-32-mixed-rtn"])
@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_block_with_a_damaged_weight_is_left_out(
    value: float, name: str, quant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "target")
    quantization = Quantization.parse(quant)
    whole = load_file(folder / "model.safetensors")
    tensors = {key: values.copy() for key, values in whole.items()}
    tensors[name][3, 3] = value
    save_file(tensors, folder / "model.safetensors")
    export_checkpoint(folder, tmp_path / "made", quantization=quantization)
    assert ModelFolder.read(tmp_path / "made", "model").mtp is None
    (warning,) = caplog.messages
    assert warning.startswith(f"the model's own MTP block is left out: tensor {name}: weights cont")
    without = {key: values for key, values in whole.items() if not key.startswith("mtp.")}
    save_file(without, folder / "model.safetensors")
    export_checkpoint(folder, tmp_path / "without", quantization=quantization)
    for file in ("model.onnx", "model.onnx.data"):
        made, expected = ((tmp_path / part / file).read_bytes() for part in ("made", "without"))
        assert made == expected


def test_a_block_of_a_gguf_with_tensors_of_its_own_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "target")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    own, plain = np.ones((320, 64), np.float32), gguf.GGMLQuantizationType.F32

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(f"blk.{layers}.nextn.embed_tokens.weight", own)

    file = write_gguf(folder, tmp_path / "model.gguf", lambda name: plain, change=add)
    export_checkpoint(file, tmp_path / "made", quantization=None)
    assert ModelFolder.read(tmp_path / "made", "model").mtp is None
    assert "nextn.embed_tokens.weight is not part" in caplog.text


def test_a_table_of_ngrams_takes_no_place_of_a_block(settings: Settings, tmp_path: Path) -> None:
    said = Conversation(0, np.zeros(1, np.int32), np.arange(40, dtype=np.int32) % 4)
    np.save(tmp_path / NGRAMS, make_table([said]))
    for name in ("notes.json", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text("{}")
    info = Engine.load(replace(settings, draft=str(tmp_path))).info
    assert info.head is not None
    assert info.ngrams == tmp_path / NGRAMS
    assert info.default_drafter == "cascade"


def test_a_checkpoint_may_have_lost_its_block(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors")
    export_checkpoint(folder, tmp_path / "made", quantization=Quantization.parse("fp32"))
    assert ModelFolder.read(tmp_path / "made", "model").mtp is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant", ["int8-32", "int4-32-mixed-rtn"])
def test_logits_of_the_first_tokens_are_enough_and_no_weights_are_copied(
    quant: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "target", config={"tie_word_embeddings": tied})
    export_checkpoint(folder, tmp_path / "made", quantization=Quantization.parse(quant))
    graphs = [tmp_path / "made" / name for name in ("model.onnx", "mtp.onnx")]
    sizes, logits = [], []
    for most in (1 << 16, 48):
        monkeypatch.setattr(prepack, "MAX_GUESSABLE", most)
        made = tmp_path / str(most) / "model.onnx"
        made.parent.mkdir()
        prepack.prepack(graphs[0], made, mtp=graphs[1])
        passes = Passes(made.with_name("mtp.onnx"))
        states = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
        passes.runner.given_states[:9] = states
        logits.append(passes.step(0, list(range(9))).copy())
        sizes.append(used_bytes(made.parent))
    assert (logits[0].shape, logits[1].shape) == ((9, 320), (9, 48))
    np.testing.assert_array_equal(logits[0][:, :48], logits[1])
    (alone := tmp_path / "made" / "alone").mkdir()
    shutil.copy(tmp_path / "made" / "model.onnx.data", alone)
    graphs[1] = graphs[1].rename(alone / "model.onnx")
    both = sum(used_bytes(prepared(graph, tmp_path / "alone").parent) for graph in graphs)
    assert sizes[0] == sizes[1] < both - 320 * 64


def test_six_requests_with_a_common_beginning_take_as_much_from_the_cache_as_without_a_block(
    settings: Settings,
) -> None:
    """The block reads the latest states of one that computes it as soon as another waits."""
    engine = Engine.load(replace(settings, slots=6, kv_tokens=2048))
    least = []
    for seed, drafter in enumerate(("none", "head")):
        common = prompt(seed, 150)
        alike = [request(common + prompt(tail, 20), drafter=drafter) for tail in range(2, 8)]
        served = run(engine, *alike)
        cached = [served.stats(item).cached_prompt_tokens for item in alike]
        least.append(min(filter(None, cached)))
    plain, with_block = least
    assert with_block >= plain - 1
