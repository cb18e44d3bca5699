"""Stores the texts that a model has written in one file, and drops one cut off by a crash."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the model's answer to it.

    Attributes:
        number: number of the conversation; determines its starter and sampling.
        prompt: [m] int32, tokens of the prompt.
        tokens: [n] int32, tokens of the answer.
    """

    number: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


class ConversationStore:
    """Conversations in a file of int32: for each its number, both lengths, and its tokens."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._end: int | None = None  # bytes of complete conversations, once known

    def add(self, conversation: Conversation) -> None:
        """Append a conversation. If the file has been read, this overwrites a truncated one."""
        head = np.array([conversation.number, len(conversation.prompt), len(conversation.tokens)])
        row = np.concatenate([head, conversation.prompt, conversation.tokens]).astype(np.int32)
        with self._file.open("ab") as file:
            file.truncate(self._end)
            file.write(row.tobytes())
            self._end = file.tell()

    def read(self) -> list[Conversation]:
        """All complete conversations, in the order of writing."""
        if not self._file.exists():
            return []
        numbers = np.fromfile(self._file, np.int32)
        found, at = list[Conversation](), 0
        while at + 3 <= len(numbers):
            number, asked, answered = numbers[at : at + 3].tolist()
            end = at + 3 + asked + answered
            if end > len(numbers) or asked < 0 or answered < 1:  # after a crash: zeros
                break
            prompt, tokens = np.split(numbers[at + 3 : end], [asked])
            found.append(Conversation(number, prompt, tokens))
            at = end
        self._end = 4 * at
        return found
