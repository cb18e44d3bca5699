"""Filling in the middle: how models that were trained for it are asked what stands in a gap.

A family has tokens of its own for what is before the gap, what is behind it and where the answer
begins. A tokenizer that has them tells the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specops.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillInForm:
    """The tokens of one family, as they are spelled.

    Attributes:
        before: stands before the text that the gap follows.
        behind: stands before the text behind the gap.
        gap: the answer follows it; empty where it follows the text before the gap, which then
            comes last.
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
# What such models end a piece with besides their end tokens, or go on with to another file.
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
        """How a model is asked; None where its tokenizer has no such tokens."""
        for form in FORMS:
            wanted = list(filter(None, (form.before, form.behind, form.gap)))
            marks = [token for mark in wanted if (token := tokenizer.token(mark)) is not None]
            if len(marks) == len(wanted):
                return cls(marks, tokenizer)
        return None

    def prompt(self, before: str | Sequence[int], behind: str) -> tuple[int, ...]:
        """The prompt that asks what stands between two texts; the first may be tokens."""
        begin = self._tokenizer.encode("")  # what begins every text
        first = (self._before, *(self._text(before) if isinstance(before, str) else before))
        second = (self._behind, *self._text(behind))
        if self._gap:
            return (*begin, *first, *second, *self._gap)
        return (*begin, *second, *first)

    @property
    def ends(self) -> dict[str, int]:
        """The tokens that end what was filled in, by their spelling."""
        found = {text: self._tokenizer.token(text) for text in ENDS}
        return {text: token for text, token in found.items() if token is not None}

    def _text(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text, special_tokens=False)
