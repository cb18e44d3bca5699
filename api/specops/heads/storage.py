"""Conversations of a model on disk: their tokens and the hidden state before each token.

Each conversation is one file that appears whole, so an interruption loses no finished conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specops.system.folders import file_at_once


@dataclass(frozen=True, slots=True)
class Conversation:
    """One answer of the model.

    Attributes:
        number: number of the conversation; decides its starter and sampling.
        prompt: int32, tokens of the prompt.
        tokens: int32 [n], tokens of the answer.
        states: float16 [n, size], last hidden state of the target from which each was chosen.
    """

    number: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    states: NDArray[np.float16]


class ConversationStore:
    """Conversations in a folder, which is made if missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def next_number(self) -> int:
        """The first unused number of a conversation."""
        return 1 + max((int(path.stem) for path in self._folder.glob("*.npz")), default=-1)

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self._folder.glob("*.npz"))

    def add(self, conversation: Conversation) -> None:
        """Write a conversation."""
        path = self._folder / f"{conversation.number:07}.npz"
        with file_at_once(path) as partial, partial.open("wb") as file:
            np.savez(file, **asdict(conversation))

    def first(self, most_bytes: int) -> Iterator[Conversation]:
        """Yield conversations in the order of their numbers, from files of at most `most_bytes`."""
        for path in sorted(self._folder.glob("*.npz")):
            most_bytes -= path.stat().st_size
            if most_bytes < 0:
                return
            with np.load(path) as arrays:
                yield Conversation(
                    int(arrays["number"]), arrays["prompt"], arrays["tokens"], arrays["states"]
                )
