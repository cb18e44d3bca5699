"""What a model has written, on disk: its tokens and its hidden states before each of them.

A shard is one file that appears whole, so that an interruption costs the conversations since the
last one and nothing else.
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
    """One answer that the model has written.

    Attributes:
        number: counts all that were begun; says how it was asked for.
        prompt: int32, what the model was asked.
        tokens: int32 [n], the answer's.
        states: float16 [n, size], the target's last hidden state that each was chosen by.
    """

    number: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    states: NDArray[np.float16]


class Shards:
    """Conversations in a folder.

    Args:
        folder: is made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.partial"):
            path.unlink()

    @property
    def next_number(self) -> int:
        """The first above those of all conversations."""
        last = -1
        for path in self._folder.glob("*.npz"):
            with np.load(path) as found:  # which reads nothing but the numbers
                last = max(last, int(found["numbers"].max()))
        return last + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
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
        """Conversations in the order in which they were written, from files of so many bytes."""
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
    """What `np.concatenate` has put together."""
    return np.split(values, np.cumsum(lengths)[:-1])
