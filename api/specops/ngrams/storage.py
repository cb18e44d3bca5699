"""Texts that a model has written, in one file: one that was torn by an interruption is cut off."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the model's answer to it.

    Attributes:
        number: number of the conversation; decides its starter and sampling.
        prompt: int32, tokens of the prompt.
        tokens: int32 [n], tokens of the answer.
    """

    number: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


class ConversationStore:
    """Conversations in a file of int32: of each its number, both lengths, and its tokens."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._end: int | None = None  # bytes that were read or written whole

    def add(self, conversation: Conversation) -> None:
        """Append a conversation, in the place of a torn one if the file has been read."""
        head = np.array([conversation.number, len(conversation.prompt), len(conversation.tokens)])
        row = np.concatenate([head, conversation.prompt, conversation.tokens]).astype(np.int32)
        with self._file.open("ab") as file:
            file.truncate(self._end)
            file.write(row.tobytes())
            self._end = file.tell()

    def read(self) -> list[Conversation]:
        """All of them, in the order in which they were written, up to a torn one."""
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
