"""Products are exact up to the rounding of activations, and the same bits beside any other rows.

Norms, too. `test_packing` shows that tiles hold a file's numbers; here the operator QuantizedGather
reads them, and a product must be what these numbers and the rounded activations give.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

from specops.runtime import kernels
from specops.runtime.kernels.packing import WeightType, pack, pack_rows
from tests.runtime.kernels.operators import covering, operator
from tests.runtime.kernels.test_packing import FILES, OWN, gather, random_rows

ROWS = 35  # more than one group of any kernel, and a rest
AS_IT_IS, NORM, LAYER_NORM, GELU, SILU_GATE, GELU_GATE, OUTPUT_GATE = range(7)  # `input`
NORMS, GATES = (NORM, LAYER_NORM), (SILU_GATE, GELU_GATE)
EPSILON = 1e-5
f = np.float32


class Weights(NamedTuple):
    """Matrices of one input, a type for each, and their tiles one behind the other."""

    columns: tuple[int, ...]
    types: tuple[WeightType, ...]
    depth: int
    block: int
    tiles: np.ndarray
    bias: np.ndarray | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        types = [int(type) for type in self.types]
        return {"N": self.columns, "types": types, "K": self.depth, "block_size": self.block}

    @property
    def matrix(self) -> np.ndarray:
        """[N, K] of the only matrix, in float64."""
        (columns,), (type,) = self.columns, self.types
        attributes = {"N": columns, "K": self.depth, "block_size": self.block, "tiled": 1}
        return gather(type, self.tiles, **attributes)(ids=np.arange(columns))[0].astype(float)


class Blocks(NamedTuple):
    """Weights as MatMulNBits has them."""

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


def random_blocks(
    columns: int, depth: int, bits: int, block: int, *, zero_points: bool = False
) -> Blocks:
    random = np.random.default_rng(columns + depth + bits + block)
    blocks = -(-depth // block)
    points = random.integers(0, 256, (columns, -(-blocks * bits // 8)), np.uint8)
    return Blocks(
        random.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8),
        random.normal(0, 0.01, (columns, blocks)).astype(np.float16).astype(f),
        points if zero_points else None,
    )


def random_weights(
    columns: int,
    depth: int,
    type: WeightType = WeightType.INT4,
    block: int = 32,
    *,
    bias: bool = False,
) -> Weights:
    random = np.random.default_rng(columns)
    if type in FILES:
        raw = random_rows(type, columns, depth)
        if type == WeightType.MXFP4:
            exponents = raw.reshape(columns, -1, 17)[..., 0]
            exponents[:] = random.integers(110, 130, exponents.shape)
        tiles = pack_rows(raw, type, depth)
    else:
        bits = 4 if "4" in type.name else 8
        blocks = random_blocks(columns, depth, bits, block, zero_points="ZERO" in type.name)
        if type.name.endswith("FLOAT"):
            blocks = blocks._replace(scales=blocks.scales * f(1 / 3))
        _, tiles = pack(*blocks, bits=bits, block=block, type=type)
    added = random.normal(0, 0.1, columns).astype(f) if bias else None
    return Weights((columns,), (type,), depth, block, tiles, added)


def product(
    weights: Weights,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    **attributes: Any,
) -> Callable[..., list[np.ndarray]]:
    """The operator QuantizedMatMul with these weights; `attributes` change those that fit them."""
    fixed = {"tiles": weights.tiles}
    if weights.bias is not None:
        fixed["bias"] = weights.bias
    names = ["x", "tiles", "bias", "norm", "residual", "shift"]
    fitting = {
        **weights.attributes,
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
    most = np.abs(blocks).max(-1, keepdims=True)
    codes, scales = np.rint(blocks * (f(127) / most)), most / f(127)
    return (codes.astype(float) * scales).reshape(rows, -1)[:, :depth]


def block_of(type: WeightType) -> int:
    """Weights of a block in a file."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)][0]


CASES = [  # columns and depth, type, block
    *covering([(17, 512), (90, 768)], FILES, [32]),
    *covering([(35, 352), (16, 96)], [type for type in FILES if block_of(type) == 32], [32]),
    *covering([(17, 33), (90, 700), (256, 1024)], OWN, [32, 64, 128, 256]),
]


@pytest.mark.parametrize(
    ("shape", "type", "block"),
    CASES,
    ids=lambda value: value.name if isinstance(value, WeightType) else str(value),
)
def test_a_product(shape: tuple[int, int], type: WeightType, block: int) -> None:
    """By every kernel with the same bits, beside any other rows; only activations are rounded."""
    weights = random_weights(*shape, type, block, bias=shape[0] % 2 == 0)
    x = np.random.default_rng(1).normal(size=(ROWS, shape[1])).astype(f)
    x[3] *= f(1e30)
    x[5, ::7] = 0
    codes, matrix = rounded(x, block), weights.matrix
    expected, size = codes @ matrix.T, np.abs(codes) @ np.abs(matrix.T)
    if weights.bias is not None:
        expected, size = expected + weights.bias, size + np.abs(weights.bias)
    first = multiply(weights, x[None])[0]
    assert (np.abs(first - expected) <= 1e-6 * size).all()
    for name in kernels.NAMES:
        kernels.force(name)
        compute = product(weights)
        for width in range(1, ROWS + 1):
            assert np.array_equal(compute(x=x[None, :width])[0][0], first[:width])
        assert np.array_equal(compute(x=x[:, None])[0][:, 0], first)
        assert np.array_equal(compute(x=x[None, 5:6])[0][0], first[5:6])


@pytest.mark.parametrize(
    "types",
    [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "IQ4_XS", "Q2_K", "Q5_1", "MXFP4"), ("INT4_ZERO", "INT8")],
    ids="-".join,
)
def test_a_product_of_several_matrices(each_kernel: str, types: tuple[str, ...]) -> None:
    """Is the products of each, one behind the other."""
    parts = [
        random_weights(15 + 9 * number, 256, WeightType[name], bias=True)
        for number, name in enumerate(types)
    ]
    columns = tuple(part.columns[0] for part in parts)
    tiles, bias = (
        np.concatenate(given) for given in zip(*(part[4:] for part in parts), strict=True)
    )
    all_types = tuple(part.types[0] for part in parts)
    together = product(Weights(columns, all_types, 256, 32, tiles, bias))
    x = np.random.default_rng(2).normal(size=(1, 20, 256)).astype(f)
    expected = np.concatenate([multiply(part, x) for part in parts], axis=-1)
    for rows in (1, 2, 7, 20):
        assert np.array_equal(together(x=x[:, :rows])[0], expected[:, :rows])


@pytest.mark.parametrize("type", ["Q4_1", "Q6_K", "Q8_0", "IQ4_NL"])
def test_rows_of_a_prompt_have_the_bits_of_few(each_kernel: str, type: str) -> None:
    """Also where weights are unpacked once for many rows, and several times for all."""
    weights = random_weights(40, 768, WeightType[type])
    x = np.random.default_rng(7).normal(size=(1, 270, 768)).astype(f)
    few = [multiply(weights, x[:, first : first + 9]) for first in range(0, 270, 9)]
    assert np.array_equal(multiply(weights, x), np.concatenate(few, axis=1))


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (8, False), (4, True)])
def test_onnxruntime_computes_nearly_the_same(bits: int, zero_points: bool) -> None:
    blocks = random_blocks(256, 1024, bits, 128, zero_points=zero_points)
    type, tiles = pack(*blocks, bits=bits, block=128)
    stored = {name: array for name, array in blocks._asdict().items() if array is not None}
    attributes = {"N": 256, "K": 1024, "bits": bits, "block_size": 128, "accuracy_level": 4}
    other = operator(
        "MatMulNBits", ["x", *stored], ["y"], stored, domain="com.microsoft", **attributes
    )
    x = np.random.default_rng(3).normal(size=(1, ROWS, 1024)).astype(f)
    expected = other(x=x)[0]
    error = multiply(Weights((256,), (type,), 1024, 128, tiles), x) - expected
    assert np.abs(error).max() < 2e-3 * expected.std()


@pytest.mark.parametrize("small", [0.0, 1e-44, 1e-38, 1e-31])
def test_activations_close_to_0_count_as_0(each_kernel: str, small: float) -> None:
    weights = random_weights(32, 256, WeightType.Q4_K)
    assert not multiply(weights, np.full((1, 2, 256), small, f)).any()


def test_offsets_are_added_in_one_order(each_kernel: str) -> None:
    """dot * (scale * s) + offset * (s * sum): s and sum of the activations, each step rounded."""
    raw = random_rows(WeightType.Q4_1, 16, 32)
    weights = Weights((16,), (WeightType.Q4_1,), 32, 32, pack_rows(raw, WeightType.Q4_1, 32))
    x = np.random.default_rng(6).normal(size=32).astype(f)
    most = np.abs(x).max()
    codes, s = np.rint(x * (f(127) / most)).astype(np.int32), most / f(127)
    scales, offsets = raw[:, :4].copy().view(np.float16).astype(f).T
    stored = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1).astype(np.int32)
    expected = (stored @ codes).astype(f) * (scales * s) + offsets * (s * f(codes.sum()))
    assert np.array_equal(multiply(weights, x[None, None])[0, 0], expected)


# -- inputs that a product computes itself --------------------------------------------------------

INPUTS = [  # kind, residual, shift
    *((kind, residual, False) for kind in NORMS for residual in (False, True)),
    *((LAYER_NORM, residual, True) for residual in (False, True)),
    *((kind, False, False) for kind in (GELU, *GATES)),
    (OUTPUT_GATE, True, False),
]


def inputs_of(kind: int, depth: int, *, residual: bool, shift: bool) -> dict[str, np.ndarray]:
    """A norm's inputs are far from 0: a layer norm subtracts their mean."""
    random = np.random.default_rng(depth)
    if kind not in NORMS:
        shape = 1, ROWS, 2 * depth if kind in GATES else depth
        names = ("x", "residual") if kind == OUTPUT_GATE else ("x",)
        return {name: random.normal(0, 4, shape).astype(f) for name in names}
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
    if kind == OUTPUT_GATE:
        return inputs["x"] / (1 + np.exp(-inputs["residual"].astype(np.float64)))
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
    name: str, options: tuple[int, bool, bool], size: tuple[int, int]
) -> None:
    """With any outputs; a Norm has the same bits. Every pair of kernel, input and size occurs."""
    (kind, residual, shift), (depth, block) = options, size
    kernels.force(name)
    weights = random_weights(40, depth, WeightType.INT8_ZERO_FLOAT, block)
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
    weights = random_weights(16, 512, WeightType.INT8)
    gate = np.concatenate([np.geomspace(1e-30, 700, 255), [0.0]]).astype(f)
    x = np.concatenate([gate, -gate, np.ones(512, f)])[None, None]
    activated = product(weights, ("x",), ("y", "", "activated"), input=kind)(x=x)[1]
    exact = exactly(kind, {"x": x})
    assert np.allclose(activated, exact, rtol=1e-5, atol=1e-12 if kind == SILU_GATE else 1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "odd", "place"),
    covering(kernels.NAMES, range(7), [np.nan, np.inf, -np.inf], [0, 31, 32, 99]),
)
def test_infinite_numbers_make_their_row_nan_and_no_other(
    name: str, kind: int, odd: float, place: int
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


@pytest.mark.parametrize(
    ("name", "size", "type"),
    covering(
        kernels.NAMES,
        [(700, 32), (33, 32), (576, 32), (512, 256)],
        [type for type in OWN if not type.name.endswith("FLOAT")],
    ),
)
def test_scales_in_float16_give_the_same_bits(
    name: str, size: tuple[int, int], type: WeightType
) -> None:
    """Some are 0, tiny or huge. Every pair of factors occurs."""
    kernels.force(name)
    (depth, block), bits = size, 4 if "4" in type.name else 8
    blocks = random_blocks(40, depth, bits, block, zero_points="ZERO" in type.name)
    random = np.random.default_rng(block)
    odd = np.array([0, -0.0, 6e-8, -5e-7, 6.1e-5, 65504, -65504], np.float16)
    some = random.normal(0, 0.05, blocks.scales.shape).astype(np.float16)
    scales = np.where(random.random(some.shape) < 0.2, random.choice(odd, some.shape), some)
    blocks = blocks._replace(scales=scales.astype(f))
    x = random.normal(size=(1, ROWS, depth)).astype(f)
    found = []
    for stored in (type, WeightType[f"{type.name}_FLOAT"]):
        _, tiles = pack(*blocks, bits=bits, block=block, type=stored)
        found.append(multiply(Weights((40,), (stored,), depth, block, tiles), x))
    assert np.array_equal(*found)


# -- what is refused -------------------------------------------------------------------------------


def test_no_rows() -> None:
    assert multiply(random_weights(32, 64), np.zeros((0, 3, 64), f)).shape == (0, 3, 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"N": [0]}, "1 to 16777216"),
        ({"K": -1}, "1 to 16777216"),
        ({"N": [(1 << 24) + 1]}, "1 to 16777216"),
        ({"K": (1 << 24) + 1}, "1 to 16777216"),
        ({"N": [16, 16]}, "as many numbers"),
        ({"N": [16] * 9, "types": [256] * 9}, "1 to 8"),
        ({"types": [4]}, "no such type"),
        ({"types": [1 << 40]}, "no such type"),
        ({"types": [WeightType.Q4_K], "block_size": 64}, "blocks of 32"),
        ({"block_size": 0}, "multiples of 32"),
        ({"block_size": 48}, "multiples of 32"),
        ({"block_size": 512}, "multiples of 32"),
        ({"bias": -1}, "bias is 0 or 1"),
        ({"input": 7}, "input is 0 to 6"),
        ({"input": -1}, "input is 0 to 6"),
        ({"epsilon": -1.0}, "epsilon is below 0"),
        ({"epsilon": math.inf}, "epsilon is below 0 or not finite"),
        ({"N": [1 << 24], "K": 1 << 24}, "another size"),
        ({"N": [33]}, "another size"),
        ({"types": [WeightType.INT4_FLOAT]}, "another size"),
        ({"types": [WeightType.Q6_K]}, "another size"),
        ({"bias": 1}, "bias is missing"),
    ],
)
def test_an_impossible_product_is_refused(changed: dict[str, Any], message: str) -> None:
    weights = random_weights(32, 64)
    with pytest.raises(Exception, match=message):
        multiply(weights, np.zeros((1, 1, max(0, changed.get("K", 64))), f), **changed)


def test_tiles_that_end_early_are_refused() -> None:
    weights = random_weights(32, 64)
    with pytest.raises(Exception, match="another size"):
        multiply(weights._replace(tiles=weights.tiles[:-64]), np.zeros((1, 1, 64), f))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"input": 0}, "input is 1, 2 or 7"),
        ({"input": 3}, "input is 1, 2 or 7"),
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


@pytest.mark.parametrize("shape", [None, (1, 2, 63), (1, 3, 64)])
def test_gates_of_wrong_shapes_are_refused(shape: tuple[int, ...] | None) -> None:
    given = {"x": np.zeros((1, 2, 64), f)}
    given |= {} if shape is None else {"residual": np.zeros(shape, f)}
    with pytest.raises(Exception, match="the gate has another shape"):
        product(random_weights(32, 64), tuple(given), input=OUTPUT_GATE)(**given)
