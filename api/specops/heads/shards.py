"""Conversations of a model on disk: their tokens and the hidden state before each token.

A shard is one file that appears whole. So an interruption loses only the conversations since the
last shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


class Shards:
    """Conversations in a folder.

    Args:
        folder: the folder; it is made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.partial"):
            path.unlink()

    @property
    def next_number(self) -> int:
        """The first unused number of a conversation."""
        last = -1
        for path in self._folder.glob("*.npz"):
            with np.load(path) as found:  # reads only the arrays that are used
                last = max(last, int(found["numbers"].max()))
        return last + 1

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self._folder.glob("*.npz"))

    def append(self, conversations: Sequence[Conversation]) -> None:
        """Write a shard."""
        count = len(list(self._folder.glob("*.npz")))
        path = self._folder / f"{count:05}.npz"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                numbers=np.array([item.number for item in conversations], np.int64),
                asked=np.array([len(item.prompt) for item in conversations], np.int64),
                prompts=np.concatenate([item.prompt for item in conversations]),
                lengths=np.array([len(item.tokens) for item in conversations], np.int64),
                tokens=np.concatenate([item.tokens for item in conversations]),
                states=np.concatenate([item.states for item in conversations]),
            )
        partial.replace(path)

    def first(self, most_bytes: int) -> Iterator[Conversation]:
        """Yield conversations in the order of writing, from files of at most `most_bytes`."""
        for path in sorted(self._folder.glob("*.npz")):
            most_bytes -= path.stat().st_size
            if most_bytes < 0:
                return
            with np.load(path) as found:
                numbers = found["numbers"].tolist()
                prompts = _apart(found["prompts"], found["asked"])
                tokens = _apart(found["tokens"], found["lengths"])
                states = _apart(found["states"], found["lengths"])
            yield from map(Conversation, numbers, prompts, tokens, states)


def _apart(values: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Split the result of `np.concatenate`."""
    return np.split(values, np.cumsum(lengths)[:-1])
