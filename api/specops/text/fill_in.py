"""Filling in the middle: prompts that ask a model for the text of a gap.

Each family of models was trained with special tokens of its own: for the text before the gap, for
the text behind it, and for the beginning of the answer. The tokens of a tokenizer say which form
its model needs.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple
from zlib import crc32

from specops.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillInForm:
    """Spelling of the special tokens of one family.

    Attributes:
        before: marks the text before the gap.
        behind: marks the text behind the gap.
        gap: marks the beginning of the answer. Empty: the text before the gap comes last, and the
            answer follows it.
    """

    before: str
    behind: str
    gap: str = ""


FORMS = (
    FillInForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    FillInForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    FillInForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    FillInForm("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FillInForm("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# Tokens that stand before a repository's name and before the name of each of its files.
REPOSITORY = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")
FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")
# Tokens that also end the text of a gap: those that begin another file, and others.
ENDS = (*REPOSITORY, *FILE, "<|fim_pad|>", "<|endoftext|>", "<fim_pad>", "<|EOT|>", "▁<EOT>")
# Editors name neither the project nor the file of the gap: these are llama-server's names.
_PROJECT, _FILE_OF_GAP, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
_MARKS = [mark for form in FORMS for mark in (form.before, form.behind, form.gap) if mark]
_LANDMARK = 8  # tokens that decide where a text is cut


class GapPrompt(NamedTuple):
    """A prompt, and whether something was left out of it."""

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
        known = (name for name in (*_MARKS, *ENDS) if tokenizer.token(name) is not None)
        self._spelled = re.compile("|".join(map(re.escape, known)))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillIn | None:
        """Return the prompts' writer for a tokenizer; None if it has no such tokens."""
        for form in FORMS:
            spelled = list(filter(None, (form.before, form.behind, form.gap)))
            marks = [token for mark in spelled if (token := tokenizer.token(mark)) is not None]
            if len(marks) == len(spelled):
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
    ) -> GapPrompt:
        """Return the prompt that asks for the text between two others.

        Both texts together get half of the context, or a quarter beside chunks, which then get
        half: the first ones are left out. Editors add chunks at the end and drop some of them, so
        where they fit a jump to another place leaves most of the prompt as it was. As in
        llama-server, three quarters of the texts' part are for the one before the gap, which loses
        its beginning, and one is for the text behind it, which loses its end. An eighth of the
        context is for what was typed.

        Args:
            before: the text before the gap, or its tokens.
            behind: the text behind the gap, or its tokens.
            context: most tokens of prompt and answer.
            most: returns tokens of both texts, from the position of the first one, where that is
                less than their part of the context.
            chunks: names and texts of parts of other files; they come first.
            typed: beginning of the answer. It comes last, so typing changes nothing before it.
        """
        begin = self._tokenizer.encode("")  # the tokens that begin every text
        files, left_out = self._files(chunks, context // 2)
        room = int(min(context // (4 if chunks else 2), most(len(begin) + len(files))))
        texts = self.encode(before), self.encode(behind), self.encode(typed)
        kept = (
            _ending(texts[0], room - room // 4),
            texts[1][: room // 4],
            texts[2][max(0, len(texts[2]) - context // 8) :],
        )
        first, second = (self._before, *kept[0]), (self._behind, *kept[1])
        around = (*first, *second, *self._gap) if self._gap else (*second, *first)
        return GapPrompt((*begin, *files, *around, *kept[2]), left_out or kept != texts)

    def encode(self, text: str | Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a text; tokens stay. A special token that it spells is letters.

        The spelling is cut behind its first letter, and each part encoded on its own.
        """
        if not isinstance(text, str):
            return tuple(text)
        if not text:
            return ()
        cuts = [match.start() + 1 for match in self._spelled.finditer(text)]
        return self._tokenizer.encode_parts(
            [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
        )

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
        for name, text in reversed(chunks):
            heading = f"{name}\n" if self._file else _SNIPPET
            kept.append((*self._file, *self.encode(heading), *self.encode(text)))
            room -= len(kept[-1])
            if room < 0:
                kept.pop()
                break
        project = (*self._repository, *self.encode(_PROJECT)) if self._repository else ()
        own = (*self._file, *self.encode(_FILE_OF_GAP)) if self._file else ()
        files = [token for piece in (project, *reversed(kept), own) for token in piece]
        return files, len(kept) < len(chunks)


def _ending(tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the end of a text: at most so many tokens, and at least three quarters of them.

    It begins where the next tokens have the least checksum. So it begins at the same tokens while
    its text grows, and where an editor sends the text from another line on: the prompt before them
    stays, and with it what was computed of it.
    """
    if len(tokens) <= most:
        return tokens
    start = len(tokens) - most
    candidates = range(start, start + most // 4 + 1)
    checksums = [crc32(array("q", tokens[at : at + _LANDMARK])) for at in candidates]
    return tokens[start + checksums.index(min(checksums)) :]
