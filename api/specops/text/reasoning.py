"""Tracks an answer's reasoning: stop strings count only after it, and a budget ends it.

Models reason before they answer, between two marks. `tools.reader` splits a whole answer for a
client; this module tells the engine, token by token, where the final answer begins.
"""

from collections.abc import Sequence
from copy import copy

from specops.request import ReasoningMarks
from specops.text.tokenizer import Tokenizer


class Reasoning:
    """Tracks whether an answer's text is before, within or after its reasoning.

    Attributes:
        within: whether the text so far ends within the reasoning.
        over: whether the final answer has begun; read nothing more.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self._opening, self._closing = marks.opening.strip(), marks.closing
        self.within, self.over = marks.starts_in_reasoning, False
        self._closed = False
        self._text = ""  # its last characters, which may start a mark

    @property
    def undecided(self) -> bool:
        """Whether the text so far may start the reasoning or the final answer."""
        return not (self.within or self._closed or self.over)

    def read(self, text: str) -> int:
        """Read more text; return how many of the last characters belong to the final answer.

        Without reasoning, all characters so far do. White space after the reasoning does not.
        """
        self._text += text
        if self.undecided:
            begin = self._text.lstrip()
            if begin.startswith(self._opening):
                self.within, self._text = True, begin[len(self._opening) :]
            elif self._opening.startswith(begin):
                return 0
            else:
                self.over = True
                return len(self._text)
        if self.within:
            before, mark, behind = self._text.partition(self._closing)
            self.within, self._closed = not mark, bool(mark)
            self._text = behind if mark else before[1 - len(self._closing) :]
        answer = "" if self.within else self._text.lstrip()
        self.over = bool(answer)
        return len(answer)


class ReasoningBudget:
    """Forces the closing mark once the reasoning has used up its tokens."""

    def __init__(self, marks: ReasoningMarks, tokenizer: Tokenizer) -> None:
        self._reasoning = Reasoning(marks)
        self._unshown, self._decode = dict(marks.unshown), tokenizer.decode
        self._closing, self._left = marks.closing_tokens, marks.most or 0
        self._written = 0  # tokens of the closing mark so far

    def push(self, token: int) -> None:
        """Append a token to the answer."""
        if self._reasoning.over:
            return
        self._written = self._written + 1 if token == self._due else 0
        self._left -= self._reasoning.within
        self._reasoning.read(self._unshown.get(token) or self._decode([token]))

    @property
    def _due(self) -> int | None:
        """The token that must come next; None: any."""
        if not self._reasoning.within or self._left > 0:
            return None
        return self._closing[self._written % len(self._closing)]

    def due(self, tokens: Sequence[int], positions: int) -> list[int | None]:
        """Return the token that each of the last positions must have; None where any may follow.

        Args:
            tokens: draft tokens after the answer; they are not appended to it. The last position
                comes after all of them, the one before it before the last of them, and so on.
            positions: number of positions, at most one more than draft tokens.
        """
        if self._reasoning.over or self._left > len(tokens):
            return [None] * positions
        ahead = copy(self)
        ahead._reasoning = copy(self._reasoning)
        found = [ahead._due]
        for token in tokens:
            ahead.push(token)
            found.append(ahead._due)
        return found[-positions:]
