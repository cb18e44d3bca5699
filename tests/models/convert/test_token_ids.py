"""The tokens that begin and end a text: from every file that names them, and only real ones."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specops.models.convert import ExportedModel, ExportError, Quantization, export_checkpoint
from specops.models.folder import ModelFolder
from specops.models.prepare import prepare
from specops.text.tokenizer import Tokenizer
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.runner import edit_config

END = 0  # <|endoftext|>


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = make_llama_checkpoint(tmp_path / "source")
    (folder / "tokenizer_config.json").unlink()  # it names an end token, too
    return folder


def export(source: Path) -> ExportedModel:
    return export_checkpoint(
        source, source.parent / "out", quantization=Quantization.parse("fp32"), source_digest="0"
    )


def write(source: Path, file: str, **content: Any) -> None:
    if file == "config.json":
        edit_config(source, **content)
    else:
        (source / file).write_text(json.dumps(content))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eos_token_id": -1}, (END, ())),
        ({"eos_token_id": [END, 320, 5]}, (END, (END, 5))),
        ({"bos_token_id": 320}, (None, (END,))),
        ({"bos_token_id": -1, "eos_token_id": [5, 5], "pad_token_id": -1}, (None, (5,))),
    ],
)
def test_ids_that_are_no_tokens_are_left_out(
    file: str,
    changes: dict[str, Any],
    expected: tuple[int | None, tuple[int, ...]],
    source: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(source, file, **changes)
    model = export(source)
    assert (model.bos_token_id, model.eos_token_ids) == expected
    assert "is ignored: the vocabulary has 320 tokens" in caplog.text
    assert ("has no end token" in caplog.text) == (not model.eos_token_ids)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [True, "0", [0, "1"], {"id": 0}])
def test_what_is_no_id_is_refused(file: str, value: Any, source: Path) -> None:
    write(source, file, bos_token_id=0, eos_token_id=value)
    with pytest.raises(ExportError, match="key 'eos_token_id' must be token ids"):
        export(source)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


@pytest.mark.parametrize(("above", "expected"), [(None, (3, (4,))), (5, (3, (5,)))])
def test_the_text_part_of_a_multimodal_models_config_names_tokens_too(
    above: int | None, expected: tuple[int, tuple[int, ...]], source: Path
) -> None:
    """As transformers has it: what stands above it, null apart, has precedence."""
    text = json.loads((source / "config.json").read_text())
    text |= {"bos_token_id": 3, "eos_token_id": 4, "model_type": "mistral"}
    nested = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps({**nested, "eos_token_id": above}))
    model = export(source)
    assert (model.bos_token_id, model.eos_token_ids) == expected


@pytest.mark.parametrize("eos", [END, None, [END], -1])
def test_the_tokenizers_end_token_ends_a_text_too(eos: Any, source: Path) -> None:
    """It is the one that the chat template writes at the end of a turn."""
    text, token = max(Tokenizer.load(source).vocabulary().items(), key=lambda entry: entry[1])
    edit_config(source, eos_token_id=eos)
    write(source, "tokenizer_config.json", eos_token=text)
    assert export(source).eos_token_ids == ((END, token) if eos in (END, [END]) else (token,))


def test_an_end_token_that_is_only_beside_tokenizer_json(source: Path) -> None:
    size = len(Tokenizer.load(source).vocabulary())
    edit_config(source, eos_token_id=None, bos_token_id=None)
    tokens = {"<|im_end|>": size, "<|im_start|>": size + 1}
    added = {str(index): {"content": text, "special": True} for text, index in tokens.items()}
    names = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    write(source, "tokenizer_config.json", added_tokens_decoder=added, **names)
    model = export(source)
    assert (model.bos_token_id, model.eos_token_ids) == (size + 1, (size,))
    served = Tokenizer.load(model.path)
    assert served.encode("a<|im_end|>")[-1] == size
    assert served.shown_bytes(size) == b""

    (source / "tokenizer_config.json").unlink()
    write(source, "added_tokens.json", **tokens)
    write(source, "special_tokens_map.json", **names)
    assert export(source).eos_token_ids == (size,)
    assert Tokenizer.load(model.path).shown_bytes(size) == b""


def test_warnings_of_the_converter_are_logged_by_the_service(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(source, eos_token_id=[-1, END])
    model = prepare(
        source, "int8-32", name="m", cache_dir=tmp_path / "cache", report=lambda _: None
    )
    assert model.end_tokens == {END}
    assert [
        (r.levelno, "'eos_token_id' -1 is ignored" in r.getMessage()) for r in caplog.records
    ] == [(logging.WARNING, True)]


@pytest.mark.parametrize(("eos", "ends"), [(-1, set()), ([5, 320, -1], {5}), (None, set())])
def test_a_genai_description_with_ids_that_are_no_tokens(
    eos: Any, ends: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {
        **{"vocab_size": 320, "context_length": 64, "bos_token_id": -1, "pad_token_id": -1},
        **{"eos_token_id": eos, "decoder": {"filename": "model.onnx"}},
    }
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": model}))
    for name in ("model.onnx", "tokenizer.json"):
        (tmp_path / name).touch()
    folder = ModelFolder.read_genai(tmp_path, "m")
    assert (folder.bos_token, folder.end_tokens) == (None, ends)
    assert "-1 is ignored: the vocabulary has 320 tokens" in caplog.text
