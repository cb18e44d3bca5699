"""Blockwise quantization: its error bounds, and that ONNX Runtime's kernels read it alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specops.models.convert.quantize import block_grids, quantize_blockwise
from specops.runtime import kernels
from tests.models.convert.dequantize import dequantize_blockwise
from tests.models.convert.runner import open_model

Float = NDArray[np.float32]

weights = arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 70)),
    elements=st.floats(-1e4, 1e4, width=32),
).map(lambda weight: np.where(np.abs(weight) < 1e-20, np.float32(0), weight))
blocks = st.sampled_from([16, 32, 64])
bits_of_codes = st.sampled_from([4, 8])


@given(weights, blocks)
def test_int8_is_off_by_at_most_half_a_step(weight: Float, block: int) -> None:
    quantized = quantize_blockwise(weight, 8, block)
    step = np.repeat(quantized.scales, block, axis=1)[:, : weight.shape[1]]
    error = np.abs(dequantize_blockwise(quantized, 8, weight.shape[1]) - weight)
    assert (error <= 0.5 * step * (1 + 1e-4) + 1e-30).all()


@given(weights, blocks)
def test_int4_is_off_by_at_most_a_step_of_the_plain_grid(weight: Float, block: int) -> None:
    """The plain 16 levels from the smallest to the largest weight are among the candidates, except
    for the rounding of the zero point, so the squared error is at most theirs."""
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -columns % block))).reshape(rows, -1, block)
    step = (np.maximum(padded.max(-1), 0) - np.minimum(padded.min(-1), 0)) / 15
    quantized = quantize_blockwise(weight, 4, block)
    restored = np.pad(dequantize_blockwise(quantized, 4, columns), ((0, 0), (0, -columns % block)))
    squares = np.square(restored.reshape(padded.shape).astype(np.float64) - padded).sum(-1)
    assert (squares <= block * np.square(step.astype(np.float64)) * (1 + 1e-4)).all()


SPANS = (13.0, 13.75, 14.5, 15.25, 16.0, 16.75, 17.5, 18.25, 19.0)  # steps over a block's range


def gains(block: Float, importance: Float) -> dict[int, float]:
    """For each zero point the most energy that a candidate with it removes, in float64."""
    x = block.astype(np.float64)
    low, high = min(x.min(), 0), max(x.max(), 0)
    found: dict[int, float] = {}
    for steps in SPANS:
        per_step = steps / (high - low)
        zero_point = int(np.clip(np.rint(7.5 - (low + high) / 2 * per_step), 0, 15))
        codes = np.clip(np.rint(x * per_step), -zero_point, 15 - zero_point)
        gain = ((x * importance) @ codes) ** 2 / ((codes * importance) @ codes)
        found[zero_point] = max(gain, found.get(zero_point, 0))
    return found


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("size", [16, 32, 128, 256])
def test_int4_takes_the_candidate_that_loses_least(size: int, weighed: bool) -> None:
    rng = np.random.default_rng(size)
    values = (rng.standard_normal((40, size)) + rng.uniform(-2, 2, (40, 1))).astype(np.float32)
    importance = rng.uniform(0.01, 1, size).astype(np.float32) if weighed else None
    scales, zero_points = block_grids(values, importance)
    factors = np.ones(size, np.float32) if importance is None else importance
    for block, scale, zero_point in zip(values, scales, zero_points, strict=True):
        options = gains(block, factors)
        assert options[int(zero_point)] > max(options.values()) * (1 - 1e-5)
        codes = np.clip(np.rint(block / scale), -zero_point, 15 - zero_point)
        best = (block * factors) @ codes / ((codes * factors) @ codes)
        assert scale == pytest.approx(best, rel=0.03)  # the codes are those before the scale


@given(
    arrays(np.int8, (3, 64), elements=st.integers(-8, 7)),
    st.floats(2**-10, 10, width=16),
    st.sampled_from([-1, 1]),
)
def test_int4_weights_already_on_a_grid_come_back_exactly(
    codes: NDArray[np.int8], scale: float, sign: int
) -> None:
    codes[:, ::32], codes[:, 1::32] = -8, 7  # every block of 32 contains both ends
    weight = codes.astype(np.float32) * np.float32(sign * scale)
    restored = dequantize_blockwise(quantize_blockwise(weight, 4, 32), 4, 64)
    np.testing.assert_allclose(restored, weight, rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_are_float16_numbers(bits: int) -> None:
    """Codes are rounded with the stored scale, also if float16 is coarse."""
    rng = np.random.default_rng(bits)
    sizes = np.geomspace(2e-4, 1e5, 200, dtype=np.float32)[:, None]
    weight = rng.uniform(-1, 1, (200, 64)).astype(np.float32) * sizes
    found = quantize_blockwise(weight, bits, 32)
    halves = found.scales.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found.scales, halves)
    error = np.abs(dequantize_blockwise(found, bits, 64) - weight)
    assert (error.reshape(200, 2, 32).max(-1) < 1.2 * np.abs(found.scales)).all()


@pytest.mark.parametrize("size", [1e-6, 1e8])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_outside_of_float16_stay_float32(bits: int, size: float) -> None:
    weight = np.random.default_rng(bits).normal(0, size, (4, 64)).astype(np.float32)
    scales = quantize_blockwise(weight, bits, 32).scales
    assert np.isfinite(scales).all()
    assert (scales != scales.astype(np.float64).clip(-6e4, 6e4).astype(np.float16)).all()


@given(weights, blocks, bits_of_codes)
def test_rows_are_quantized_independently(weight: Float, block: int, bits: int) -> None:
    together = quantize_blockwise(weight, bits, block)
    for row in range(len(weight)):
        alone = quantize_blockwise(weight[row : row + 1], bits, block)
        for part, whole in zip(alone, together, strict=True):
            if part is not None:
                np.testing.assert_array_equal(part[0], whole[row])


@pytest.mark.parametrize("bits", [4, 8])
def test_every_processor_stores_the_same_bytes(bits: int) -> None:
    weight = np.random.default_rng(bits).standard_normal((33, 500), np.float32)
    found = []
    for name in kernels.NAMES:
        kernels.force(name)
        found.append([part.tobytes() for part in quantize_blockwise(weight, bits, 64)[:2]])
    assert all(parts == found[0] for parts in found)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_vanishing_weights_come_back_as_zeros(bits: int) -> None:
    weight = np.array([[0.0] * 32, [1e-38] * 32], np.float32)
    restored = dequantize_blockwise(quantize_blockwise(weight, bits, 32), bits, 32)
    np.testing.assert_array_equal(restored, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    weight = np.ones((2, 64), np.float32)
    weight[1, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_blockwise(weight, 8, 32)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 47), min_size=1, max_size=6), bits_of_codes)
def test_gatherblockquantized_returns_the_dequantized_rows(tokens: list[int], bits: int) -> None:
    """Rows of three blocks: an odd number of zero points of 4 bits."""
    weight = np.random.default_rng(0).standard_normal((48, 96), np.float32)
    quantized = quantize_blockwise(weight, bits, 32)
    constants = {"codes": quantized.packed.reshape(48, -1), "scales": quantized.scales}
    inputs = ["codes", "tokens", "scales"]
    if quantized.zero_points is not None:
        inputs.append("zero_points")
        constants["zero_points"] = quantized.zero_points
    kind = {"bits": bits, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    graph = helper.make_graph(
        [helper.make_node("GatherBlockQuantized", inputs, ["y"], domain="com.microsoft", **kind)],
        "gather",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, [len(tokens)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    rows = open_model(model.SerializeToString()).run(None, {"tokens": np.array(tokens)})[0]
    np.testing.assert_allclose(rows, dequantize_blockwise(quantized, bits, 96)[tokens], rtol=1e-6)
