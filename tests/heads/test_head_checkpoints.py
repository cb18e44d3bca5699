"""Heads' checkpoints are read in every published form, and refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specops.heads.checkpoint import HeadCheckpoint
from specops.heads.layer import EagleLayer, Target
from specops.models.convert import ExportError
from specops.models.head_folder import is_head_checkpoint
from tests.checkpoints import make_llama_checkpoint
from tests.eagle_heads import write_head

VOCAB, WIDTH, LAYERS = 320, 64, 8
TARGET = Target(VOCAB, WIDTH, LAYERS, 256)

Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("target") / "t", layers=LAYERS)


def layer(folder: Path, target: Target = TARGET) -> EagleLayer:
    return EagleLayer(HeadCheckpoint(folder), target)


def change(folder: Path, edit: Change) -> Path:
    """Edit a head's settings and tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_head_says_what_it_reads_and_what_it_lacks(target: Path, tmp_path: Path) -> None:
    found = layer(write_head(tmp_path / "head", target=target, output=False))
    assert found.layers_read == (2, 4, 5)
    assert found.shared == ("embed_tokens.weight", "lm_head.weight")
    assert (found.fuses, found.norm_before_residual, len(found.tokens)) == (True, False, 100)
    nested = layer(
        write_head(
            tmp_path / "nested", target=target, nested=True, spelling="layers.0.", hidden=48,
            embedding=True, eagle_aux_hidden_state_layer_ids=None,
        )
    )  # fmt: skip
    assert (nested.layers_read, nested.shared) == ((2, 4, 5), ())
    assert nested.norm_before_residual


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (0, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"target_layer_ids": [-1, 3, 6]}, (0, 4, 7)),
    ],
)
def test_layers_are_counted_as_each_program_counts_them(
    settings: dict[str, Any], layers: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    assert layer(write_head(tmp_path / "head", target=target, **settings)).layers_read == layers


def test_tokens_can_be_given_by_either_table_or_be_all(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target=target)
    expected = layer(folder).tokens
    change(folder, lambda config, tensors: tensors.pop("d2t"))
    assert layer(folder).tokens == expected
    whole = write_head(tmp_path / "whole", target=target, rows=VOCAB, d2t=False)
    assert layer(whole).tokens == tuple(range(VOCAB))


def test_weights_in_8_bits_have_scales_beside_them(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target=target)
    name = "midlayer.mlp.down_proj.weight"
    groups = load_file(folder / "model.safetensors")[name].reshape(64, 3, 32)
    scales = np.abs(groups).max(-1) / 127
    codes = np.round(groups / scales[:, :, None]).astype(np.int8)

    def store(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name], tensors[f"{name}_scale"] = codes.reshape(64, 96), scales.astype(np.float16)

    read = layer(change(folder, store)).checkpoint.matrix("layers.0.mlp.down_proj.weight")
    expected = codes * scales.astype(np.float16).astype(np.float32)[:, :, None]
    np.testing.assert_array_equal(read.parts[0], expected.reshape(64, 96))
    wrong = [scales[:5], scales[:, :0], np.ones((64, 5)), np.ones(()), scales.astype(np.int32)]
    for values in wrong:
        change(folder, _add(f"{name}_scale", np.ascontiguousarray(values)))
        with pytest.raises(ExportError, match="does not fit the weights"):
            layer(folder)


def test_a_state_dict_of_torch_has_its_integers_too(target: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    folder = write_head(tmp_path / "head", target=target)
    expected = layer(folder).tokens
    tensors = load_file(folder / "model.safetensors")
    file = folder / "pytorch_model.bin"
    torch.save({name: torch.from_numpy(values) for name, values in tensors.items()}, file)
    (folder / "model.safetensors").unlink()
    assert EagleLayer(HeadCheckpoint(folder, [file]), TARGET).tokens == expected


def _set(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def _drop(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def _add(name: str, values: Any) -> Change:
    return lambda config, tensors: tensors.update({name: values})


def _more_rows(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["draft_vocab_size"] = 10**12
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set(architectures=["Eagle3DeepseekV2ForCausalLM"]), "only EAGLE-3 heads can be run"),
        (_set(architectures=["EagleLlamaForCausalLM"]), "only EAGLE-3 heads can be run"),
        (_set(num_hidden_layers=2), "'num_hidden_layers' must be 1"),
        (_set(hidden_act="gelu"), "'hidden_act' must be 'silu'"),
        (_set(sliding_window=64), "'sliding_window' is set"),
        (_set(vocab_size=400), "'vocab_size' is 400, but the target has 320 tokens"),
        (_set(target_hidden_size=128), "is 128, but the target's states have 64 values"),
        (_set(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), r"\[2, 4, 8\], but there are 8"),
        (_set(eagle_aux_hidden_state_layer_ids=[2, 4]), "must be 3 layers"),
        (_set(norm_before_fc=True), "input_norm.weight is missing"),
        (_set(fc_norm=True), r"fc_norm.0.weight is missing"),
        (_set(draft_vocab_size=99), r"shape \[100, 64\], config.json expects \[99, 64\]"),
        (_drop("fc.weight"), "fc.weight is missing, which joins the states"),
        (_drop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
        (_set(target_layer_ids=[1, 3, 7]), r"\[2, 4, 8\], but there are 8"),
        (_set(eagle_aux_hidden_state_layer_ids="2"), "must be a list of integers"),
        (_add("midlayer.self_attn.q_norm.weight", np.ones(16, np.float32)), "k_norm.weight is mis"),
        (_add("midlayer.mlp.norm.weight", np.ones(16, np.float32)), "mlp.norm.weight is not"),
        (_add("fc.weight", np.ones((64, 200), np.float32)), "reads 200 values"),
        (_set(calibration=[5]), "'calibration' must be pairs of numbers"),
        (_set(calibration=[[1, 0], [1, "a"]]), "'calibration' must be pairs of numbers"),
        (_add("fc.weight", np.ones((), np.float32)), "reads 0 values"),
        (_more_rows, "not 1000000000000 integers"),
        (_add("d2t", np.arange(100) * 4), "d2t is damaged"),
        (_add("d2t", -np.arange(100)), "d2t is damaged"),
        (_add("d2t", np.zeros(100, np.float32)), "not 100 integers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    edit: Change, message: str, target: Path, tmp_path: Path
) -> None:
    folder = change(write_head(tmp_path / "head", target=target), edit)
    assert is_head_checkpoint(folder)
    with pytest.raises(ExportError, match=message):
        layer(folder)


def test_tables_of_another_width_cannot_be_the_target_s(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target=target, hidden=48)
    with pytest.raises(ExportError, match="must be in the checkpoint"):
        layer(folder)


def test_without_d2t_a_part_of_the_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target=target, d2t=False)
    with pytest.raises(ExportError, match="d2t is missing, for 100 of the tokens"):
        layer(folder)


def test_a_model_is_no_head(target: Path, tmp_path: Path) -> None:
    assert not is_head_checkpoint(target)
    assert not is_head_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert not is_head_checkpoint(tmp_path)
