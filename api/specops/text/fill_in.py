"""Writes fill-in-the-middle prompts, which ask a model for the text of a gap.

A tokenizer's special tokens say which form its model needs (`fill_in_forms`).
"""

from array import array
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Self
from zlib import crc32

from specops.text.fill_in_forms import ENDS, FILE, FORMS, REPOSITORY
from specops.text.tokenizer import Tokenizer

# Editors name neither the project nor the file of the gap: these are llama-server's names.
_PROJECT, _FILE_OF_GAP, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
# Some tokenizer files do not mark these as special tokens.
_MARKS = frozenset((*ENDS, *(mark for form in FORMS for mark in form.marks)))
_LANDMARK = 8  # tokens that decide where a text is cut


class FimPrompt(NamedTuple):
    """A prompt, and whether parts of it were left out."""

    tokens: tuple[int, ...]
    truncated: bool


class FillIn:
    """Writes the prompts of one model."""

    def __init__(self, marks: Sequence[int], tokenizer: Tokenizer) -> None:
        self._before, self._behind, *self._gap = marks
        self._tokenizer = tokenizer
        self._repository, self._file = (
            [token for name in names if (token := tokenizer.token(name)) is not None][:1]
            for names in (REPOSITORY, FILE)
        )

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return the writer for a tokenizer; None if it lacks the tokens of all forms."""
        for form in FORMS:
            found = map(tokenizer.token, form.marks)
            marks = [token for token in found if token is not None]
            if len(marks) == len(form.marks):
                return cls(marks, tokenizer)
        return None

    def prompt(
        self,
        before: str | Sequence[int],
        behind: str | Sequence[int],
        context: int,
        *,
        most: Callable[[int], float] = lambda position: inf,
        chunks: Sequence[tuple[str, str]] = (),
        typed: str = "",
    ) -> FimPrompt:
        """Return the prompt that asks for the text between two others.

        Both texts together get half of the context. With chunks they get a quarter, and the chunks
        half, of which the first are left out. Editors add chunks at the end and drop some of them,
        so if all fit, a jump to another place leaves most of the prompt unchanged. As in
        llama-server, three quarters of the texts' part are for the text before the gap, which loses
        its beginning, and one quarter for the text after it, which loses its end. An eighth of the
        context is for the typed text.

        Args:
            before: the text before the gap, or its tokens.
            behind: the text after the gap, or its tokens.
            context: maximum tokens of prompt and answer.
            most: returns a maximum of both texts' tokens, given the first one's position.
            chunks: names and texts of parts of other files; they come first.
            typed: beginning of the answer. It comes last, so typing changes nothing before it.
        """
        begin = self._tokenizer.encode("")  # the tokens that begin every text
        files, cut = self._files(chunks, context // 2)
        room = int(min(context // (4 if chunks else 2), most(len(begin) + len(files))))
        texts = self.encode(before), self.encode(behind), self.encode(typed)
        kept = (
            _ending(texts[0], room - room // 4),
            texts[1][: room // 4],
            texts[2][max(0, len(texts[2]) - context // 8) :],
        )
        first, second = (self._before, *kept[0]), (self._behind, *kept[1])
        around = (*first, *second, *self._gap) if self._gap else (*second, *first)
        return FimPrompt((*begin, *files, *around, *kept[2]), cut or kept != texts)

    def encode(self, text: str | Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a text, special tokens as plain text; return tokens unchanged."""
        if not isinstance(text, str):
            return tuple(text)
        return self._tokenizer.encode_as_text(text, _MARKS) if text else ()

    @property
    def ends(self) -> dict[str, int]:
        """The tokens that end the text of a gap, by their spelling."""
        known = {text: self._tokenizer.token(text) for text in ENDS}
        return {text: token for text, token in known.items() if token is not None}

    def _files(self, chunks: Sequence[tuple[str, str]], room: int) -> tuple[list[int], bool]:
        """Return the tokens of other files, and whether some were left out."""
        if not chunks:
            return [], False
        kept: list[tuple[int, ...]] = []
        most = room
        for name, text in reversed(chunks):
            heading = f"{name}\n" if self._file else _SNIPPET
            tokens = (*self._file, *self.encode(heading), *self.encode(text))
            if len(tokens) > most:
                continue  # earlier ones may be smaller
            if (room := room - len(tokens)) < 0:
                break
            kept.append(tokens)
        project = (*self._repository, *self.encode(_PROJECT)) if self._repository else ()
        own = (*self._file, *self.encode(_FILE_OF_GAP)) if self._file else ()
        files = [token for piece in (project, *reversed(kept), own) for token in piece]
        return files, len(kept) < len(chunks)


def _ending(tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the end of a text: at most `most` tokens, and at least three quarters of them.

    It begins where the next tokens have the smallest checksum: at the same tokens while its text
    grows, or if an editor sends the text from another line on. So the prompt's beginning stays the
    same, and with it the cached part.
    """
    if len(tokens) <= most:
        return tokens
    start = len(tokens) - most
    candidates = range(start, start + most // 4 + 1)
    checksums = [crc32(array("q", tokens[at : at + _LANDMARK])) for at in candidates]
    return tokens[start + checksums.index(min(checksums)) :]
