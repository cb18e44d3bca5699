"""Turns generated tokens into text for the client, and ends it at a stop string or dedent.

Text that may be the start of a stop string is held back until later tokens settle it.
"""

import re
from collections.abc import Sequence

from specops.request import Logprob, ReasoningMarks, TokenOutput
from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.reasoning import Reasoning
from specops.text.tokenizer import Tokenizer


class TextStream:
    """The text of one request.

    Args:
        tokenizer: the model's tokenizer.
        prompt_tokens: the tokens of the prompt.
        stop: strings that end the text.
        min_indent: spaces and tabs that each line must start with, blank lines included; the text
            ends before a line with fewer (`n_indent` of llama-server's `/infill`).
        marks: the marks around reasoning, where stop strings do not count; None: no reasoning.
        include_stop: whether the stop string is part of the text.

    Attributes:
        stopped: the stop string that ended the text; push no token after that.
        dedented: whether a line with too few spaces ended the text; push no token after that.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int],
        stop: tuple[str, ...],
        min_indent: int = 0,
        marks: ReasoningMarks | None = None,
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_tokens)
        self._stop, self._include_stop = stop, include_stop
        self._held: list[TokenOutput] = []
        self._reasoning = Reasoning(marks) if marks and stop else None
        self._unshown = dict(marks.unshown) if marks else {}
        self._num_reasoning = 0  # characters of the held pieces that are reasoning
        self._dedent: re.Pattern[str] | None = None
        if min_indent:
            self._dedent = re.compile(rf"\n[ \t]{{0,{min_indent - 1}}}(?P<text>[^ \t]|\Z)")
        # The characters that an end of the text can start with.
        self._firsts = {end[0] for end in (*stop, "\n" if min_indent else "") if end}
        self.stopped: str | None = None
        self.dedented = False

    def push(self, token: int, origin: str, logprob: Logprob | None = None) -> list[TokenOutput]:
        """Add a token; return the pieces that can be sent now.

        Args:
            token: the token's number.
            origin: what proposed the token: a drafter, the grammar or the target.
            logprob: its log-probabilities; None: not requested.
        """
        text = self._detokenizer.push(token)
        piece, reasoning = TokenOutput(token, text, origin, logprob), self._reasoning
        waits = self._held or self._detokenizer.rest or reasoning is not None
        if not waits and self._firsts.isdisjoint(text):
            return [piece]
        self._held.append(piece)
        if reasoning is not None:
            answer = reasoning.read(text + self._unshown.get(token, ""))
            held = sum(len(each.text) for each in self._held)
            self._num_reasoning = max(0, held - answer)  # an unshown mark is not in `held`
            if reasoning.over:
                self._reasoning = None
        return self._release()

    def flush(self) -> list[TokenOutput]:
        """Return the pieces still held back; the request has ended."""
        rest = self._detokenizer.flush()
        if self.stopped or self.dedented:
            return []
        if rest:  # the last token of these bytes is still held back
            self._held[-1] = self._held[-1]._replace(text=self._held[-1].text + rest)
        pieces = self._release()
        pieces += self._held
        self._held = []
        return pieces

    def _release(self) -> list[TokenOutput]:
        if not self._firsts and not self._detokenizer.rest:
            pieces, self._held = self._held, []
            return pieces
        if self._reasoning is not None and self._reasoning.undecided:
            return []
        text = "".join(piece.text for piece in self._held)
        ends = [
            (at, stop) for stop in self._stop if (at := text.find(stop, self._num_reasoning)) >= 0
        ]
        line = self._dedent.search(text) if self._dedent is not None else None
        if line is not None and line["text"]:
            ends.append((line.start(), ""))
        if ends:
            at, stop = min(ends)
            self.stopped, self.dedented = stop or None, not stop
            at += len(stop) if self._include_stop else 0
            pieces, self._held = _cut(self._held, at), []
            return pieces
        shown = len(text) - self._possible_stop(text[self._num_reasoning :])
        if line is not None:
            shown = min(shown, line.start())
        complete = len(self._held) - bool(self._detokenizer.rest)
        count = 0
        for piece in self._held[:complete]:
            shown -= len(piece.text)
            if shown < 0:
                break
            count += 1
            self._num_reasoning = max(0, self._num_reasoning - len(piece.text))
        pieces, self._held = self._held[:count], self._held[count:]
        return pieces

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that a stop string starts with."""
        for begin, letter in enumerate(text):
            if letter in self._firsts and any(stop.startswith(text[begin:]) for stop in self._stop):
                return len(text) - begin
        return 0


def _cut(pieces: list[TokenOutput], length: int) -> list[TokenOutput]:
    """Cut the pieces' text after `length` characters, but keep all their tokens."""
    result = []
    for piece in pieces:
        result.append(piece._replace(text=piece.text[:length]))
        length = max(0, length - len(piece.text))
    return result
