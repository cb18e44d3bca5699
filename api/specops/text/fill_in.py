"""Filling in the middle: prompts that ask a model for the text of a gap.

Each family of models was trained with special tokens of its own: for the text before the gap, for
the text behind it, and for the beginning of the answer. The tokens of a tokenizer say which form
its model needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
# Tokens that also end the text of a gap, for example because they begin another file.
ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<file_sep>", "<|EOT|>", "▁<EOT>"),
)


class FillIn:
    """Writes the prompts of one model."""

    def __init__(self, marks: Sequence[int], tokenizer: Tokenizer) -> None:
        self._before, self._behind, *self._gap = marks
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillIn | None:
        """Return the prompts' writer for a tokenizer; None if it has no such tokens."""
        for form in FORMS:
            spelled = list(filter(None, (form.before, form.behind, form.gap)))
            marks = [token for mark in spelled if (token := tokenizer.token(mark)) is not None]
            if len(marks) == len(spelled):
                return cls(marks, tokenizer)
        return None

    def prompt(self, before: str | Sequence[int], behind: str) -> tuple[int, ...]:
        """Return the prompt that asks for the text between two others; `before` may be tokens."""
        begin = self._tokenizer.encode("")  # the tokens that begin every text
        first = (self._before, *(self._text(before) if isinstance(before, str) else before))
        second = (self._behind, *self._text(behind))
        if self._gap:
            return (*begin, *first, *second, *self._gap)
        return (*begin, *second, *first)

    @property
    def ends(self) -> dict[str, int]:
        """The tokens that end the text of a gap, by their spelling."""
        known = {text: self._tokenizer.token(text) for text in ENDS}
        return {text: token for text, token in known.items() if token is not None}

    def _text(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text, special_tokens=False)
