"""Times products with weights of one type, in a process with one checkout's interpreter.

So this file uses only parts of the project that are the same in every version.
"""

import numpy as np

from bench.runtime.kernel_times import DEPTH, opened, tiles
from bench.tools.worker import serve, timed
from specops.runtime import kernels
from specops.runtime.session import Session, share_threads

_BYTES = 96 << 20  # of weights, more than most processors' last cache holds


class Products:
    """Times products; see `bench.tools.worker`."""

    def load(self, threads: int) -> None:
        """Set the number of threads."""
        share_threads(threads)
        self._of, self._sessions = "", dict[str, Session]()

    def products(self, *, kernel: str, weights: str, rows: int, count: int) -> list[float]:
        """Seconds in which all weights are multiplied once, each time.

        Args:
            kernel: name of the kernels.
            weights: type of the weights; see `kernel_times.tiles`.
            rows: rows of the other factor.
            count: number of measured times.
        """
        if weights != self._of:
            self._of, self._sessions = weights, {}
        if kernel not in self._sessions:
            kernels.force(kernel)
            packed = tiles(np.random.default_rng(1), weights)
            self._sessions[kernel] = opened(packed, -(-_BYTES // packed[1].nbytes))
        x = np.random.default_rng(0).normal(size=(rows, DEPTH)).astype(np.float32)
        return timed(lambda: self._sessions[kernel].run(None, {"x": x}), count)


if __name__ == "__main__":
    serve(Products())
