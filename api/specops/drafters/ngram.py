"""Guesses by looking up where the last few tokens stood before in the same request.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding): code, quotations
and structured text repeat themselves, and a lookup costs microseconds. Every n-gram of the
sequence is filed once under its tokens, so a lookup does not scan the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specops.drafters.base import NO_DRAFT, Draft
from specops.request import SamplingParams

LONGEST = 4
SHORTEST = 2


class _Index:
    """Where each n-gram of one sequence was last followed by something."""

    __slots__ = ("filed", "places")

    def __init__(self) -> None:
        self.filed = 0  # n-grams that end before this position are filed
        self.places: dict[tuple[int, ...], int] = {}

    def file(self, tokens: Sequence[int]) -> None:
        """File the n-grams that end before the last token: the last has no continuation yet."""
        for end in range(max(self.filed, SHORTEST), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.places[tuple(tokens[end - length : end])] = end
        self.filed = max(self.filed, len(tokens))

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position after the latest earlier occurrence of the longest suffix."""
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            place = self.places.get(tuple(tokens[len(tokens) - length :]))
            if place is not None:
                return place
        return None


class NgramDrafter:
    """Continues the sequence as it went on after the latest match of its last 4 to 2 tokens."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Nothing: the index grows when guesses are asked for."""

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        """Look the last tokens up; see `Drafter.propose`."""
        index = self._indexes.setdefault(row, _Index())
        index.file(tokens)
        place = index.find(tokens)
        if place is None:
            return NO_DRAFT
        # A match that overlaps the end repeats with its period: go on reading the guesses.
        guesses: list[int] = []
        for position in range(place, place + count):
            known = position < len(tokens)
            guesses.append(tokens[position] if known else guesses[position - len(tokens)])
        return Draft(tuple(guesses))

    def release(self, row: int) -> None:
        """Forget a row's index."""
        self._indexes.pop(row, None)

    def move(self, source: int, destination: int) -> None:
        """Take a row's index along."""
        self.release(destination)
        if source in self._indexes:
            self._indexes[destination] = self._indexes.pop(source)
