"""Reading safetensors folders: every dtype and layout, and errors that name the file or tensor."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from specops.models.convert import ExportError
from specops.models.convert.checkpoint import Checkpoint
from specops.models.errors import ModelError
from tests.checkpoints import make_llama_checkpoint

VALUES = np.random.default_rng(0).standard_normal((6, 10), np.float32)


def folder_with(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A minimal checkpoint folder, its weights written by the safetensors library itself."""
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_and_view_reads_what_the_library_wrote(tmp_path: Path, dtype: type) -> None:
    stored = VALUES.astype(dtype)
    tensors = {"m": stored, "q": stored[:4].copy(), "k": stored[4:].copy(), "v": stored[0].copy()}
    checkpoint, expected = Checkpoint(folder_with(tmp_path, tensors)), stored.astype(np.float32)
    np.testing.assert_array_equal(checkpoint.vector("v"), expected[0])
    for matrix, wanted in (
        (checkpoint.matrix("m"), expected),
        (checkpoint.matrix("q", "k"), expected),  # stacked
        (checkpoint.matrix("m", transposed=True), expected.T),
        (checkpoint.matrix_rows("m", 2, 5), expected[2:5]),
    ):
        assert matrix.shape == wanted.shape
        np.testing.assert_array_equal(matrix.columns(1, 4), wanted[:, 1:4])
        rows = np.concatenate(list(matrix.rows(3)))
        np.testing.assert_array_equal(rows.astype(np.float32), wanted)


def test_shards_read_like_a_single_file(tmp_path: Path) -> None:
    single = Checkpoint(make_llama_checkpoint(tmp_path / "single"))
    sharded = Checkpoint(make_llama_checkpoint(tmp_path / "sharded", shards=4))
    assert len(sharded.files) == 4
    assert single.tensors.keys() == sharded.tensors.keys()
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(*(part.matrix(name).columns(0, 9) for part in (single, sharded)))


def tensor_file(header: str) -> bytes:
    """A file with this header and 16 bytes of weights."""
    return len(header).to_bytes(8, "little") + header.encode() + bytes(16)


CONFIG = {"config.json": b"{}"}
ENTRY = '{"m": {"dtype": "F32", "shape": [%s, 2], "data_offsets": [0, %s]}}'
REFUSED: list[tuple[dict[str, bytes], str]] = [
    ({}, r"config\.json is missing"),
    ({"config.json": b"{"}, r"config\.json.*not valid JSON"),
    ({"config.json": b"[]"}, r"config\.json.*JSON object"),
    (CONFIG, r"model\.safetensors is missing; only safetensors"),
    (
        {**CONFIG, "pytorch_model.bin": b"pickle"},
        r"model\.safetensors is missing; only safetensors",
    ),
    *(
        ({**CONFIG, "model.safetensors": tensor_file(header)}, message)
        for header, message in (
            (ENTRY % (2, 12), "is truncated"),
            (ENTRY % (9, 72), "is truncated"),
            ('{"m": {"dtype": "F32", "shape": [2, 2]}}', "not a safetensors file"),
            ('{"m": 5}', "not a safetensors file"),
            ("[1, 2]", "not a safetensors file"),
            ("not JSON", "not a safetensors file"),
        )
    ),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_a_folder_that_is_no_checkpoint_is_refused(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match=message):
        Checkpoint(tmp_path)
    with pytest.raises(ExportError, match="nowhere is not a folder"):
        Checkpoint(tmp_path / "nowhere")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_llama_checkpoint(tmp_path / "model", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ExportError, match=r"model-00002-of-00003\.safetensors is missing"):
        Checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    folder = make_llama_checkpoint(tmp_path / "model", shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json: key 'weight_map'"):
        Checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 7, 8, 200, -1])
def test_a_truncated_file_is_refused_before_any_tensor_is_read(tmp_path: Path, kept: int) -> None:
    folder = make_llama_checkpoint(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ExportError, match=r"model\.safetensors is truncated"):
        Checkpoint(folder)


def test_an_already_quantized_tensor_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"codes": np.zeros((2, 2), np.int8)})
    with pytest.raises(ExportError, match="tensor codes has dtype I8"):
        Checkpoint(folder).expect({"codes": (2, 2)})


def test_ignored_tensors_may_have_any_type(tmp_path: Path) -> None:
    """Old GPT-2 checkpoints store their causal masks as bytes."""
    folder = folder_with(tmp_path, {"h.attn.bias": np.ones((2, 2), np.uint8), "m": VALUES})
    Checkpoint(folder).expect({"m": VALUES.shape}, ignored=("*.attn.bias",))


def test_a_checkpoint_without_a_head_is_named_as_with_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder_with(tmp_path, {"h.0.m": VALUES}))
    checkpoint.expect({"transformer.h.0.m": VALUES.shape})
    np.testing.assert_array_equal(checkpoint.matrix("transformer.h.0.m").columns(0, 10), VALUES)
