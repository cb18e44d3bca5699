"""Weights of every type are those of the library that writes them, with the same blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from specops.models.convert.checkpoint import Matrix
from specops.models.convert.gguf import GgufCheckpoint
from specops.models.convert.gguf.block_types import TYPES, values_of
from specops.models.convert.gguf.header import GgufTensor
from specops.models.convert.gguf.rows import GgufRows
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.dequantize import dequantize_blockwise
from tests.models.convert.gguf.files import (
    DRAWN,
    EXACT,
    SIZES,
    WRITTEN,
    packed,
    stored_tensors,
    write_gguf,
)

ROWS, COLUMNS = 24, 512
kinds = pytest.mark.parametrize("kind", [*WRITTEN, *DRAWN], ids=lambda kind: kind.name)


def matrix(kind: Kind, folder: Path) -> tuple[GgufRows, np.ndarray]:
    """Rows of a file with one matrix, and the numbers that the library reads."""
    values = np.random.default_rng(kind).normal(0, 0.02, (ROWS, COLUMNS)).astype(np.float32)
    values[3, :64] = 0  # blocks with the scale 0,
    values[4, :64] = 0.25  # and with an offset alone
    data = packed(kind, values)
    file = folder / kind.name
    file.write_bytes(b"before" + data.tobytes())
    found = TYPES[kind]
    tensor = GgufTensor("w", file, found.name, (ROWS, COLUMNS), 6, data.nbytes, type=found)
    return GgufRows(tensor), gguf.dequantize(data, kind)


@kinds
def test_numbers_are_those_of_the_library(kind: Kind, tmp_path: Path) -> None:
    rows, expected = matrix(kind, tmp_path)
    np.testing.assert_array_equal(np.asarray(rows), expected)
    np.testing.assert_array_equal(np.asarray(rows[5:9]), expected[5:9])
    np.testing.assert_array_equal(np.asarray(rows[5:][2:4]), expected[7:9])


@kinds
@pytest.mark.parametrize("more", [False, True], ids=["as few bits", "8 bits with fractions"])
def test_blocks_stand_for_the_same_numbers(kind: Kind, more: bool, tmp_path: Path) -> None:
    rows, expected = matrix(kind, tmp_path)
    wanted = Matrix("w", (rows,)).own_format
    assert wanted is not None
    bits, fractions = (8, True) if more else (wanted.bits, wanted.fractions)
    assert bits == (4 if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K) and not more else 8)
    found = rows.quantized(bits, fractions=fractions)
    assert found.packed.shape == (ROWS, COLUMNS // 32, 32 * bits // 8)
    assert (found.zero_points is not None) == fractions
    values = dequantize_blockwise(found, bits, COLUMNS)
    if kind in EXACT:
        # Both scale * (code - zero point) and scale * code + offset are rounded.
        largest = np.abs(expected).reshape(ROWS, -1, 32).max(-1, keepdims=True)
        error = np.abs(values - expected).reshape(ROWS, -1, 32)
        assert (error <= 4e-7 * np.maximum(largest, np.abs(found.scales[..., None]) * 32)).all()
    else:
        assert np.abs(values - expected).max() <= np.abs(expected).max() / 127


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q5_0, Kind.IQ4_NL])
def test_types_without_offsets_are_exact_to_the_bit(kind: Kind, tmp_path: Path) -> None:
    rows, expected = matrix(kind, tmp_path)
    found = rows.quantized(8, fractions=False)
    np.testing.assert_array_equal(dequantize_blockwise(found, 8, COLUMNS), expected)


def test_a_scale_of_nan_is_refused(tmp_path: Path) -> None:
    rows, _ = matrix(Kind.Q4_1, tmp_path)
    file = tmp_path / "Q4_1"
    raw = bytearray(file.read_bytes())
    raw[6:8] = np.float16(np.nan).tobytes()
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="NaN"):
        rows.quantized(4, fractions=True)


def test_sizes_of_blocks_are_the_librarys() -> None:
    for kind, (weights, size) in gguf.GGML_QUANT_SIZES.items():
        found = TYPES[kind]  # those that cannot be read are refused by name
        assert (found.name, found.weights, found.bytes) == (kind.name, weights, size)
    readable = {kind.name for kind in TYPES.values() if kind.readable}
    assert {kind.name for kind in (*WRITTEN, *DRAWN)} == readable
    with pytest.raises(ValueError, match="IQ2_XS cannot be read"):
        values_of(TYPES[Kind.IQ2_XS], np.zeros((1, 74), np.uint8))


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
