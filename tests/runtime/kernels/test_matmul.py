"""Products and norms are exact up to rounding, and the same bits beside any other rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from specops.runtime import kernels
from specops.runtime.kernels.packing import as_halves, pack
from tests.runtime.kernels.operators import covering, operator

ROWS = 35  # more than one group of any kernel, and a rest
MIDDLE, CODES, FRACTIONS = range(3)  # zero points, as the operator's attribute has them
AS_IT_IS, NORM, LAYER_NORM, GELU, SILU_GATE, GELU_GATE = range(6)  # the attribute `input`
NORMS, GATES = (NORM, LAYER_NORM), (SILU_GATE, GELU_GATE)
EPSILON = 1e-5
f = np.float32


class Weights(NamedTuple):
    """Weights as MatMulNBits has them."""

    columns: int
    depth: int
    bits: int
    block: int
    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    bias: np.ndarray | None

    @property
    def points(self) -> int:
        if self.zero_points is None:
            return MIDDLE
        return FRACTIONS if self.zero_points.dtype == np.float32 else CODES

    @property
    def attributes(self) -> dict[str, int]:
        return {"N": self.columns, "K": self.depth, "bits": self.bits, "block_size": self.block}

    @property
    def matrix(self) -> np.ndarray:
        """[N, K] in float64."""
        blocks = self.scales.shape[1]
        codes = nibbles(self.codes) if self.bits == 4 else self.codes
        points = np.full((self.columns, blocks), 1 << (self.bits - 1))
        if self.zero_points is not None:
            packed = self.points == CODES and self.bits == 4
            points = nibbles(self.zero_points) if packed else self.zero_points.astype(np.float64)
        shifted = codes.astype(np.float64) - points[:, :blocks, None]
        return (shifted * self.scales[..., None]).reshape(self.columns, -1)[:, : self.depth]

    def tiles(self, *, half_scales: bool = False) -> np.ndarray:
        scales, points = self.scales, self.zero_points
        if half_scales:
            found = as_halves(scales, points)
            assert found is not None
            scales, points = found.scales, points if found.offsets is None else found.offsets
        return pack(self.codes, scales, points, bits=self.bits, block=self.block)


def nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def random_weights(
    columns: int,
    depth: int,
    bits: int = 4,
    block: int = 32,
    zero_points: int = MIDDLE,
    *,
    bias: bool = False,
) -> Weights:
    random = np.random.default_rng(columns + depth + bits + block)
    blocks = -(-depth // block)
    width = -(-blocks // 2) if bits == 4 else blocks
    points = {
        MIDDLE: None,
        CODES: random.integers(0, 256, (columns, width), np.uint8),
        FRACTIONS: random.normal(1 << (bits - 1), 1 << bits, (columns, blocks)).astype(f),
    }
    return Weights(
        columns,
        depth,
        bits,
        block,
        codes=random.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8),
        scales=random.normal(0, 0.01, (columns, blocks)).astype(f),
        zero_points=points[zero_points],
        bias=random.normal(0, 0.1, columns).astype(f) if bias else None,
    )


def product(
    weights: Weights,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    tiles: np.ndarray | None = None,
    **attributes: Any,
) -> Callable[..., list[np.ndarray]]:
    """The operator QuantizedMatMul with these weights; `attributes` change those that fit them."""
    fixed = {"tiles": weights.tiles() if tiles is None else tiles}
    if weights.bias is not None:
        fixed["bias"] = weights.bias
    names = ["x", "tiles", "bias", "norm", "residual", "shift"]
    fitting = {
        **weights.attributes,
        "zero_points": weights.points,
        "half_scales": 0,
        "bias": int(weights.bias is not None),
        "input": AS_IT_IS,
        "epsilon": EPSILON,
    }
    return operator(
        kernels.MATMUL,
        [name if name in (*inputs, *fixed) else "" for name in names],
        outputs,
        fixed,
        **(fitting | attributes),
    )


def multiply(weights: Weights, x: np.ndarray, **given: Any) -> np.ndarray:
    return product(weights, **given)(x=x)[0]


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """[rows, K] rounded as activations are: to 8 bits, with a scale for each block."""
    rows, depth = x.shape
    blocks = np.pad(x, ((0, 0), (0, -depth % block))).reshape(rows, -1, block)
    scales = np.abs(blocks).max(-1, keepdims=True).astype(np.float64) / 127
    return (np.rint(blocks / scales) * scales).reshape(rows, -1)[:, :depth]


@pytest.mark.parametrize(
    ("shape", "bits", "block", "zero_points", "bias"),
    covering(
        [(17, 33), (90, 700), (256, 1024)],
        [4, 8],
        [32, 64, 128, 256],
        [MIDDLE, CODES, FRACTIONS],
        [False, True],
    ),
)
def test_a_product(
    *, any_kernel: None, shape: tuple[int, int], bits: int, block: int, zero_points: int, bias: bool
) -> None:
    """By every kernel with the same bits, beside any other rows. Every pair of factors occurs."""
    weights = random_weights(*shape, bits, block, zero_points, bias=bias)
    x = np.random.default_rng(1).normal(size=(ROWS, shape[1])).astype(f)
    x[3] *= f(1e30)
    x[5, ::7] = 0
    expected = rounded(x, block) @ weights.matrix.T
    if weights.bias is not None:
        expected += weights.bias
    first = multiply(weights, x[None])[0]
    spread = expected.std(-1, keepdims=True)
    # A number that lies halfway between two of 8 bits may be rounded to either.
    assert (np.abs(first - expected) < 3e-3 * spread).all()
    assert np.sqrt(np.mean(((first - expected) / spread) ** 2)) < 1e-4
    for name in kernels.NAMES:
        kernels.force(name)
        compute = product(weights)
        for width in range(1, ROWS + 1):
            assert np.array_equal(compute(x=x[None, :width])[0][0], first[:width])
        assert np.array_equal(compute(x=x[:, None])[0][:, 0], first)
        assert np.array_equal(compute(x=x[None, 5:6])[0][0], first[5:6])


@pytest.mark.parametrize(("bits", "zero_points"), [(4, MIDDLE), (8, MIDDLE), (4, FRACTIONS)])
def test_onnxruntime_computes_nearly_the_same(bits: int, zero_points: int) -> None:
    weights = random_weights(256, 1024, bits, 128, zero_points)
    stored = {"codes": weights.codes, "scales": weights.scales}
    if weights.zero_points is not None:
        stored["zero_points"] = weights.zero_points
    attributes = weights.attributes | {"accuracy_level": 4}
    other = operator(
        "MatMulNBits", ["x", *stored], ["y"], stored, domain="com.microsoft", **attributes
    )
    x = np.random.default_rng(3).normal(size=(1, ROWS, 1024)).astype(f)
    expected = other(x=x)[0]
    error = multiply(weights, x) - expected
    if zero_points == MIDDLE:
        assert np.abs(error).max() < 2e-3 * expected.std()
    else:  # with fractions it does not round activations
        assert error.std() < 0.01 * expected.std()


@pytest.mark.parametrize("small", [0.0, 1e-44, 1e-38, 1e-31])
def test_activations_close_to_0_count_as_0(each_kernel: str, small: float) -> None:
    weights = random_weights(32, 64, 8, 32, CODES)
    assert not multiply(weights, np.full((1, 2, 64), small, f)).any()


def test_steps_with_fractional_zero_points_have_one_order(each_kernel: str) -> None:
    """(dot - zero point * sum) * (scale * scale of the activations), each step rounded."""
    weights = random_weights(16, 32, 4, 32, FRACTIONS)
    x = np.random.default_rng(6).normal(size=32).astype(f)
    most = np.abs(x).max()
    codes = np.rint(x * (f(127) / most)).astype(np.int32)
    dots = (nibbles(weights.codes)[:, 0].astype(np.int32) @ codes).astype(f)
    shifted = dots - weights.zero_points[:, 0] * f(codes.sum())
    expected = shifted * (weights.scales[:, 0] * (most / f(127)))
    assert np.array_equal(multiply(weights, x[None, None])[0, 0], expected)


# -- inputs that a product computes itself --------------------------------------------------------

INPUTS = [  # kind, residual, shift
    *((kind, residual, False) for kind in NORMS for residual in (False, True)),
    *((LAYER_NORM, residual, True) for residual in (False, True)),
    *((kind, False, False) for kind in (GELU, *GATES)),
]


def inputs_of(kind: int, depth: int, *, residual: bool, shift: bool) -> dict[str, np.ndarray]:
    """A norm's inputs are far from 0: a layer norm subtracts their mean."""
    random = np.random.default_rng(depth)
    if kind not in NORMS:
        width = 2 * depth if kind in GATES else depth
        return {"x": random.normal(0, 4, (1, ROWS, width)).astype(f)}
    inputs = {
        name: random.normal(2, 1, (1, ROWS, depth)).astype(f)
        for name in (("x", "residual") if residual else ("x",))
    }
    for name in ("norm", "shift") if shift else ("norm",):
        inputs[name] = random.normal(1, 0.3, depth).astype(f)
    return inputs


def first_rows(inputs: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    return {name: value[:, :rows] if value.ndim > 1 else value for name, value in inputs.items()}


def exactly(kind: int, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """What is multiplied, in float64."""
    x = inputs["x"].astype(np.float64) + inputs.get("residual", 0)
    if kind in NORMS:
        if kind == LAYER_NORM:
            x -= x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON)
        return x * inputs["norm"] + inputs.get("shift", 0)
    gate, up = (x, 1) if kind == GELU else np.split(x, 2, axis=-1)
    if kind == SILU_GATE:
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def norm(kind: int, names: Any, **attributes: Any) -> Callable[..., list[np.ndarray]]:
    """The operator Norm with inputs of these names."""
    inputs = [name if name in names else "" for name in ("x", "norm", "residual", "shift")]
    attributes = {"input": kind, "epsilon": EPSILON} | attributes
    return operator(kernels.NORM, inputs, ["activated", "sum"], **attributes)


@pytest.mark.parametrize(
    ("name", "options", "size"),
    covering(
        kernels.NAMES, INPUTS, [(1, 32), (15, 32), (33, 32), (200, 64), (1536, 32), (1024, 256)]
    ),
)
def test_a_product_activates_its_input(
    any_kernel: None, name: str, options: tuple[int, bool, bool], size: tuple[int, int]
) -> None:
    """With any outputs; a Norm has the same bits. Every pair of kernel, input and size occurs."""
    (kind, residual, shift), (depth, block) = options, size
    kernels.force(name)
    weights = random_weights(40, depth, 8, block, FRACTIONS)
    inputs = inputs_of(kind, depth, residual=residual, shift=shift)
    some = ("y", "sum", "activated") if kind in NORMS else ("y", "", "activated")
    y, *total, activated = product(weights, tuple(inputs), some, input=kind)(**inputs)
    exact = exactly(kind, inputs)
    assert np.abs(activated - exact).max() <= 2e-6 * np.abs(exact).max()
    assert np.array_equal(multiply(weights, activated), y)
    if kind in NORMS:
        assert np.array_equal(total[0], inputs["x"] + inputs.get("residual", f(0)))
    for rows in (1, 2, ROWS):
        part = first_rows(inputs, rows)
        for outputs in (("y",), ("y", "", "activated")):
            again = product(weights, tuple(inputs), outputs, input=kind)(**part)
            assert np.array_equal(again[0], y[:, :rows])
            assert np.array_equal(again[-1], (y if len(outputs) == 1 else activated)[:, :rows])
    for rows in (0, 1, 2, ROWS) if kind in NORMS else ():
        found = norm(kind, inputs)(**first_rows(inputs, rows))
        assert np.array_equal(found[0], activated[:, :rows])
        assert np.array_equal(found[1], total[0][:, :rows])


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_is_right_at_every_number(kind: int) -> None:
    """Also where the exponential rounds to 0 or 1."""
    weights = random_weights(16, 512, 8, 32)
    gate = np.concatenate([np.geomspace(1e-30, 700, 255), [0.0]]).astype(f)
    x = np.concatenate([gate, -gate, np.ones(512, f)])[None, None]
    activated = product(weights, ("x",), ("y", "", "activated"), input=kind)(x=x)[1]
    exact = exactly(kind, {"x": x})
    assert np.allclose(activated, exact, rtol=1e-5, atol=1e-12 if kind == SILU_GATE else 1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "odd", "place"),
    covering(kernels.NAMES, range(6), [np.nan, np.inf, -np.inf], [0, 31, 32, 99]),
)
def test_infinite_numbers_make_their_row_nan_and_no_other(
    any_kernel: None, name: str, kind: int, odd: float, place: int
) -> None:
    """Every pair of factors occurs."""
    kernels.force(name)
    weights = random_weights(32, 100)
    inputs = inputs_of(kind, 100, residual=False, shift=False)
    compute = product(weights, tuple(inputs), input=kind)
    expected = compute(**inputs)[0]
    inputs["x"][0, 1, place + (100 if kind in GATES else 0)] = odd
    found = compute(**inputs)[0]
    assert np.isnan(found[0, 1]).all()
    assert np.array_equal(found[0, [0, 2]], expected[0, [0, 2]])


# -- scales in float16 -----------------------------------------------------------------------------


def weights_of_halves(depth: int, bits: int, block: int, zero_points: int) -> Weights:
    """Weights whose scales and offsets float16 holds: some are 0, tiny or huge."""
    weights = random_weights(40, depth, bits, block, zero_points, bias=True)
    random = np.random.default_rng(block)

    def numbers() -> np.ndarray:
        odd = np.array([0, -0.0, 6e-8, -5e-7, 6.1e-5, 65504, -65504], np.float16)
        some = random.normal(0, 0.05, weights.scales.shape).astype(np.float16)
        return np.where(random.random(some.shape) < 0.2, random.choice(odd, some.shape), some)

    scales = numbers().astype(f)
    if zero_points != FRACTIONS:
        return weights._replace(scales=scales)
    divisors = np.where(scales == 0, f(1), scales)
    points = np.where(scales == 0, f(0), -numbers().astype(f) / divisors)
    return weights._replace(scales=scales, zero_points=points)


@pytest.mark.parametrize(
    ("name", "size", "bits", "zero_points"),
    covering(
        kernels.NAMES,
        [(700, 32), (33, 32), (576, 32), (512, 256)],
        [4, 8],
        [MIDDLE, CODES, FRACTIONS],
    ),
)
def test_scales_in_float16_give_the_same_bits(
    any_kernel: None, name: str, size: tuple[int, int], bits: int, zero_points: int
) -> None:
    """Every pair of factors occurs."""
    kernels.force(name)
    depth, block = size
    weights = weights_of_halves(depth, bits, block, zero_points)
    x = np.random.default_rng(3).normal(size=(1, ROWS, depth)).astype(f)
    expected = multiply(weights, x)
    assert np.isfinite(expected).all()
    compute = product(weights, tiles=weights.tiles(half_scales=True), half_scales=1)
    for width in range(1, ROWS + 1):
        found = compute(x=x[:, :width])[0]
        assert np.array_equal(found.view(int), expected[:, :width].view(int))


def test_numbers_that_float16_does_not_hold_stay_float32() -> None:
    halves = np.array([[0.5, 0.25]], f)
    for wrong in (1 + 2**-11, 65520, 2.0**-25, np.inf, np.nan):
        scales = np.array([[0.5, wrong]], f)
        assert as_halves(scales, None) is None
        assert as_halves(halves, np.array([[3, wrong / 0.25]], f)) is None
        assert as_halves(scales, np.array([[3, 0]], f)) is None
    assert as_halves(np.array([[0.0, 1.0]], f), np.array([[3, 3]], f)) is None  # 0 * (code - 3)
    assert as_halves(halves, np.array([[1, 7]], np.uint8)) is not None
    found = as_halves(np.array([[2.0**-24, -65504]], f), np.array([[2**23, -2]], f))
    assert found is None  # an offset of 131008
    found = as_halves(np.array([[2.0**-24, -65504]], f), np.array([[2**23, -1]], f))
    assert found is not None
    assert found.offsets is not None
    assert found.offsets.tolist() == [[-0.5, -65504]]


# -- what is refused -------------------------------------------------------------------------------


def test_no_rows() -> None:
    assert multiply(random_weights(32, 64), np.zeros((0, 3, 64), f)).shape == (0, 3, 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"N": 0}, "at least 1"),
        ({"K": -1}, "at least 1"),
        ({"N": (1 << 24) + 1}, "at most 16777216"),
        ({"K": (1 << 24) + 1}, "at most 16777216"),
        ({"bits": 3}, "4 or 8 bits"),
        ({"block_size": 0}, "multiples of 32"),
        ({"block_size": 48}, "multiples of 32"),
        ({"block_size": 512}, "multiples of 32"),
        ({"zero_points": 3}, "0, 1 or 2"),
        ({"zero_points": -1}, "0, 1 or 2"),
        ({"half_scales": 2}, "half_scales is 0 or 1"),
        ({"bias": -1}, "bias is 0 or 1"),
        ({"input": 6}, "input is 0 to 5"),
        ({"input": -1}, "input is 0 to 5"),
        ({"epsilon": -1.0}, "epsilon is below 0"),
        ({"epsilon": math.inf}, "epsilon is below 0 or not finite"),
        ({"N": 1 << 24, "K": 1 << 24}, "another size"),
        ({"N": 33}, "another size"),
        ({"zero_points": CODES}, "another size"),
        ({"zero_points": FRACTIONS}, "another size"),
        ({"half_scales": 1}, "another size"),
        ({"tiles": random_weights(32, 64).tiles()[:-64]}, "another size"),
        ({"bias": 1}, "bias is missing"),
    ],
)
def test_an_impossible_product_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        multiply(
            random_weights(32, 64), np.zeros((1, 1, max(0, changed.get("K", 64))), f), **changed
        )


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"input": 0}, "input is 1 or 2"),
        ({"input": 3}, "input is 1 or 2"),
        ({"epsilon": -1.0}, "epsilon is below 0"),
        ({"epsilon": math.nan}, "epsilon is below 0 or not finite"),
    ],
)
def test_an_impossible_norm_is_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        norm(LAYER_NORM, ("x", "norm"), **attributes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": (1, 2, 65)}, "last dimension of the input|norm is missing or has another size"),
        ({"x": (1, 2, 0)}, "last dimension"),
        ({"norm": (63,)}, "norm is missing or has another size"),
        ({"norm": (64, 1)}, "norm is missing or has another size"),
        ({"residual": (1, 2, 63)}, "residual has another shape"),
        ({"residual": (1, 3, 64)}, "residual has another shape"),
        ({"shift": (65,)}, "shift has another size"),
    ],
)
@pytest.mark.parametrize("by_itself", [False, True])
def test_inputs_of_wrong_shapes_are_refused(
    by_itself: bool, wrong: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {"x": (1, 2, 64), "norm": (64,), "residual": (1, 2, 64), "shift": (64,)} | wrong
    given = {name: np.zeros(shape, f) for name, shape in shapes.items()}
    weights, names = random_weights(32, 64), tuple(given)
    compute = norm(LAYER_NORM, names) if by_itself else product(weights, names, input=LAYER_NORM)
    with pytest.raises(Exception, match=message):
        compute(**given)


@pytest.mark.parametrize("shape", [(16, 2, 64), (16, 3, 32), (48, 2, 32), (16, 2, 16)])
def test_codes_that_do_not_fit_their_scales_are_refused(shape: tuple[int, ...]) -> None:
    scales = np.ones((16, 2), np.float32)
    with pytest.raises(ValueError, match="codes"):
        pack(np.zeros(shape, np.uint8), scales, None, bits=8, block=32)
