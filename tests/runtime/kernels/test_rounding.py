"""Threads round parts of K of the same rows at once; each row has the bits that it has alone."""

from collections.abc import Iterator

import numpy as np
import pytest

from specops.runtime import kernels
from specops.runtime.kernels.packing import WeightType, pack_rows, row_bytes
from tests.runtime.kernels.operators import operator

COLUMNS, DEPTH, ROWS = 16, 4128, 8  # not as many blocks as a power of two
KINDS = {"as it is": 0, "norm": 1, "layer norm": 2, "gate": 4}  # matmul.h


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    kernels.share(2)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_threads_round_together_are_those_of_one_thread(
    each_kernel: str, kind: str
) -> None:
    random = np.random.default_rng(7)
    raw = random.integers(0, 255, (COLUMNS, row_bytes(WeightType.Q8_0, DEPTH)), np.uint8)
    raw.reshape(COLUMNS, -1, 34)[..., :2] = np.array([0.01], np.float16).view(np.uint8)
    width = 2 * DEPTH if kind == "gate" else DEPTH
    given = {"x": random.normal(size=(ROWS, width)).astype(np.float32)}
    if "norm" in kind:
        given |= {"norm": np.ones(DEPTH, np.float32), "residual": given["x"][::-1].copy()}
    names = ("x", "tiles", "", "norm", "residual") if "norm" in kind else ("x", "tiles")
    outputs = ("y", "sum" if "norm" in kind else "", "activated" if KINDS[kind] else "")
    multiply = operator(
        kernels.MATMUL, names, outputs, {"tiles": pack_rows(raw, WeightType.Q8_0, DEPTH)},
        K=DEPTH, N=[COLUMNS], types=[WeightType.Q8_0], block_size=32, bias=0, input=KINDS[kind],
        epsilon=1e-5,
    )  # fmt: skip
    kernels.share(16)
    together = multiply(**given)
    for row in range(ROWS):
        alone = multiply(
            **{
                name: array if name == "norm" else array[row : row + 1]
                for name, array in given.items()
            }
        )
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[row])
