"""How a text goes on where its last tokens stood before, and how sure that is: counted suffixes.

`kernels/suffixes.h` says how. Beside a pass of a fifth of a millisecond Python would be too slow.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from specops.runtime.kernels import library

LONGEST_DRAFT = 16  # tokens of one look-up at most
HISTORY_CONTEXTS = (3, 2)  # tokens that must agree; a request's own text has (2, 1)


class History:
    """What earlier requests said: tokens and where they stood.

    Args:
        capacity: tokens that are remembered, at least 2; at least the latest half of them.

    Raises:
        ValueError: it is too small.
        MemoryError: there is no room.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"{capacity} tokens: at least 2")
        self.handle: int | None = library.specops_text_new(capacity, *HISTORY_CONTEXTS)
        if self.handle is None:
            raise MemoryError(f"no room for a history of {capacity} tokens")

    def __del__(self) -> None:
        library.specops_text_free(getattr(self, "handle", None))

    def learn(self, lookups: Lookups) -> None:
        """Append a request's text."""
        library.specops_teach(self.handle, lookups.handle)


class Estimate:
    """How likely looked-up tokens are right: learned from those of all requests."""

    def __init__(self) -> None:
        self._weights = np.zeros(library.specops_estimate_floats(), np.float32)
        self.address = self._weights.ctypes.data


class Lookups:
    """A request's text, and what it was told of late.

    Args:
        capacity: tokens that are remembered, at least 2; at least the latest half of them.
        estimate: shared by all requests.

    Raises:
        ValueError: it is too small.
        MemoryError: there is no room.

    Attributes:
        length: tokens taken in.
    """

    def __init__(self, capacity: int, estimate: Estimate) -> None:
        if capacity < 2:
            raise ValueError(f"{capacity} tokens: at least 2")
        self.handle: int | None = library.specops_lookups_new(capacity)
        if self.handle is None:
            raise MemoryError(f"no room for a text of {capacity} tokens")
        self.length = 0
        self._estimate = estimate
        self._tokens = (ctypes.c_int32 * LONGEST_DRAFT)()
        self._promised = (ctypes.c_float * LONGEST_DRAFT)()

    def __del__(self) -> None:
        library.specops_lookups_free(getattr(self, "handle", None))

    def look_up(
        self, tokens: Sequence[int], history: History | None, most: int, least: float
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Take in what is new and say how the text may go on.

        Args:
            tokens: the whole text; between two calls it only grows.
            history: is asked as well.
            most: tokens to propose, up to `LONGEST_DRAFT`.
            least: they end before the one that is reached with less than this probability.

        Returns:
            [k] tokens, and the probability that each is right where those before it are.
        """
        more = array("i", tokens[self.length :])
        self.length = len(tokens)
        address, count = more.buffer_info()
        found: int = library.specops_look_up(
            self.handle, history.handle if history else None, self._estimate.address,
            address, count, most, least, self._tokens, self._promised,
        )  # fmt: skip
        return tuple(self._tokens[:found]), tuple(self._promised[:found])
