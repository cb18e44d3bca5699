"""Rounds a matrix so that the errors of its columns cancel on what it is multiplied with.

The error of a product is r^T H r for a row's rounding errors r and the moment H = E[x x^T]. With
H = U U^T, U upper triangular, that is a sum with one square for each column,
`(r_j + sum over i < j of r_i U_ij / U_jj)^2 U_jj^2`: from left to right, a column is rounded not to
its own value but to the one that makes up for the columns before it. These are the steps of GPTQ
(Frantar et al., 2022), without an inverse. A block's scale is chosen for the values that are to be
rounded then, each as important as its U_jj^2 says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.quantize import (
    QuantizedWeight,
    block_grids,
    check_finite,
    inverses,
    packed_blocks,
)

Float = NDArray[np.float32]

_DAMPING = 0.01  # of the mean square input, added to each: a few tokens do not say everything
_LAST = 15  # of the codes
_PANEL = 512  # columns that are factored at a time


class Feedback:
    """What a moment says about rounding to 4 bits; of any rows, since rows do not meet.

    Args:
        moment: [K, K], the mean of x x^T over what the weights are multiplied with; used up, since
            it may be as large as all else together.
        block: weights that share a scale.

    Raises:
        ValueError: it has NaN or infinity.
    """

    def __init__(self, moment: Float, block: int) -> None:
        self._block = block
        mean = max(float(np.trace(moment)) / len(moment), 1e-20)
        if not np.isfinite(mean):
            raise ValueError("activations contain NaN or infinity")
        moment /= np.float32(mean)
        # Back to front, the lower factor of the matrix back to front is the upper one. Below its
        # diagonal, where the moment is left over, nothing is read.
        lower = _factor(moment[::-1, ::-1])
        diagonal = np.diagonal(lower).copy()
        self._importance: Float = diagonal[::-1] ** 2
        lower /= diagonal
        self._feedback: Float = lower.T[::-1, ::-1]  # [to column, from column]

    def quantize(self, weight: Float) -> QuantizedWeight:
        """Rounds rows [N, K]. Raises ValueError on NaN or infinite weights."""
        check_finite(weight)
        rows, columns = weight.shape
        weight = np.ascontiguousarray(weight.T)  # a column lies in one piece
        errors = np.empty_like(weight)
        codes = np.empty((rows, columns + -columns % self._block), np.uint8)
        grids = []
        for start in range(0, columns, self._block):
            part = slice(start, min(start + self._block, columns))
            wanted: Float = weight[part] + self._feedback[part, :start] @ errors[:start]
            importance: Float = self._importance[part]
            scale, zero_point = block_grids(wanted.T, importance / importance.max())
            inverse = inverses(scale)
            within = np.ascontiguousarray(self._feedback[part, part])
            for place, column in enumerate(range(part.start, part.stop)):
                made_up = within[place, :place] @ errors[start:column]
                code = np.rint((wanted[place] + made_up) * inverse + zero_point).clip(0, _LAST)
                errors[column] = weight[column] - (code - zero_point) * scale
                codes[:, column] = code
            codes[:, part.stop : start + self._block] = zero_point[:, None]  # fills the last block
            grids.append((scale, zero_point))
        scales, zero_points = (np.stack(found, axis=1) for found in zip(*grids, strict=True))
        return packed_blocks(codes.reshape(rows, -1, self._block), scales, zero_points)


def _factor(moment: Float) -> Float:
    """Cholesky's lower factor of a moment whose mean square is 1, with as much damping as it takes.

    Single precision may not do where a few inputs are thousands of times larger than the others.
    The factor takes the moment's place below the diagonal; above it the moment stays as it was,
    so that a second try needs no copy of a matrix that may take 0.4 GB.
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
    """The lower factor of a symmetric matrix, panel by panel, in its lower triangle."""
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
