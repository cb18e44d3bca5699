"""A whole export: its files, its errors, its progress and its memory."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from specops.models.contract import FORMAT_VERSION
from specops.models.convert import ExportError, Quantization, export_checkpoint, weights
from specops.models.convert.__main__ import main
from specops.models.convert.weights import WeightStore
from specops.system.folders import atomic_folder
from specops.text.chat_template import ChatTemplate
from specops.text.tools.formats import Tool
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.runner import edit_config
from tests.text.tools import scripts

ASKED = [{"role": "user", "content": "a"}]

INT4 = Quantization.parse("int4-32-rtn")


def test_the_manifest_says_what_a_decoder_needs(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", hidden=96, heads=6, kv_heads=2, tie=True)
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    model = export_checkpoint(
        source, tmp_path / "onnx", quantization=INT4, source_digest="sha256:0"
    )
    manifest = json.loads((tmp_path / "onnx" / "specops.json").read_text())
    assert manifest == model.manifest()
    assert manifest == {
        "source_digest": "sha256:0",
        "format_version": FORMAT_VERSION,
        "onnx_file": "model.onnx",
        "family": "llama",
        "quantization": {
            "name": "int4-32-rtn",
            "bits": 4,
            "block": 32,
            "head_bits": 8,
            "embedding_bits": 8,
            "calibrated": False,
        },
        "hidden_size": 96,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "context_length": 256,
        "num_parameters": 320 * 96 + 2 * (96 * (96 + 2 * 32 + 96 + 3 * 160) + 2 * 96) + 96,
        "bos_token_id": 0,
        "eos_token_ids": [0, 7],
    }


def test_the_tokenizer_travels_with_the_graph(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "system.txt").write_text("Be brief.")
    (source / "optimizer.pt").write_text("not wanted")
    export_checkpoint(source, tmp_path / "onnx", quantization=INT4)
    copied = ["chat_template.jinja", "system.txt", "tokenizer.json", "tokenizer_config.json"]
    for name in copied:
        assert (tmp_path / "onnx" / name).read_bytes() == (source / name).read_bytes()
    written = ["checksums.json", "model.onnx", "model.onnx.data", "specops.json"]
    assert sorted(file.name for file in (tmp_path / "onnx").iterdir()) == sorted(copied + written)


def test_a_template_for_tools_goes_into_the_tokenizers_configuration(tmp_path: Path) -> None:
    """A converted folder has no folders."""
    source = make_llama_checkpoint(tmp_path / "source")
    tools = source / "additional_chat_templates" / "tool_use.jinja"
    tools.parent.mkdir()
    tools.write_text(scripts.TEMPLATES["hermes"])
    config = source / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "plain"}))
    export_checkpoint(source, tmp_path / "onnx", quantization=INT4)
    template = ChatTemplate.load(tmp_path / "onnx")
    assert template.render(ASKED) == "plain"
    assert '"name": "f"' in template.render(ASKED, [Tool("f")])
    folders = (source, tmp_path / "onnx")
    before, after = (json.loads((folder / config.name).read_text()) for folder in folders)
    assert before | {"chat_template": after["chat_template"]} == after


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    first, again = tmp_path / "a", tmp_path / "b"
    for folder in (first, again):
        export_checkpoint(source, folder, quantization=INT4)
    (again / "old").touch()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(source, again, quantization=INT4, progress=interrupt)
    assert (again / "old").exists()
    killed = tmp_path / ".b.partial"  # left by an export that was killed
    killed.mkdir()
    (killed / "half").touch()
    export_checkpoint(source, again, quantization=INT4)
    assert {file.name: file.read_bytes() for file in first.iterdir()} == {
        file.name: file.read_bytes() for file in again.iterdir()
    }
    with pytest.raises(ExportError, match="exists and was not written by this command"):
        export_checkpoint(source, source, quantization=INT4)
    with (
        atomic_folder(first),
        pytest.raises(ExportError, match="another process is writing"),
    ):
        export_checkpoint(source, first, quantization=INT4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "source"]


@pytest.mark.parametrize("quantization", ["fp32", "int8", "int4-32-rtn"])
@pytest.mark.parametrize("tie", [True, False])
def test_progress_rises_to_the_size_of_the_weights(
    tmp_path: Path, quantization: str, tie: bool
) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie=tie, dtype="bfloat16")
    seen: list[tuple[int, int]] = []
    model = export_checkpoint(
        source,
        tmp_path / "onnx",
        quantization=Quantization.parse(quantization),
        progress=lambda done, total: seen.append((done, total)),
    )
    done = [step[0] for step in seen]
    assert {step[1] for step in seen} == {2 * model.num_parameters}
    assert done == sorted(done)
    assert len(set(done)) > model.shape.num_layers
    assert done[-1] == 2 * model.num_parameters


@pytest.mark.parametrize("quantization", ["fp32", "int4-rtn"])
def test_memory_stays_far_below_the_size_of_the_model(tmp_path: Path, quantization: str) -> None:
    source = make_llama_checkpoint(
        tmp_path / "source", hidden=512, heads=8, kv_heads=8, layers=4, ffn=2048
    )
    size = (source / "model.safetensors").stat().st_size
    assert size > 60e6
    tracemalloc.start()
    try:
        export_checkpoint(source, tmp_path / "onnx", quantization=Quantization.parse(quantization))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30e6


def test_a_tied_head_may_be_stored(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie=False)
    edit_config(source, tie_word_embeddings=True)
    export_checkpoint(source, tmp_path / "onnx", quantization=INT4)


@pytest.mark.parametrize("quant", ["int4-32", "fp32"])
@pytest.mark.parametrize(
    "reader", ["safetensors", pytest.param("state dict", marks=pytest.mark.reference)]
)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_an_error_names_the_tensor_with_nan(
    name: str, reader: str, quant: str, tmp_path: Path
) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie=True)
    weights = source / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]
    content[start : start + 4] = np.array([0x7FC07FC0], np.uint32).tobytes()  # in any type
    weights.write_bytes(content)
    files: list[Path] = []
    if reader == "state dict":
        torch = pytest.importorskip("torch")
        values = pytest.importorskip("safetensors.torch").load_file(weights)
        files.append(source / "model.pt")
        torch.save(values, files[0])
        weights.unlink()
    quantization = Quantization.parse(quant)
    with pytest.raises(ExportError, match=rf"tensor {name}: weights contain NaN"):
        export_checkpoint(source, tmp_path / "onnx", quantization=quantization, weights=files)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_the_command_exports_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    assert main([str(source), str(tmp_path / "onnx"), "--quant", "int8-32"]) == 0
    assert "llama int8-32" in capsys.readouterr().out
    assert (tmp_path / "onnx" / "model.onnx").is_file()


@pytest.mark.parametrize("arguments", [["source", "onnx", "--quant", "int3"], ["nowhere", "onnx"]])
def test_the_command_fails_with_a_sentence_and_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_llama_checkpoint(tmp_path / "source")
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("specops.models.convert: ")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize(
    ("text", "bits", "block", "name"),
    [
        ("fp32", 32, 128, "fp32"),
        ("int8", 8, 128, "int8-128"),
        ("int8-32", 8, 32, "int8-32"),
        ("int4", 4, 128, "int4-128"),
        ("int4-32", 4, 32, "int4-32"),
        ("int4-rtn", 4, 128, "int4-128-rtn"),
        ("int4-64-rtn", 4, 64, "int4-64-rtn"),
        ("int4-mixed", 4, 128, "int4-128-mixed"),
        ("int4-32-mixed-rtn", 4, 32, "int4-32-mixed-rtn"),
    ],
)
def test_quantization_texts(text: str, bits: int, block: int, name: str) -> None:
    quantization = Quantization.parse(text)
    assert (quantization.bits, quantization.block, quantization.name) == (bits, block, name)
    assert Quantization.parse(name) == quantization


UNKNOWN = ("", "int4-", "int4-33", "int4-x", "fp32-32", "int2", "INT4", "int8-128-rtn")


@pytest.mark.parametrize(
    "text", [*UNKNOWN, "int8-mixed", "int4-rtn-32", "int4-32-zp", "int4-128-hqq"]
)
def test_unknown_quantizations_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"use fp32|block must be"):
        Quantization.parse(text)


def test_as_many_threads_are_busy_as_the_quota_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "available_threads", lambda: 3)  # fewer than the host's CPUs
    with WeightStore(tmp_path / "weights", lambda read: None) as store:
        assert store._pool._max_workers == 3
