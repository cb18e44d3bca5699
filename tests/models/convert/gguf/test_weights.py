"""Weights of every type reach the conversion as they are in the file."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from specops.models.convert import ExportError
from specops.models.convert.gguf.block_types import TYPES
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.convert.gguf.header import GgufTensor
from specops.models.convert.gguf.rows import GgufRows
from specops.runtime.kernels.packing import WeightType, tile_bytes
from tests.checkpoints import make_checkpoint, make_llama_checkpoint
from tests.models.convert.gguf.files import (
    BLOCKS,
    DRAWN,
    SIZES,
    WRITTEN,
    packed,
    stored_tensors,
    write_gguf,
)

ROWS, COLUMNS = 24, 512
PLAIN = (Kind.BF16, Kind.F16, Kind.F32)


def matrix(kind: Kind, folder: Path) -> tuple[GgufRows, np.ndarray]:
    """Rows of a file with one matrix, and their bytes."""
    values = np.random.default_rng(kind).normal(0, 0.02, (ROWS, COLUMNS)).astype(np.float32)
    values[3, :64] = 0  # blocks with the scale 0,
    values[4, :64] = 0.25  # and with an offset alone
    data = packed(kind, values)
    file = folder / kind.name
    file.write_bytes(b"before" + data.tobytes())
    found = TYPES[kind]
    tensor = GgufTensor("w", file, found.name, (ROWS, COLUMNS), 6, data.nbytes, type=found)
    return GgufRows(tensor), data.view(np.uint8)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_are_those_of_the_file(kind: Kind, tmp_path: Path) -> None:
    rows, data = matrix(kind, tmp_path)
    assert (rows.has_blocks, rows.kind, rows.shape) == (True, kind, (ROWS, COLUMNS))
    np.testing.assert_array_equal(rows.blocks(), data)
    np.testing.assert_array_equal(rows[5:][2:4].blocks(), data[7:9])
    order = np.arange(ROWS)[::-1]
    np.testing.assert_array_equal(rows[order][1:3].blocks(), data[order][1:3])


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_numbers_become_q8_0(kind: Kind, tmp_path: Path) -> None:
    rows, data = matrix(kind, tmp_path)
    expected = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(np.asarray(rows), expected)
    np.testing.assert_array_equal(np.asarray(rows[5:9]), expected[5:9])
    assert (rows.has_blocks, rows.kind) == (False, Kind.Q8_0)
    found = gguf.dequantize(rows.blocks(), Kind.Q8_0)
    largest = np.abs(expected).reshape(ROWS, -1, 32).max(-1, keepdims=True)
    assert (np.abs(found - expected).reshape(ROWS, -1, 32) <= largest / 250).all()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_a_scale_that_is_not_finite_is_refused(kind: Kind, tmp_path: Path) -> None:
    """A block for each place of two bytes: only those are checked that make a number infinite."""
    rows, data = matrix(kind, tmp_path)
    size = TYPES[kind].bytes
    places = range(0, size - 1, 2)
    blocks = np.repeat(data[:1, :size], len(places), 0)
    for block, place in zip(blocks, places, strict=True):
        block[place : place + 2] = 253 if kind == Kind.MXFP4 else (0, 0x7C)
    with np.errstate(all="ignore"):
        harmless = np.isfinite(gguf.dequantize(blocks, kind)).all(1)
    TYPES[kind].check_scales(blocks[harmless])
    assert not harmless.all()
    for place in np.flatnonzero(~harmless):
        with (tmp_path / kind.name).open("r+b") as file:
            file.seek(len("before"))
            file.write(blocks[place].tobytes())
        with pytest.raises(ValueError, match="NaN or infinity"):
            rows[:1].blocks()


@pytest.mark.parametrize("number", [np.nan, 1e9])
def test_plain_numbers_that_no_scale_reaches_are_refused(number: float, tmp_path: Path) -> None:
    rows, data = matrix(Kind.F32, tmp_path)
    data.view(np.float32)[3, 5] = number
    (tmp_path / "F32").write_bytes(b"before" + data.tobytes())
    with pytest.raises(ValueError, match="NaN or infinity"):
        rows.blocks()


def test_sizes_of_blocks_are_the_librarys() -> None:
    for kind, (weights, size) in gguf.GGML_QUANT_SIZES.items():
        found = TYPES[kind]  # those that cannot be read are refused by name
        assert (found.name, found.weights, found.bytes) == (kind.name, weights, size)
    readable = {kind.name for kind in TYPES.values() if kind.readable}
    assert {kind.name for kind in (*WRITTEN, *DRAWN)} == readable


def test_a_weight_takes_the_bits_that_the_page_says() -> None:
    page = (Path(__file__).parents[4] / "docs" / "gguf.md").read_text("utf-8")
    rows = re.findall(r"^\| ([A-Z0-9_, ]+) \| ([0-9.]+) \| ([0-9.]+) \|$", page, re.MULTILINE)
    said = {name: bits for names, *bits in rows for name in names.split(", ")}
    assert said.keys() == {kind.name for kind in BLOCKS}
    for kind in BLOCKS:
        stored = TYPES[kind].bytes / TYPES[kind].weights
        tiled = tile_bytes(WeightType(kind), 1600, 2560) / (1600 * 2560)
        assert tiled <= stored * (1.06 if kind in (Kind.Q2_K, Kind.Q3_K) else 1.03)
        assert [float(bits) for bits in said[kind.name]] == [8 * stored, 8 * tiled]


def test_a_state_that_would_grow_is_refused(tmp_path: Path) -> None:
    """Each token multiplies it by a power of e whose exponent has the sign of the stored number."""
    source = make_checkpoint(tmp_path / "source", "qwen3_5_text", **SIZES)
    file = write_gguf(source, tmp_path / "model.gguf", lambda name: Kind.Q8_0)
    checkpoint, name = GgufCheckpoint(file), "model.layers.0.linear_attn.A_log"
    np.testing.assert_allclose(
        checkpoint.vector(name), stored_tensors(source)[name][[0, 2, 1, 3]], rtol=1e-5
    )
    place = checkpoint.tensors[name].offset
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(np.float32(0.5).tobytes())
    with pytest.raises(ExportError, match=r"blk\.0\.ssm_a is not below 0 everywhere"):
        GgufCheckpoint(file).vector(name)


def test_rows_of_queries_and_keys_stand_where_transformers_has_them(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **SIZES, config={"attention_bias": True})
    file = write_gguf(source, tmp_path / "model.gguf", lambda name: Kind.F32)
    checkpoint = GgufCheckpoint(file)
    tensors = stored_tensors(source)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        if values.ndim == 1:
            np.testing.assert_array_equal(checkpoint.vector(name), values)
        else:
            (part,) = checkpoint.matrix(name).parts
            np.testing.assert_array_equal(np.asarray(part), values)
            np.testing.assert_array_equal(np.asarray(part[3:9]), values[3:9])
