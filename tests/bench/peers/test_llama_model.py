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


def test_every_tensor_comes_back_under_its_name(tmp_path: Path) -> None:
    checkpoint = make_llama_checkpoint(tmp_path / "checkpoint", dtype="float16")
    file = tmp_path / "model.gguf"
    llama_model.write_gguf(checkpoint, file)
    reader = gguf.GGUFReader(file)
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
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "llama"
    assert values["llama.rope.freq_base"] == config["rope_theta"]
    assert values["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
