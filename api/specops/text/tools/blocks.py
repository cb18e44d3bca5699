"""Collects an answer's blocks while it is parsed: the known part of each, and text held back."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(slots=True)
class Block:
    """A part of an answer. A call's `text` is its arguments as JSON."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    name: str = ""


class Delta(NamedTuple):
    """New text of the block with this number. A call's first delta has no text."""

    block: int
    text: str


class AnswerBlocks:
    """Reasoning, text and calls. White space between several blocks is dropped.

    Attributes:
        blocks: the blocks so far.
        placed: the block of each text that was read and is no longer held back; -1: a mark.
        repeated: whether the model repeated a call of this answer word for word. The repeated call
            is neither a block nor in a delta.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.placed: list[int] = []
        self.repeated = False
        self._unplaced = 0  # texts
        self._place: int | None = None  # the block of the last character not held back
        self._deltas: list[Delta] = []
        self._spaces: list[str] = []  # held back: they may be the end of a block
        self._has_reasoning = False
        # Arguments of earlier calls to the tool in the current call.
        self._earlier: list[str] = []

    def begin_reasoning(self) -> None:
        """Note that reasoning begins; it may turn out empty."""
        self._has_reasoning = True

    def end_reasoning(self) -> None:
        """Drop the white space at the reasoning's end."""
        self._spaces = []

    def mark(self) -> None:
        """Note that the last character was the end of a mark."""
        self._place = -1

    def settle(self, more: int = 0) -> None:
        """Record the block of each text for which it is known; `more` texts have been read."""
        self._unplaced += more
        if self._place is not None:
            self.placed += [self._place] * self._unplaced
            self._unplaced, self._place = 0, None

    def take(self) -> list[Delta]:
        """Return the deltas since the last call, one per block.

        A call that may turn out to be a repetition is held back.
        """
        merged: list[Delta] = []
        shown = len(self._deltas)
        if any(text.startswith(self.blocks[-1].text) for text in self._earlier):
            last = len(self.blocks) - 1
            held = (at for at, delta in enumerate(self._deltas) if delta.block == last)
            shown = next(held, shown)
        for delta in self._deltas[:shown]:
            begins = self.blocks[delta.block].kind == "call" and not delta.text
            if merged and merged[-1].block == delta.block and not begins and merged[-1].text:
                merged[-1] = Delta(delta.block, merged[-1].text + delta.text)
            else:
                merged.append(delta)
        del self._deltas[:shown]
        return merged

    def is_open(self, kind: str) -> bool:
        """Whether the last block is of this kind."""
        return bool(self.blocks) and self.blocks[-1].kind == kind

    def add(self, kind: Literal["text", "reasoning", "call"], text: str) -> None:
        """Add text to the last block, or to a new one if the last is of another kind."""
        if not self.is_open(kind):
            self._earlier = []
            self.blocks.append(Block(kind))
        self.blocks[-1].text += text
        self._place = len(self.blocks) - 1
        self._deltas.append(Delta(self._place, text))

    def begin_call(self, name: str) -> None:
        """Begin a call; its arguments follow."""
        self._spaces = []
        self._earlier = [
            block.text for block in self.blocks if (block.kind, block.name) == ("call", name)
        ]
        self.blocks.append(Block("call", name=name))
        self._deltas.append(Delta(len(self.blocks) - 1, ""))

    def end_call(self) -> None:
        """End the current call, and drop it if it repeats an earlier one."""
        if self._earlier and self.blocks[-1].text in self._earlier:
            self.blocks.pop()
            self._deltas = [delta for delta in self._deltas if delta.block < len(self.blocks)]
            self.repeated = True
        self._earlier = []

    def argue(self, text: str) -> None:
        """Add to the current call's arguments."""
        if text:
            self.add("call", text)

    def show(self, kind: Literal["text", "reasoning"], text: str) -> None:
        """Add text; white space at its end is held back until more text follows."""
        end = len(text.rstrip())
        begins = not self.is_open(kind) and bool(self.blocks or self._has_reasoning)
        if not end:
            self._spaces.append(text)
            self._place = -1 if begins else self._place
            return
        spaces, text = text[end:], "".join(self._spaces) + text[:end]
        self._spaces = [spaces]
        if begins:
            text = text.lstrip()
        self.add(kind, text)

    def finish(self) -> None:
        """Add the text held back; the answer has ended."""
        self.end_call()
        spaces = "".join(self._spaces)
        if spaces and (not self.blocks or self.is_open("text")):
            self.add("text", spaces)
        self.settle()
