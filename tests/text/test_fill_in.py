"""Filling in: special tokens in the order of each family."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specops.text.fill_in import FORMS, FillIn, FillInForm


class Spelled:
    """A tokenizer whose tokens are single characters and a few marks; texts begin with token 1."""

    def __init__(self, *marks: str) -> None:
        self._marks = {mark: 1000 + index for index, mark in enumerate(marks)}

    def token(self, text: str) -> int | None:
        return self._marks.get(text)

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return ((1,) if special_tokens else ()) + tuple(text.encode())

    def spell(self, tokens: Sequence[int]) -> str:
        marks = {token: mark for mark, token in self._marks.items()} | {1: "<s>"}
        return "".join(marks.get(token) or chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (
            ("<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>"),
            "<s><|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
        ),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<s><fim_prefix>ab<fim_suffix>cd<fim_middle>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
            "<s><｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>",  # noqa: RUF001
        ),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "<s>▁<PRE>ab▁<SUF>cd▁<MID>"),
        (("[PREFIX]", "[SUFFIX]"), "<s>[SUFFIX]cd[PREFIX]ab"),
    ],
)
def test_a_prompt_is_written_as_the_family_was_trained(marks: tuple[str, ...], prompt: str) -> None:
    tokenizer = Spelled(*marks)
    gap = FillIn.of(tokenizer)  # type: ignore[arg-type]
    assert tokenizer.spell(gap.prompt("ab", "cd")) == prompt
    assert gap.prompt(list(b"ab"), "cd") == gap.prompt("ab", "cd")


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenizer_that_lacks_one_of_the_tokens_has_no_form(form: FillInForm) -> None:
    marks = [mark for mark in (form.before, form.behind, form.gap) if mark]
    for missing in marks:
        others = [mark for mark in marks if mark != missing]
        assert FillIn.of(Spelled(*others)) is None  # type: ignore[arg-type]


def test_end_tokens_are_those_that_the_tokenizer_has() -> None:
    form = FORMS[0]
    tokenizer = Spelled(form.before, form.behind, form.gap, "<|fim_pad|>", "<|file_sep|>")
    assert FillIn.of(tokenizer).ends == {"<|fim_pad|>": 1003, "<|file_sep|>": 1004}  # type: ignore[arg-type]
