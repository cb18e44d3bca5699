"""Predicts how a text continues from the places where its last tokens occurred before.

`kernels/suffixes.h` describes the method. It is written in C because a whole pass of a small model
takes as little as a fifth of a millisecond.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specops.request import LOOKUP_PLACES, Draft
from specops.runtime.kernels import library
from specops.runtime.session import ModelLoadError

MAX_DRAFT_TOKENS = 16  # maximum number of tokens per lookup
HISTORY_CONTEXTS = (3, 2)  # number of tokens that must match; (2, 1) in a request's own text


class History:
    """The texts of earlier requests.

    Args:
        capacity: maximum number of tokens, at least 2; when full, it keeps the latest half.

    Raises:
        ValueError: the capacity is too small.
        MemoryError: there is not enough memory.
    """

    def __init__(self, capacity: int) -> None:
        _check(capacity)
        self.handle: int | None = library.specops_text_new(capacity, *HISTORY_CONTEXTS)
        if self.handle is None:
            raise MemoryError(f"no room for a history of {capacity} tokens")

    def __del__(self) -> None:
        library.specops_text_free(getattr(self, "handle", None))

    def learn(self, lookups: Lookups) -> None:
        """Append the new part of a request's text: it often has most of its prompt already."""
        library.specops_teach(self.handle, lookups.handle)


class Estimate:
    """Learns from all requests how likely a looked-up token is to be accepted."""

    def __init__(self) -> None:
        self._weights = np.zeros(library.specops_estimate_floats(), np.float32)
        self.address = self._weights.ctypes.data


class NgramTable:
    """The most frequent successor of one to three tokens in a model's own texts, in a file.

    The file is a hash table with linear probing: an array of 64-bit words, searched in place. The
    first word is the number of slots. Each n-gram has an entry in its slot or in the first free one
    after it, and a zero ends the table. An entry has 32 bits of the hash of its tokens, 24 bits of
    the next token, and 8 bits of how often that token followed.

    Args:
        path: the file.
        vocab_size: size of the model's vocabulary.

    Raises:
        ModelLoadError: the file is not a table, or belongs to another vocabulary.

    Attributes:
        path: the file.
        address: memory address of the first word.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        try:
            words = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"{path} is not a whole table of n-grams ({error}): download it again"
            ) from None
        if words.dtype != np.uint64 or words.ndim != 1 or not _whole(words):
            raise ModelLoadError(f"{path} is damaged: download it again")
        if int((words[1:] >> np.uint64(8) & np.uint64(0xFFFFFF)).max()) >= vocab_size:
            raise ModelLoadError(f"{path} belongs to a model with another vocabulary")
        self.path = path
        self._words = words
        self.address = words.ctypes.data


class Lookups:
    """A request's text, and the tokens of its last lookup.

    Args:
        capacity: see `History`.
        estimate: shared by all requests.
        table: address of a table of n-grams; None: there is none.

    Raises:
        ValueError: the capacity is too small.
        MemoryError: there is not enough memory.

    Attributes:
        length: number of tokens in the text.
    """

    def __init__(self, capacity: int, estimate: Estimate, table: int | None = None) -> None:
        _check(capacity)
        self.handle: int | None = library.specops_lookups_new(capacity)
        if self.handle is None:
            raise MemoryError(f"no room for a text of {capacity} tokens")
        self.length = 0
        self._estimate = estimate
        self._table = table
        self._tokens = (ctypes.c_int32 * MAX_DRAFT_TOKENS)()
        self._promised = (ctypes.c_float * MAX_DRAFT_TOKENS)()
        self._found_in = ctypes.c_int32()

    def __del__(self) -> None:
        library.specops_lookups_free(getattr(self, "handle", None))

    def look_up(
        self, tokens: Sequence[int], history: History | None, most: int, least: float
    ) -> Draft:
        """Append new tokens to the text and predict how it continues.

        Args:
            tokens: the whole text, which may only grow between calls.
            history: texts to search in addition; None: only the text and the table.
            most: maximum number of tokens to predict, up to `MAX_DRAFT_TOKENS`.
            least: the prediction ends before the first token that is reached with a lower
                probability.

        Returns:
            The tokens, possibly none, the probability of each if those before it are right, and
            where they were found: in the `text` (prompt included), `history` or `table`.
        """
        more = array("i", tokens[self.length :])
        self.length = len(tokens)
        address, count = more.buffer_info()
        found: int = library.specops_look_up(
            self.handle, history.handle if history else None, self._table, self._estimate.address,
            address, count, most, least, self._tokens, self._promised, ctypes.byref(self._found_in),
        )  # fmt: skip
        return Draft(
            tuple(self._tokens[:found]),
            accept_probs=tuple(self._promised[:found]),
            found_in=LOOKUP_PLACES[self._found_in.value],
        )


def _whole(words: npt.NDArray[np.uint64]) -> bool:
    """Whether every lookup ends within the words."""
    return len(words) > 2 and 0 < int(words[0]) < len(words) - 1 and not words[-1]


def _check(capacity: int) -> None:
    if capacity < 2:
        raise ValueError(f"a text must have room for at least 2 tokens, not {capacity}")
