"""Sampling that requests leave open: what a text and a model's files say, and in which order."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specops.config import ConfigError, Settings
from specops.engine.engine import Engine
from specops.models.convert import export_checkpoint
from specops.sampling_defaults import SamplingDefaults
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.gguf.files import SIZES, Kind, write_gguf

CARD = SamplingDefaults(temperature=0.2, top_p=0.9)


def test_a_text_and_its_values() -> None:
    assert SamplingDefaults.parse("temperature=0.2,top_p=0.9") == CARD
    assert SamplingDefaults.parse(" top_p = 0.9 , temperature=.2,") == CARD
    assert SamplingDefaults.parse("") == SamplingDefaults()
    every = "temperature=0,top_k=50,top_p=1,min_p=0.05,repetition_penalty=1.1,presence_penalty=-0.5"
    assert str(SamplingDefaults.parse(every)) == every
    assert type(SamplingDefaults.parse(every).top_k) is int


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temperatur=1", "must be name=value .* temperature, top_k, .*, not 'temperatur=1'"),
        ("0.2", "must be name=value with a name of .*, not '0.2'"),
        ("temperature=warm", "temperature must be a number, not 'warm'"),
        ("temperature=", "temperature must be a number, not ''"),
        ("temperature=2.1", "temperature must be a number from 0 to 2, not 2.1"),
        ("temperature=nan", "temperature must be a number from 0 to 2, not nan"),
        ("top_k=1.5", "top_k must be a number, not '1.5'"),
        ("top_p=0", "top_p must be a number above 0, at most 1, not 0"),
        ("repetition_penalty=11", "repetition_penalty must be .* above 0, at most 10, not 11"),
        ("presence_penalty=3", "presence_penalty must be a number from -2 to 2, not 3"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^SPECOPS_SAMPLING {said}$"):
        Settings.from_env({"SPECOPS_SAMPLING": text})


def test_presets_have_the_sampling_of_their_cards() -> None:
    def sampling(**variables: str) -> str:
        return Settings.from_env(
            {f"SPECOPS_{name}": text for name, text in variables.items()}
        ).sampling

    assert SamplingDefaults.parse(sampling(MODEL="smollm2")) == CARD
    assert SamplingDefaults.parse(sampling(MODEL="qwen3.5-2b")) == SamplingDefaults(
        temperature=1, top_k=20, top_p=1, presence_penalty=2
    )
    assert sampling(MODEL="smollm2", SAMPLING="none") == "none"
    assert sampling(MODEL="smollm2", TARGET="/another") == ""
    assert sampling(MODEL="demo") == ""


@pytest.mark.parametrize(
    ("written", "expected", "unusable"),
    [
        ({"temperature": 0.2, "top_p": 0.9, "eos_token_id": 2, "do_sample": True}, CARD, []),
        ({"temperature": 1, "top_k": None}, SamplingDefaults(temperature=1), []),
        (
            {"temperature": "0.2", "top_p": 0.9, "top_k": 20.5, "min_p": True},
            SamplingDefaults(top_p=0.9),
            ["temperature", "top_k", "min_p"],
        ),
        (
            {"top_p": 0, "repetition_penalty": -1},
            SamplingDefaults(),
            ["top_p", "repetition_penalty"],
        ),
        (float("nan"), SamplingDefaults(), ["generation_config.json"]),
        ([1], SamplingDefaults(), ["generation_config.json"]),
    ],
    ids=str,
)
def test_a_models_file(
    tmp_path: Path, written: Any, expected: SamplingDefaults, unusable: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    read, refused = SamplingDefaults.of_model(tmp_path)
    assert (read, [*refused]) == (expected, unusable)


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[" * 100_000], ids=str)
def test_a_model_without_a_file_or_with_a_damaged_one_has_no_defaults(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_bytes(content)
    read, refused = SamplingDefaults.of_model(tmp_path)
    assert read == SamplingDefaults()
    assert bool(refused) is (content is not None)


def test_settings_go_before_what_the_model_says(
    tmp_path: Path, tiny_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_llama_checkpoint(tmp_path / "model")
    advice = {"temperature": 0.6, "top_k": 20, "min_p": 7}
    (model / "generation_config.json").write_text(json.dumps(advice))
    own = replace(tiny_settings, target=str(model), draft="none")

    def loaded(sampling: str) -> SamplingDefaults:
        return Engine.load(replace(own, sampling=sampling)).info.sampling

    assert loaded("") == SamplingDefaults(temperature=0.6, top_k=20)
    assert "min_p cannot be used: 7" in caplog.text
    assert loaded("top_k=5,top_p=0.9") == SamplingDefaults(temperature=0.6, top_k=5, top_p=0.9)
    assert loaded("none") == SamplingDefaults()


def test_a_gguf_says_it_in_its_metadata(tmp_path: Path) -> None:
    model = make_llama_checkpoint(tmp_path / "model", **SIZES)

    def exported(name: str, **said: Any) -> SamplingDefaults:
        def say(writer: Any) -> None:
            for key, value in said.items():
                add = writer.add_int32 if type(value) is int else writer.add_float32
                (writer.add_string if type(value) is str else add)(f"general.sampling.{key}", value)

        file = write_gguf(model, tmp_path / f"{name}.gguf", lambda name: Kind.Q8_0, change=say)
        export_checkpoint(file, tmp_path / name, quantization=None)
        return SamplingDefaults.of_model(tmp_path / name)[0]

    every = {"temp": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    assert exported("every", **every) == SamplingDefaults(0.7, 40, 0.95, 0.05, 1.1)
    assert exported("wrong", temp="warm", top_k=-1, top_p=0.9) == SamplingDefaults(top_p=0.9)
    assert exported("silent") == SamplingDefaults()
    assert not (tmp_path / "silent" / "generation_config.json").exists()
