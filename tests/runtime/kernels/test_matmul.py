"""The kernels multiply as exact arithmetic says, and the same bits whatever stands beside a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from specops.runtime import kernels
from specops.runtime.kernels.packing import as_halves, pack
from tests.runtime.kernels.attention import opened

ROWS = 19  # more than two groups of any kernel, and a rest
MIDDLE, CODES, FRACTIONS = range(3)  # where zero points are, as the operator's attribute has it
AS_IT_IS, NORM, LAYER_NORM, GELU, SILU_GATE, GELU_GATE = range(6)  # what is made of the input
NORMS = (NORM, LAYER_NORM)


class Weights(NamedTuple):
    """Weights as MatMulNBits has them, and the matrix [N, K] that they stand for."""

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
        blocks = self.scales.shape[1]
        codes = halves(self.codes) if self.bits == 4 else self.codes
        points = np.full((self.columns, blocks), 1 << (self.bits - 1))
        if self.zero_points is not None:
            packed = self.points == CODES and self.bits == 4
            points = halves(self.zero_points) if packed else self.zero_points.astype(np.float64)
        shifted = codes.astype(np.float64) - points[:, :blocks, None]
        return (shifted * self.scales[..., None]).reshape(self.columns, -1)[:, : self.depth]


def halves(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def random_weights(
    columns: int, depth: int, bits: int, block: int, *, zero_points: int, bias: bool
) -> Weights:
    random = np.random.default_rng(columns + depth + bits + block)
    blocks = -(-depth // block)
    width = -(-blocks // 2) if bits == 4 else blocks
    points = {
        MIDDLE: None,
        CODES: random.integers(0, 256, (columns, width), np.uint8),
        FRACTIONS: random.normal(1 << (bits - 1), 1 << bits, (columns, blocks)).astype(np.float32),
    }
    return Weights(
        columns,
        depth,
        bits,
        block,
        codes=random.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8),
        scales=random.normal(0, 0.01, (columns, blocks)).astype(np.float32),
        zero_points=points[zero_points],
        bias=random.normal(0, 0.1, columns).astype(np.float32) if bias else None,
    )


Dims = Mapping[str, Sequence[str | int]]


def session(node: Any, inputs: Dims, **tensors: np.ndarray | None) -> Any:
    """A graph of one node, whose inputs are given or weights."""
    graph = helper.make_graph(
        [node],
        "product",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
            for name, dims in inputs.items()
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "S", None])
            for name in node.output
            if name
        ],
        [
            numpy_helper.from_array(value, name)
            for name, value in tensors.items()
            if value is not None
        ],
    )
    domains = (("", 21), ("com.microsoft", 1), (kernels.DOMAIN, 1))
    opsets = [helper.make_opsetid(name, version) for name, version in domains]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return opened(model)


def product(
    weights: Weights, tiles: np.ndarray | None = None, *, half_scales: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
    """x [B, S, K] to y [B, S, N] by the kernels."""
    if half_scales:
        found = as_halves(weights.scales, weights.zero_points)
        assert found is not None
        tiles = pack(
            weights.codes,
            found.scales,
            weights.zero_points if found.offsets is None else found.offsets,
            bits=weights.bits,
            block=weights.block,
        )
    elif tiles is None:
        tiles = tiles_of(weights)
    node = helper.make_node(
        kernels.MATMUL,
        ["x", "tiles"] + (["bias"] if weights.bias is not None else []),
        ["y"],
        domain=kernels.DOMAIN,
        **weights.attributes,
        zero_points=weights.points,
        half_scales=int(half_scales),
        bias=int(weights.bias is not None),
        input=AS_IT_IS,
        epsilon=0.0,
    )
    made = session(node, {"x": ["B", "S", weights.depth]}, tiles=tiles, bias=weights.bias)
    return lambda x: made.run(["y"], {"x": x})[0]


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """[rows, K] with 8 bits a number and a scale a block, as activations are rounded."""
    rows, depth = x.shape
    blocks = np.pad(x, ((0, 0), (0, -depth % block))).reshape(rows, -1, block)
    scales = np.abs(blocks).max(-1, keepdims=True).astype(np.float64) / 127
    return (np.rint(blocks / scales) * scales).reshape(rows, -1)[:, :depth]


@pytest.fixture(params=kernels.NAMES)
def _kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each kernel that this processor can compute with."""
    try:
        kernels.force(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield
    kernels.force(None)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero_points", [MIDDLE, CODES, FRACTIONS])
@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "depth"), [(17, 33), (40, 200), (256, 1024)])
def test_a_product(
    *, columns: int, depth: int, bits: int, block: int, zero_points: int, bias: bool
) -> None:
    weights = random_weights(columns, depth, bits, block, zero_points=zero_points, bias=bias)
    multiply = product(weights)
    x = np.random.default_rng(1).normal(size=(ROWS, depth)).astype(np.float32)
    expected = rounded(x, block) @ weights.matrix.T
    if weights.bias is not None:
        expected += weights.bias
    found = multiply(x[None])[0]
    # A number that lies halfway between two of 8 bits may be rounded to either.
    assert np.abs(found - expected).max() < 2e-3 * expected.std()
    assert np.sqrt(np.mean((found - expected) ** 2)) < 1e-4 * expected.std()
    for width in range(1, ROWS):
        assert np.array_equal(multiply(x[None, :width])[0], found[:width])
        assert np.array_equal(multiply(x[:width, None])[:, 0], found[:width])
    assert np.array_equal(multiply(x[None, 5:6])[0], found[5:6])


@pytest.mark.parametrize("zero_points", [MIDDLE, CODES, FRACTIONS])
@pytest.mark.parametrize("block", [32, 128, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_processors_agree_to_the_bit(bits: int, block: int, zero_points: int) -> None:
    weights = random_weights(90, 700, bits, block, zero_points=zero_points, bias=True)
    x = np.random.default_rng(2).normal(size=(1, ROWS, 700)).astype(np.float32)
    x[0, 3] *= 1e30
    x[0, 4] *= 1e-30
    x[0, 5, ::7] = 0
    expected = product(weights)(x)
    try:
        for name in kernels.NAMES:
            kernels.force(name)
            assert np.array_equal(product(weights)(x), expected)
    finally:
        kernels.force(None)


@pytest.mark.parametrize(("bits", "zero_points"), [(4, MIDDLE), (8, MIDDLE), (4, FRACTIONS)])
def test_what_onnxruntime_computes_is_near(bits: int, zero_points: int) -> None:
    weights = random_weights(256, 1024, bits, 128, zero_points=zero_points, bias=False)
    stored = {"codes": weights.codes, "scales": weights.scales}
    if weights.zero_points is not None:
        stored["zero_points"] = weights.zero_points
    node = helper.make_node(
        "MatMulNBits",
        ["x", *stored],
        ["y"],
        domain="com.microsoft",
        **weights.attributes,
        accuracy_level=4,
    )
    other = session(node, {"x": ["B", "S", 1024]}, **stored)
    x = np.random.default_rng(3).normal(size=(1, ROWS, 1024)).astype(np.float32)
    expected = other.run(["y"], {"x": x})[0]
    error = product(weights)(x) - expected
    if zero_points == MIDDLE:
        assert np.abs(error).max() < 2e-3 * expected.std()
    else:  # with fractions it does not round activations
        assert error.std() < 0.01 * expected.std()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 99])
def test_nothing_infinite_gets_lost(odd: float, place: int) -> None:
    weights = random_weights(32, 100, 4, 32, zero_points=MIDDLE, bias=False)
    x = np.random.default_rng(4).normal(size=(1, 3, 100)).astype(np.float32)
    expected = product(weights)(x)
    x[0, 1, place] = odd
    found = product(weights)(x)
    assert np.isnan(found[0, 1]).all()
    assert np.array_equal(found[0, [0, 2]], expected[0, [0, 2]])


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("small", [0.0, 1e-44, 1e-38, 1e-31])
def test_activations_next_to_nothing_are_nothing(small: float) -> None:
    weights = random_weights(32, 64, 8, 32, zero_points=CODES, bias=False)
    x = np.full((1, 2, 64), small, np.float32)
    assert not product(weights)(x).any()


@pytest.mark.usefixtures("_kernel")
def test_zero_points_that_are_fractions_take_steps_in_one_order() -> None:
    """(dot - zero point * sum) * (scale * scale of the activations), each step rounded."""
    f = np.float32
    weights = random_weights(16, 32, 4, 32, zero_points=FRACTIONS, bias=False)
    x = np.random.default_rng(6).normal(size=32).astype(f)
    most = np.abs(x).max()
    codes = np.rint(x * (f(127) / most)).astype(np.int32)
    dots = (halves(weights.codes)[:, 0].astype(np.int32) @ codes).astype(f)
    shifted = dots - weights.zero_points[:, 0] * f(codes.sum())
    expected = shifted * (weights.scales[:, 0] * (most / f(127)))
    assert np.array_equal(product(weights)(x[None, None])[0, 0], expected)


# -- inputs that a product makes itself ------------------------------------------------------------


def making(
    weights: Weights,
    kind: int,
    *,
    residual: bool = False,
    shift: bool = False,
    outputs: tuple[str, ...] = ("y",),
) -> Callable[..., list[np.ndarray]]:
    """A product that makes its input: of x [B, S, K or 2 K], `norm` and `shift` [K], `residual`."""
    there = {"norm": kind in NORMS, "residual": residual, "shift": shift}
    names = [name if given else "" for name, given in there.items()]
    depth = weights.depth * (2 if kind >= SILU_GATE else 1)
    node = helper.make_node(
        kernels.MATMUL,
        ["x", "tiles", "", *names],
        list(outputs),
        domain=kernels.DOMAIN,
        **weights.attributes,
        zero_points=weights.points,
        half_scales=0,
        bias=0,
        input=kind,
        epsilon=EPSILON,
    )
    inputs = {name: dims for name, dims in dims_of(depth).items() if name == "x" or there[name]}
    made = session(node, inputs, tiles=tiles_of(weights))
    return lambda **inputs: made.run([name for name in outputs if name], inputs)


def dims_of(depth: int) -> dict[str, list[str | int]]:
    """Of the inputs that a product or a norm has."""
    wide = ["B", "S", depth]
    return {"x": wide, "residual": wide, "norm": [depth], "shift": [depth]}


def tiles_of(weights: Weights) -> np.ndarray:
    return pack(
        *(weights.codes, weights.scales, weights.zero_points),
        bits=weights.bits,
        block=weights.block,
    )


EPSILON = 1e-5


def gate_of(kind: int, x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    if kind == SILU_GATE:
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def norm_inputs(depth: int, *, residual: bool, shift: bool) -> dict[str, np.ndarray]:
    """What is normalized is far from 0: a layer norm takes its mean off."""
    random = np.random.default_rng(depth)
    names = ("x", "residual") if residual else ("x",)
    shape = (1, ROWS, depth)
    inputs = {name: random.normal(2, 1, shape).astype(np.float32) for name in names}
    for name in ("norm", "shift") if shift else ("norm",):
        inputs[name] = random.normal(1, 0.3, depth).astype(np.float32)
    return inputs


def norm_of(kind: int, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """In float64."""
    x = inputs["x"].astype(np.float64) + inputs.get("residual", 0)
    if kind == LAYER_NORM:
        x -= x.mean(axis=-1, keepdims=True)
    x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON)
    return x * inputs["norm"] + inputs.get("shift", 0)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("kind", "shift"), [(NORM, False), (LAYER_NORM, False), (LAYER_NORM, True)]
)
@pytest.mark.parametrize(("depth", "block"), [(33, 32), (200, 64), (576, 32), (1024, 256)])
def test_a_product_of_a_norm(
    depth: int, block: int, kind: int, *, shift: bool, residual: bool
) -> None:
    weights = random_weights(40, depth, 8, block, zero_points=MIDDLE, bias=False)
    inputs = norm_inputs(depth, residual=residual, shift=shift)
    options = {"residual": residual, "shift": shift}
    compute = making(weights, kind, **options, outputs=("y", "sum", "made"))
    found, total, made = compute(**inputs)
    assert np.array_equal(total, inputs["x"] + inputs.get("residual", np.float32(0)))
    exact = norm_of(kind, inputs)
    assert np.abs(made - exact).max() < 1e-6 * np.abs(exact).max()
    assert np.array_equal(product(weights)(made), found)
    for outputs in (("y",), ("y", "sum"), ("y", "", "made")):
        for rows in (1, 2, ROWS):
            some = {
                name: value[:, :rows] if name in ("x", "residual") else value
                for name, value in inputs.items()
            }
            again = making(weights, kind, **options, outputs=outputs)(**some)
            assert np.array_equal(again[0], found[:, :rows])
            if outputs[-1] != "y":
                assert np.array_equal(again[1], {"sum": total, "made": made}[outputs[-1]][:, :rows])


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(("depth", "block"), [(33, 32), (200, 64), (1536, 32)])
def test_a_product_of_a_gelu(depth: int, block: int) -> None:
    weights = random_weights(40, depth, 4, block, zero_points=FRACTIONS, bias=False)
    x = np.random.default_rng(depth).normal(0, 4, (1, ROWS, depth)).astype(np.float32)
    found, made = making(weights, GELU, outputs=("y", "", "made"))(x=x)
    exact = gate_of(GELU_GATE, np.concatenate([x, np.ones_like(x)], axis=-1))
    assert np.abs(made - exact).max() < 2e-6 * np.abs(exact).max()
    assert np.array_equal(product(weights)(made), found)
    for rows in (1, 2, ROWS):
        assert np.array_equal(making(weights, GELU)(x=x[:, :rows])[0], found[:, :rows])


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("kind", [SILU_GATE, GELU_GATE])
@pytest.mark.parametrize(("depth", "block"), [(33, 32), (200, 64), (1536, 32)])
def test_a_product_of_a_gate(depth: int, block: int, kind: int) -> None:
    weights = random_weights(40, depth, 4, block, zero_points=FRACTIONS, bias=False)
    x = np.random.default_rng(depth).normal(0, 4, (1, ROWS, 2 * depth)).astype(np.float32)
    found, made = making(weights, kind, outputs=("y", "", "made"))(x=x)
    exact = gate_of(kind, x)
    assert np.abs(made - exact).max() < 2e-6 * np.abs(exact).max()
    assert np.array_equal(product(weights)(made), found)
    for rows in (1, 2, ROWS):
        assert np.array_equal(making(weights, kind)(x=x[:, :rows])[0], found[:, :rows])


@pytest.mark.parametrize("kind", [SILU_GATE, GELU_GATE])
def test_a_gate_is_right_at_every_number(kind: int) -> None:
    """Numbers whose exponential float32 takes for 0 or 1, too."""
    weights = random_weights(16, 512, 8, 32, zero_points=MIDDLE, bias=False)
    gate = np.concatenate([np.geomspace(1e-30, 700, 255), [0.0]]).astype(np.float32)
    x = np.concatenate([gate, -gate, np.ones(512, np.float32)])[None, None]
    made = making(weights, kind, outputs=("y", "", "made"))(x=x)[1]
    exact = gate_of(kind, x)
    assert np.allclose(made, exact, rtol=1e-5, atol=1e-12 if kind == SILU_GATE else 1e-6)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("kind", [NORM, LAYER_NORM, GELU, SILU_GATE, GELU_GATE])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nothing_infinite_gets_lost_on_the_way(odd: float, kind: int) -> None:
    weights = random_weights(32, 100, 4, 32, zero_points=MIDDLE, bias=False)
    width = 200 if kind >= SILU_GATE else 100
    x = np.random.default_rng(4).normal(size=(1, 3, width)).astype(np.float32)
    inputs = {"norm": np.ones(100, np.float32)} if kind in NORMS else {}
    compute = making(weights, kind)
    expected = compute(x=x, **inputs)[0]
    x[0, 1, width - 1] = odd
    found = compute(x=x, **inputs)[0]
    assert np.isnan(found[0, 1]).all()
    assert np.array_equal(found[0, [0, 2]], expected[0, [0, 2]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": (1, 2, 65)}, "last dimension of the input"),
        ({"norm": (63,)}, "norm is missing or has another size"),
        ({"residual": (1, 2, 63)}, "residual has another shape"),
        ({"residual": (1, 3, 64)}, "residual has another shape"),
        ({"shift": (65,)}, "shift has another size"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    wrong: dict[str, tuple[int, ...]], message: str
) -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    node = helper.make_node(
        kernels.MATMUL,
        ["x", "tiles", "", "norm", "residual", "shift"],
        ["y"],
        domain=kernels.DOMAIN,
        **weights.attributes,
        **dict.fromkeys(("zero_points", "half_scales", "bias"), 0),
        input=LAYER_NORM,
        epsilon=EPSILON,
    )
    shapes = {"x": (1, 2, 64), "norm": (64,), "residual": (1, 2, 64), "shift": (64,)} | wrong
    given = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name != "x"}
    made = session(node, {"x": ["B", "S", shapes["x"][-1]]}, tiles=tiles_of(weights), **given)
    with pytest.raises(Exception, match=message):
        made.run(["y"], {"x": np.zeros(shapes["x"], np.float32)})


# -- scales in float16 -----------------------------------------------------------------------------


def weights_of_halves(columns: int, depth: int, bits: int, block: int, zero_points: int) -> Weights:
    """Weights whose scales and offsets float16 has: some are 0, tiny, huge, or lack the other."""
    weights = random_weights(columns, depth, bits, block, zero_points=zero_points, bias=True)
    random = np.random.default_rng(block)

    def numbers() -> np.ndarray:
        odd = np.array([0, -0.0, 6e-8, -5e-7, 6.1e-5, 65504, -65504], np.float16)
        some = random.normal(0, 0.05, weights.scales.shape).astype(np.float16)
        return np.where(random.random(some.shape) < 0.2, random.choice(odd, some.shape), some)

    scales = numbers().astype(np.float32)
    if zero_points != FRACTIONS:
        return weights._replace(scales=scales)
    divisors = np.where(scales == 0, np.float32(1), scales)
    points = np.where(scales == 0, np.float32(0), -numbers().astype(np.float32) / divisors)
    return weights._replace(scales=scales, zero_points=points)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("zero_points", [MIDDLE, CODES, FRACTIONS])
@pytest.mark.parametrize(
    ("block", "depth"), [(32, 700), (32, 33), (32, 576), (128, 700), (256, 512)]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_in_float16_compute_the_same_bits(
    bits: int, block: int, depth: int, zero_points: int
) -> None:
    weights = weights_of_halves(40, depth, bits, block, zero_points)
    x = np.random.default_rng(3).normal(size=(1, ROWS, depth)).astype(np.float32)
    expected = product(weights)(x)
    assert np.isfinite(expected).all()
    found = product(weights, half_scales=True)
    for width in range(1, ROWS + 1):
        assert np.array_equal(found(x[:, :width]).view(int), expected[:, :width].view(int))


def test_numbers_that_float16_has_not_stay_float32() -> None:
    f = np.float32
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


def test_no_rows() -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    assert product(weights)(np.zeros((0, 3, 64), np.float32)).shape == (0, 3, 32)


def test_weights_of_another_size_are_refused() -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    tiles = pack(weights.codes, weights.scales, None, bits=4, block=32)
    multiply = product(weights, tiles[:-64])
    with pytest.raises(Exception, match="another size"):
        multiply(np.zeros((1, 1, 64), np.float32))


def test_blocks_that_no_kernel_knows_are_refused() -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    tiles = pack(weights.codes, weights.scales, None, bits=4, block=32)
    with pytest.raises(Exception, match="multiples of 32"):
        product(weights._replace(block=48), tiles)


def test_a_bias_that_is_not_there_is_refused() -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    with pytest.raises(Exception, match="bias is missing"):
        refused(weights, bias=1)(np.zeros((1, 1, 64), np.float32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"N": 0}, "at least 1"),
        ({"K": -1}, "at least 1"),
        ({"N": (1 << 24) + 1}, "at most 16777216"),
        ({"K": 1 << 62}, "at most 16777216"),
        ({"bits": 3}, "4 or 8 bits"),
        ({"block_size": 0}, "multiples of 32"),
        ({"block_size": 512}, "multiples of 32"),
        ({"zero_points": 3}, "0, 1 or 2"),
        ({"zero_points": -1}, "0, 1 or 2"),
        ({"half_scales": 2}, "half_scales is 0 or 1"),
        ({"bias": -1}, "bias is 0 or 1"),
        ({"input": 6}, "input is 0 to 5"),
        ({"input": -1}, "input is 0 to 5"),
        ({"epsilon": -1.0}, "epsilon is below 0"),
        ({"epsilon": math.inf}, "epsilon is below 0 or not finite"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    with pytest.raises(Exception, match=message):
        refused(weights, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"N": 1 << 24, "K": 1 << 24},
        {"N": 33},
        {"zero_points": CODES},
        {"zero_points": FRACTIONS},
        {"half_scales": 1},
    ],
)
def test_a_shape_that_the_weights_do_not_have_is_refused(changed: dict[str, int]) -> None:
    weights = random_weights(32, 64, 4, 32, zero_points=MIDDLE, bias=False)
    x = np.zeros((1, 1, changed.get("K", 64)), np.float32)
    with pytest.raises(Exception, match="another size"):
        refused(weights, **changed)(x)


def refused(weights: Weights, **changed: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A product whose attributes are not those of its weights."""
    tiles = pack(weights.codes, weights.scales, None, bits=weights.bits, block=weights.block)
    zeros = dict.fromkeys(("zero_points", "half_scales", "bias", "input"), 0)
    attributes = {**weights.attributes, **zeros, "epsilon": 0.0, **changed}
    node = helper.make_node(
        kernels.MATMUL, ["x", "tiles"], ["y"], domain=kernels.DOMAIN, **attributes
    )
    made = session(node, {"x": ["B", "S", attributes["K"]]}, tiles=tiles)
    return lambda x: made.run(["y"], {"x": x})[0]
