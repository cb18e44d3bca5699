"""The GGUF file says what the checkpoint says, read back by the format's own reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints import make_llama_checkpoint

gguf = pytest.importorskip("gguf")

from bench.peers import llama_model  # noqa: E402 - needs gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("gguf") / "checkpoint", dtype="float16")


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> gguf.GGUFReader:
    file = checkpoint.with_name("model.gguf")
    llama_model.write_gguf(checkpoint, file)
    return gguf.GGUFReader(file)


def test_every_tensor_comes_back_under_its_name(reader: gguf.GGUFReader, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    expected = load_file(checkpoint / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    assert len(found) == len(expected)
    for name, tensor in expected.items():
        data = found[names.get_name(name, try_suffixes=(".weight",))]
        assert data.dtype == (np.float32 if tensor.ndim == 1 else np.float16)
        rows = heads.get(name.split(".")[-2])
        if rows:
            # The reader's reordering back: pairs of neighbours to halves.
            head = data.shape[0] // rows
            data = data.reshape(rows, head // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
        np.testing.assert_array_equal(data, tensor.astype(data.dtype))


def test_the_description_is_the_configurations(reader: gguf.GGUFReader, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "llama"
    assert values["llama.block_count"] == config["num_hidden_layers"]
    assert values["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert values["llama.feed_forward_length"] == config["intermediate_size"]
    assert values["llama.vocab_size"] == config["vocab_size"]
    assert values["llama.rope.freq_base"] == config["rope_theta"]
    assert values["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])


def test_rotating_neighbours_is_rotating_halves_reordered() -> None:
    heads, head, hidden = 2, 8, 3
    rng = np.random.default_rng(0)
    weight, vector = rng.standard_normal((heads * head, hidden)), rng.standard_normal(hidden)
    angles = rng.standard_normal(head // 2)
    turn = np.exp(1j * angles)
    halves = (weight @ vector).reshape(heads, head)
    rotated = (halves[:, : head // 2] + 1j * halves[:, head // 2 :]) * turn
    pairs = (llama_model.interleaved(weight, heads) @ vector).reshape(heads, head // 2, 2)
    np.testing.assert_allclose((pairs[..., 0] + 1j * pairs[..., 1]) * turn, rotated)
