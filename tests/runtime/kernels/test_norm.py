"""A norm by itself has the bits that a product would make of it, and refuses what does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from onnx import helper

from specops.runtime import kernels
from tests.runtime.kernels.test_matmul import (
    EPSILON,
    LAYER_NORM,
    MIDDLE,
    NORM,
    ROWS,
    dims_of,
    making,
    norm_inputs,
    norm_of,
    random_weights,
    session,
)


def norm(
    kind: int, inputs: Mapping[str, np.ndarray], **attributes: Any
) -> Callable[..., list[np.ndarray]]:
    """The norm and the sum of inputs that are named as these are."""
    names = [name if name in inputs else "" for name in ("norm", "residual", "shift")]
    node = helper.make_node(
        kernels.NORM,
        ["x", *names],
        ["made", "sum"],
        domain=kernels.DOMAIN,
        **{"input": kind, "epsilon": EPSILON, **attributes},
    )
    dims = {name: dims for name, dims in dims_of(inputs["x"].shape[-1]).items() if name in inputs}
    made = session(node, dims)
    return lambda **inputs: made.run(["made", "sum"], inputs)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("kind", "shift"), [(NORM, False), (LAYER_NORM, False), (LAYER_NORM, True)]
)
@pytest.mark.parametrize("depth", [1, 15, 16, 33, 640, 1024])
def test_a_norm_has_the_bits_that_a_product_makes(
    depth: int, kind: int, *, shift: bool, residual: bool
) -> None:
    """By every kernel, for any rows, on one thread or several."""
    weights = random_weights(16, depth, 8, 32, zero_points=MIDDLE, bias=False)
    inputs = norm_inputs(depth, residual=residual, shift=shift)
    product = making(weights, kind, residual=residual, shift=shift, outputs=("y", "sum", "made"))
    _, total, made = product(**inputs)
    exact = norm_of(kind, inputs)
    assert np.abs(made - exact).max() <= 1e-6 * np.abs(exact).max()
    try:
        for name in kernels.NAMES:
            kernels.force(name)
            compute = norm(kind, inputs)
            for rows in (0, 1, 2, ROWS):
                some = {
                    name: value[:, :rows] if value.ndim > 1 else value
                    for name, value in inputs.items()
                }
                found = compute(**some)
                assert np.array_equal(found[0], made[:, :rows])
                assert np.array_equal(found[1], total[:, :rows])
    finally:
        kernels.force(None)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"input": 0}, "input is 1 or 2"),
        ({"input": 3}, "input is 1 or 2"),
        ({"epsilon": -1.0}, "epsilon is below 0"),
        ({"epsilon": math.nan}, "epsilon is below 0 or not finite"),
    ],
)
def test_a_norm_that_cannot_be_is_refused(attributes: dict[str, Any], message: str) -> None:
    inputs = norm_inputs(64, residual=True, shift=True)
    with pytest.raises(Exception, match=message):
        norm(LAYER_NORM, inputs, **attributes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"norm": (63,)}, "norm is missing or has another size"),
        ({"norm": (64, 1)}, "norm is missing or has another size"),
        ({"shift": (65,)}, "shift has another size"),
        ({"residual": (1, 2, 63)}, "residual has another shape"),
        ({"residual": (1, 3, 64)}, "residual has another shape"),
        ({"x": (1, 2, 0)}, "last dimension is 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    wrong: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {"x": (1, 2, 64), "norm": (64,), "residual": (1, 2, 64), "shift": (64,)} | wrong
    given = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    node = helper.make_node(
        kernels.NORM, list(shapes), ["made"], domain=kernels.DOMAIN, input=LAYER_NORM, epsilon=0.0
    )
    dims = {name: [None] * len(shape) for name, shape in shapes.items()}
    made = session(node, dims)
    with pytest.raises(Exception, match=message):
        made.run(["made"], given)
