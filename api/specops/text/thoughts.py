"""Follows an answer's thoughts: stop strings count only behind them, and a budget ends them.

A model that thinks does so before it answers, between two marks. `tools.reader` splits a whole
answer for a client; this tells the engine, token by token, where the answer proper begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from specops.request import ThoughtMarks
from specops.text.tokenizer import Tokenizer


class Thoughts:
    """Where the text of an answer is: before, within or behind its thoughts.

    Attributes:
        within: the text so far ends within the thoughts.
        over: the answer proper has begun; nothing more is read.
    """

    def __init__(self, marks: ThoughtMarks) -> None:
        self._opening, self._closing = marks.opening.strip(), marks.closing
        self.within, self.over = marks.begun, False
        self._closed = False
        self._text = ""  # the last of it, which may be the beginning of a mark

    @property
    def undecided(self) -> bool:
        """Whether the text so far may be the beginning of thoughts or of the answer proper."""
        return not (self.within or self._closed or self.over)

    def read(self, text: str) -> int:
        """Read more text; return how many of its last characters are of the answer proper.

        Without thoughts these are all characters so far. White space behind thoughts is no answer.
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


class ThoughtBudget:
    """Says which tokens must come, so that thoughts end when their tokens are spent."""

    def __init__(self, marks: ThoughtMarks, tokenizer: Tokenizer) -> None:
        self._thoughts = Thoughts(marks)
        self._unshown, self._decode = dict(marks.unshown), tokenizer.decode
        self._closing, self._left = marks.closing_tokens, marks.most or 0
        self._written = 0  # tokens of the closing mark, since they are spent

    def push(self, token: int) -> None:
        """Append a token to the answer."""
        if self._thoughts.over:
            return
        self._written = self._written + 1 if token == self._due else 0
        self._left -= self._thoughts.within
        self._thoughts.read(self._unshown.get(token) or self._decode([token]))

    @property
    def _due(self) -> int | None:
        """The token that must come next; None: any."""
        if not self._thoughts.within or self._left > 0:
            return None
        return self._closing[self._written % len(self._closing)]

    def due(self, tokens: Sequence[int], positions: int) -> list[int | None]:
        """Return the tokens that must come in the last positions, each None where any may.

        Args:
            tokens: may follow the answer; they are not appended to it. The last position is behind
                all of them, the others before the last ones.
        """
        if self._thoughts.over or self._left > len(tokens):
            return [None] * positions
        ahead = copy(self)
        ahead._thoughts = copy(self._thoughts)
        found = [ahead._due]
        for token in tokens:
            ahead.push(token)
            found.append(ahead._due)
        return found[-positions:]
