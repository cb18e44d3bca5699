"""Loading: what is asked for is what is loaded, and what does not fit is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import ConfigError, Settings
from specops.engine.engine import Engine
from specops.engine.model_info import ModelState
from specops.models.graph.weight_cache import used_bytes
from specops.models.prepare import ModelError, prepare
from specops.request import GenerationRequest, PromptTooLong
from specops.runtime import kernels
from specops.runtime.memory_plan import AvailableMemory, MemoryPlanError
from specops.system.memory import read_memory
from tests.checkpoints import make_llama_checkpoint
from tests.serving.service import shared_engine


def test_the_engine_tells_what_it_loaded(tiny_settings: Settings) -> None:
    info = shared_engine(tiny_settings).info
    assert (info.name, info.quant, info.draft_quant) == ("target", "int8-128", "int8-128")
    assert info.drafters == ("draft", "suffix", "cascade", "none")
    assert info.default_drafter == "cascade"
    assert (info.context, info.slots, info.vocab_size) == (128, 3, 320)
    assert (info.kv_tokens, info.kv_dtype) == (3 * 128, "fp16")
    # 2 layers x 2 heads x 64 for the target, 1 x 2 x 32 for the draft; keys and values, float16.
    assert info.kv_bytes == (2 * 2 * 64 + 2 * 32) * 2 * 2 * 3 * 128
    assert info.batch_invariant
    assert info.kernels in kernels.NAMES


def test_without_a_draft_suffixes_are_looked_up(tiny_settings: Settings) -> None:
    info = shared_engine(replace(tiny_settings, draft="none")).info
    assert info.drafters == ("suffix", "cascade", "none")
    assert info.default_drafter == "suffix"


def test_the_context_can_be_made_shorter_but_not_longer(tiny_settings: Settings) -> None:
    assert Engine.load(replace(tiny_settings, context=64)).info.context == 64
    assert Engine.load(replace(tiny_settings, context=4096)).info.context == 128


def test_products_that_are_not_ours_are_named(tiny_settings: Settings) -> None:
    info = Engine.load(replace(tiny_settings, quant="fp32", draft="none")).info
    assert not info.batch_invariant
    assert "logits" in info.ort_matmuls


def test_a_cache_that_does_not_fit_is_refused(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = AvailableMemory(replace(read_memory(), limit=100 << 20), free=70 << 20, held=30 << 20)
    monkeypatch.setattr("specops.runtime.memory_plan.AvailableMemory.read", lambda: little)
    with pytest.raises(MemoryPlanError, match="raise the memory limit"):
        Engine.load(replace(tiny_settings, max_batched_tokens=4096))


def test_without_a_chat_model_the_log_says_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))  # an environment without it
    with pytest.raises(ModelError, match="demo"):
        Engine.load(Settings(models_dir=tmp_path))
    assert "there is no chat model" in caplog.text
    assert "serving the demo pair" in caplog.text


def test_a_checkpoint_with_another_tokenizer_is_converted_anew(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "mine")

    def convert() -> Path:
        return prepare(source, "int8-32", name="x", cache_dir=tmp_path, report=print).path

    first = convert()
    assert first.name.startswith("mine-")
    with (source / "tokenizer.json").open("a") as file:
        file.write("\n")
    second = convert()
    assert second.name.startswith("mine-")
    assert second != first


def test_a_broken_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "specops.json").write_text("{}")
    with pytest.raises(ModelError, match="export the model again"):
        prepare(tmp_path, "int8-128", name="x", cache_dir=tmp_path, report=print)


def test_passes_are_measured_once_for_each_build_of_the_kernels(
    tiny_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(tiny_settings, draft="none", cache_dir=tmp_path / "cache")

    def measured() -> int:
        Engine.load(settings)
        return len(list((settings.cache_dir / "costs").iterdir()))

    assert [measured(), measured()] == [1, 1]
    rebuilt = tmp_path / "rebuilt.so"
    rebuilt.write_bytes(kernels.LIBRARY.read_bytes() + b"\0")
    monkeypatch.setattr(kernels, "LIBRARY", rebuilt)
    assert measured() == 2


def test_weights_are_laid_out_in_the_cache_folder_and_mapped_from_there(
    tiny_settings: Settings, tmp_path: Path
) -> None:
    reports: list[tuple[ModelState, str]] = []
    engine = Engine.load(
        replace(tiny_settings, draft="none", cache_dir=tmp_path),
        lambda state, detail, download=None: reports.append((state, detail)),
    )
    (prepacked,) = (tmp_path / "prepacked").iterdir()
    assert prepacked.name.startswith("target-int8-128-")
    stored = sum(path.stat().st_size for path in prepacked.glob("model.onnx*"))
    assert engine.info.weight_bytes == used_bytes(prepacked) == stored
    assert {state for state, _ in reports} == {ModelState.LOADING}
    steps = [detail.split()[0] for _, detail in reports]
    assert steps == ["opening", "laying", "opening", "running", "measuring"]


def test_a_request_is_fitted_into_the_context(tiny_settings: Settings) -> None:
    engine = shared_engine(tiny_settings)
    request = GenerationRequest(request_id="x", prompt_tokens=(1,) * 120, max_new_tokens=50)
    assert engine.admit(request).max_new_tokens == 8
    with pytest.raises(PromptTooLong, match=r"128 tokens.*at most 127"):
        engine.admit(replace(request, prompt_tokens=(1,) * 128))
    full = replace(request, prompt_tokens=(1,) * 128, max_new_tokens=0)
    assert engine.admit(full) == full


def test_leaving_early_leaves_nothing_behind(tiny_settings: Settings) -> None:
    engine = Engine.load(tiny_settings)
    request = GenerationRequest(request_id="x", prompt_tokens=(1, 2), max_new_tokens=50)
    outputs = engine.generate(request)
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert not engine.scheduler.busy
    assert engine.scheduler.target.cache.tokens == 0
    assert engine.scheduler.target.cache.used_blocks == 0


def test_a_default_drafter_that_lacks_its_means_names_the_setting(
    tiny_settings: Settings,
) -> None:
    with pytest.raises(ConfigError, match=r"SPECOPS_DRAFTER=head needs a draft head, .*SPECOPS_DR"):
        Engine.load(replace(tiny_settings, draft="none", drafter="head"))
