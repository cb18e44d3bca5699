"""Heads' checkpoints are read in every published form, and refused where they do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specops.models.convert import ExportError
from specops.models.convert.checkpoint import HEAD
from specops.models.convert.quantization import BlockFormat
from specops.models.convert.weights import WeightStore
from specops.models.eagle.checkpoint import HeadCheckpoint
from specops.models.eagle.layer import EagleLayer, Target
from specops.models.errors import ModelError
from specops.models.graph.tensors import values_of
from specops.models.head_folder import is_head_checkpoint
from tests.checkpoints import make_llama_checkpoint
from tests.eagle_heads import write_head

VOCAB, WIDTH, LAYERS = 320, 64, 8
TARGET = Target(VOCAB, WIDTH, LAYERS, 256)

_OF_LAYERS = ("sliding_window", "rope_scaling")
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
        ({"eagle_aux_hidden_state_layer_ids": []}, (2, 4, 5)),
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


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"layer_types": ["sliding_attention"], "use_sliding_window": True}, 32),
        ({"layer_types": ["full_attention"], "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention"]}, None),
        ({}, None),
    ],
)
def test_a_window_is_used_only_where_the_layer_s_type_says_so(
    settings: dict[str, Any], window: int | None, target: Path, tmp_path: Path
) -> None:
    """The library speculators trains heads with a window unless it is told not to."""
    folder = write_head(tmp_path / "head", target=target, sliding_window=32, **settings)
    assert layer(folder).layers[0].window == window


def test_tokens_can_be_given_by_either_table_or_be_all(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target=target)
    expected = layer(folder).tokens
    change(folder, lambda config, tensors: tensors.pop("d2t"))
    assert layer(folder).tokens == expected
    whole = write_head(tmp_path / "whole", target=target, rows=VOCAB, d2t=False)
    assert layer(whole).tokens == tuple(range(VOCAB))


def test_of_a_large_vocabulary_the_first_tokens_are_guessed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specops.models.eagle.layer.MAX_GUESSABLE", 48)
    folder = write_head(tmp_path / "head", target=target, rows=VOCAB, d2t=False)
    found = layer(folder)
    assert (found.tokens, found.shape.vocab_size) == (tuple(range(48)), 48)
    rows = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found._table(HEAD, {}).parts[0], rows[HEAD][:48])
    chosen = layer(write_head(tmp_path / "chosen", target=target))
    assert len(chosen.tokens) == 100  # those that its makers have chosen stay


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
    """Settings, where the layout has them."""

    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        layer = config.get("transformer_layer_config", config)
        for key, value in values.items():
            (layer if key in {*layer, *_OF_LAYERS} else config)[key] = value

    return edit


def _drop(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def _add(name: str, values: Any) -> Change:
    return lambda config, tensors: tensors.update({name: values})


def _more_rows(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["draft_vocab_size"] = 10**12
    del tensors["lm_head.weight"]


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "speculators"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set(architectures=["Eagle3DeepseekV2ForCausalLM"]), "only EAGLE-3 heads can be run"),
        (_set(architectures=["EagleLlamaForCausalLM"]), "only EAGLE-3 heads can be run"),
        (_set(num_hidden_layers=2), "'num_hidden_layers' must be 1"),
        (_set(hidden_act="gelu"), "'hidden_act' must be 'silu'"),
        (_set(sliding_window=64, layer_types=["odd"]), "'layer_types' is odd"),
        (_set(use_aux_hidden_state=False), "only heads that read the inputs"),
        (_set(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "one rotation"),
        (_add("layers.0.mlp.up_proj.weight", np.ones((96, 64), np.float32)), "is there twice"),
        (_add("model.norm.weight", np.ones(64, np.float32)), "norm.weight is there twice"),
        (_set(vocab_size=400), "'vocab_size' is 400, but the target has 320 tokens"),
        (_set(target_hidden_size=128), "is 128, but the target's states have 64 values"),
        (_set(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), r"\[2, 4, 8\], but there are 8"),
        (_set(eagle_aux_hidden_state_layer_ids=[2, 4]), "must name 3 of the target"),
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
        (_add("fc.weight", np.ones((), np.float32)), "reads 0 values"),
        (_more_rows, "not 1000000000000 integers"),
        (_add("d2t", np.arange(100) * 4), "d2t is damaged"),
        (_add("d2t", -np.arange(100)), "d2t is damaged"),
        (_add("d2t", np.zeros(100, np.float32)), "not 100 integers"),
        (_add("d2t", np.r_[np.zeros(99, np.int64), 300]), "d2t is damaged"),
        (_add("d2t", np.zeros(101, np.int64)), "not 100 integers"),
        (_set(hidden_size="64"), "'hidden_size' must be a positive integer"),
        (_set(hidden_size=None), "'hidden_size'"),
        (_set(hidden_size=128), "'hidden_size' is 128, but the target's states have 64 values"),
        (_set(num_key_value_heads=3), "'num_key_value_heads' must divide"),
        (_set(head_dim=20), "'head_dim' is 20"),
        (_set(rope_scaling={"rope_type": "odd", "factor": 2.0}), "rope"),
        (
            _set(draft_vocab_size=None),
            r"not 320 integers|\[100, 64\], config.json expects \[320, 64\]",
        ),
        (_add("embed_tokens.weight", np.ones((100, 64), np.float32)), r"expects \[320, 64\]"),
        (_add("midlayer.self_attn.kv_a_proj.weight", np.ones((8, 64), np.float32)), "is not part"),
        (_add("layers.1.mlp.up_proj.weight", np.ones((96, 64), np.float32)), "is not part"),
        (_add("midlayer.mlp.up_proj.weight", np.ones((96, 64), np.int8)), "has dtype I8"),
        (_drop("norm.weight"), "norm.weight is missing"),
        (_drop("midlayer.self_attn.k_proj.weight"), "k_proj.weight is missing"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    edit: Change, message: str, nested: bool, target: Path, tmp_path: Path
) -> None:
    folder = change(write_head(tmp_path / "head", target=target, nested=nested), edit)
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


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "", "[1]", "null", '{"eagle_config": [1]}',
             '{"transformer_layer_config": "x"}', "version https://git-lfs.github.com/spec/v1"],
)  # fmt: skip
def test_a_damaged_configuration_is_said_to_be_damaged(text: str, tmp_path: Path) -> None:
    """It was taken for a model's, which then seemed to lack a tokenizer."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json is damaged .*: download it again"):
        is_head_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"])
def test_heads_of_multimodal_models_have_the_same_layer(
    name: str, target: Path, tmp_path: Path
) -> None:
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    folder = write_head(tmp_path / "head", target=target, architectures=[name], rope_scaling=rope)
    assert layer(folder).layers_read == (2, 4, 5)


def test_a_head_may_have_the_architecture_of_its_target(target: Path, tmp_path: Path) -> None:
    """As those of EAGLE's authors: they say how many tokens they guess."""
    folder = write_head(tmp_path / "head", target=target, architectures=["LlamaForCausalLM"])
    assert is_head_checkpoint(folder)
    assert layer(folder).layers_read == (2, 4, 5)
    change(folder, _set(architectures=["OPTForCausalLM"]))
    with pytest.raises(ExportError, match="OPTForCausalLM; only EAGLE-3 heads"):
        layer(folder)


def test_tied_output_rows_are_those_of_the_tokens_in_any_weights(
    target: Path, tmp_path: Path
) -> None:
    """They are some of the embedding's rows, in the same file and format."""
    folder = write_head(
        tmp_path / "head", target=target, embedding=True, output=False, tie_word_embeddings=True
    )
    found = layer(folder)
    with WeightStore(tmp_path / "weights", lambda nbytes: None) as store:
        whole, rows = found._table("embed_tokens.weight", {}), found._table(HEAD, {})
        stored = BlockFormat(8, 64)
        store.table_blocks("embedding", whole, stored)
        store.matmul_blocks("logits", rows, stored)
    codes = {item.name: values_of(item, tmp_path) for item in store.initializers}
    table = codes["embedding.codes"][list(found.tokens)]
    np.testing.assert_array_equal(codes["logits.codes"].reshape(len(table), -1), table)
