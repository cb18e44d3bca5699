"""Rounds a matrix so that the errors of its columns cancel in the product with its inputs.

The error of a product is r^T H r for a row's rounding errors r and the moment H = E[x x^T]. With
H = U U^T, U upper triangular, that is a sum with one square for each column,
`(r_j + sum over i < j of r_i U_ij / U_jj)^2 U_jj^2`. From left to right, each column is rounded to
the value that compensates the errors of the columns before it. These are the steps of GPTQ
(Frantar et al., 2022), without an inverse. A block's scale is chosen for the compensated values,
weighted by U_jj^2.
"""

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.quantize import (
    QuantizedWeight,
    block_grids,
    check_finite,
    packed_codes,
    packed_points,
)
from specops.runtime.kernels import library

Float = NDArray[np.float32]

_DAMPING = 0.01  # of the mean square input, added to each: the text is only a sample
_PANEL = 512  # columns factored at a time


class Feedback:
    """Rounds rows of a matrix to 4 bits by the moment of its inputs; rows are independent.

    Args:
        moment: [K, K], the mean of x x^T over the inputs x. It is overwritten, because a copy could
            take as much memory as everything else.
        block: weights per scale.

    Raises:
        ValueError: the moment has NaN or infinity.
    """

    def __init__(self, moment: Float, block: int) -> None:
        self._block = block
        mean = max(float(np.trace(moment)) / len(moment), 1e-20)
        if not np.isfinite(mean):
            raise ValueError("activations contain NaN or infinity")
        moment /= np.float32(mean)
        # The lower factor of the reversed matrix, reversed again, is the upper factor. Below the
        # diagonal it still holds the moment, which nothing reads.
        lower = _factor(moment[::-1, ::-1])
        diagonal = np.diagonal(lower).copy()
        self._importance: Float = diagonal[::-1] ** 2
        lower /= diagonal
        self._feedback: Float = lower.T[::-1, ::-1]  # [to column, from column]

    def quantize(self, weight: Float) -> QuantizedWeight:
        """Rounds rows [N, K]. Raises ValueError on NaN or infinite weights."""
        check_finite(weight)
        rows, columns = weight.shape
        weight = np.ascontiguousarray(weight.T)  # columns become contiguous
        errors = np.empty_like(weight)
        blocks = -(-columns // self._block)
        codes = np.zeros((rows, blocks, self._block), np.uint8)
        scales, zero_points = np.empty((2, blocks, rows), np.float32)
        for number in range(blocks):
            start = number * self._block
            part = slice(start, min(start + self._block, columns))
            size = part.stop - start
            wanted = weight[part] + self._feedback[part, :start] @ errors[:start]
            scales[number], zero_points[number] = self._grids(wanted, part)
            within = np.ascontiguousarray(self._feedback[part, part])
            library.specops_compensate(
                *(weight[part].ctypes.data, wanted.ctypes.data, size, rows, within.ctypes.data),
                *(scales[number].ctypes.data, zero_points[number].ctypes.data),
                *(errors[part].ctypes.data, codes[:, number].ctypes.data, blocks * self._block),
            )
        codes[:, -1, size:] = zero_points[-1][:, None]  # pads the last block
        points = packed_points(zero_points.T)
        return QuantizedWeight(packed_codes(codes, 4), np.ascontiguousarray(scales.T), points)

    def _grids(self, wanted: Float, part: slice) -> tuple[Float, Float]:
        """Scales and zero points, [rows] each, of the columns `part`, `wanted` [columns, rows]."""
        blocks = np.zeros((wanted.shape[1], self._block), np.float32)
        blocks[:, : len(wanted)] = wanted.T
        importance = np.zeros(self._block, np.float32)
        importance[: len(wanted)] = self._importance[part]
        return block_grids(blocks, importance / importance.max())


def _factor(moment: Float) -> Float:
    """Cholesky's lower factor of a moment with mean square 1, with as much damping as needed.

    Single precision may fail if a few inputs are thousands of times larger than the others. The
    factor overwrites the moment below the diagonal. The part above it stays, so a second try needs
    no copy of a matrix that may take 0.4 GB.
    """
    diagonal = np.diagonal(moment).copy()
    damping = _DAMPING
    while True:
        np.einsum("ii->i", moment)[:] = diagonal + np.float32(damping)
        try:
            _factor_in_place(moment)
        except np.linalg.LinAlgError:
            damping *= 4
            for start in range(0, len(moment), _PANEL):
                part = slice(start, start + _PANEL)
                below = np.tril_indices(len(moment[part]), -1)
                moment[part, :start] = moment[:start, part].T
                moment[part, part][below] = moment[part, part].T[below]
        else:
            return moment


def _factor_in_place(matrix: Float) -> None:
    """Writes the lower factor of a symmetric matrix to its lower triangle, panel by panel."""
    for start in range(0, len(matrix), _PANEL):
        stop = min(start + _PANEL, len(matrix))
        panel = slice(start, stop)
        corner: Float = np.linalg.cholesky(matrix[panel, panel])
        below = np.tril_indices(stop - start)
        matrix[panel, panel][below] = corner[below]
        rest = matrix[stop:, panel]
        rest[:] = rest @ np.linalg.inv(corner).T
        for first in range(stop, len(matrix), _PANEL):
            rows = slice(first, min(first + _PANEL, len(matrix)))
            product = matrix[rows, panel] @ matrix[stop : rows.stop, panel].T
            matrix[rows, stop : rows.stop] -= np.tril(product, first - stop)
