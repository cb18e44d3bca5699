"""The measurements themselves, on models whose answers are known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from training.corpus import Document
from training.evaluate import (
    WINDOW,
    document_bits,
    jumps,
    matched_lengths,
    verbatim_share,
)

VOCAB = 16


class Recorder:
    """Every next token equally likely; remembers what it was asked."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.windows: list[list[int]] = []

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.windows.append(list(tokens))
        return np.zeros((len(tokens), self.vocab), np.float32)


@given(length=st.integers(1, 3 * WINDOW + 5))
def test_every_token_but_the_mark_is_scored_exactly_once(length: int) -> None:
    bits = document_bits(Recorder(), [0] * (length + 1))
    assert bits == pytest.approx(length * math.log2(VOCAB))


class CountingDraft:
    """Guesses the next number; a cache that only counts, so that a wrong rollback shows."""

    def __init__(self) -> None:
        self.history: list[int] = []

    @property
    def length(self) -> int:
        return len(self.history)

    @length.setter
    def length(self, value: int) -> None:
        assert value <= len(self.history)
        del self.history[value:]

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.history += tokens
        return np.eye(100, dtype=np.float32)[[token + 1 for token in tokens]]

    def afresh(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.length = 0
        return self(tokens)


def test_matches_are_counted_from_every_position_up_to_eight() -> None:
    draft = CountingDraft()
    answer = [5, 6, 7, 20, 21, *range(30, 45)]
    matched = matched_lengths(draft, [1, 2], answer)  # type: ignore[arg-type]
    assert matched[:5] == [2, 1, 0, 1, 0]
    assert matched[5:] == [8, 8, 8, 8, 8, 8, 8, 7, 6, 5, 4, 3, 2, 1][: len(matched) - 5]
    assert draft.history == [1, 2, *answer[:-1]]


def test_a_jump_is_the_accepted_tokens_and_one_of_the_target() -> None:
    assert jumps([2, 1, 0, 0], 1) == (3, 3, 1)
    assert jumps([2, 1, 0, 0], 4) == (2, 5, 2)
    assert jumps([0, 0, 0], 3) == (3, 6, 0)
    assert jumps([], 3) == (0, 0, 0)


@given(matched=st.lists(st.integers(0, 8), max_size=64), draft_length=st.integers(1, 8))
def test_jumps_emit_the_whole_answer(matched: list[int], draft_length: int) -> None:
    clipped = [min(m, len(matched) - i) for i, m in enumerate(matched)]
    passes, drafted, accepted = jumps(clipped, draft_length)
    assert 0 <= accepted <= drafted <= passes * draft_length
    # The last jump may have no room left for the target's own token.
    assert passes + accepted in (len(matched), len(matched) + 1)


def test_verbatim_share_counts_long_lines_only() -> None:
    long, other = "x" * 40, "y" * 40
    held_out = [Document("a.py", f"  {long}\nshort\n{other}\n")]
    assert verbatim_share(held_out, [Document("b.py", f"{long}\nshort\n")]) == 0.5
