"""Stop strings count only behind an answer's thoughts, however tokens and marks are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.request import TARGET, Piece, ThoughtMarks
from specops.text.text_stream import TextStream
from specops.text.thoughts import Thoughts
from tests.fakes import FIRST_SPECIAL, FakeTokenizer
from tests.text.test_tokenizer import byte_level

OPENING, CLOSING = "<think>", "</think>"
LETTERS = "ab<k /"


def marks(*, begun: bool, unshown: tuple[tuple[int, str], ...] = ()) -> ThoughtMarks:
    return ThoughtMarks(OPENING, CLOSING, begun, unshown, tuple(CLOSING.encode()))


def stream(text: str, stop: tuple[str, ...], *, begun: bool) -> tuple[str, str | None]:
    """The text that comes out, and the stop string that ended it; a token a byte."""
    tokenizer = byte_level()
    made = TextStream(tokenizer, (), stop, marks=marks(begun=begun))
    pieces: list[Piece] = []
    for token in tokenizer.encode(text):
        pieces += made.push(token, TARGET)
        if made.stopped:
            break
    return "".join(piece.text for piece in [*pieces, *made.flush()]), made.stopped


def stopped(text: str, stop: tuple[str, ...]) -> str:
    """A text without thoughts, up to where it ends."""
    ends = [text.find(item) + len(item) for item in stop if item in text]
    seen = text[: min(ends)] if ends else text
    return seen[: min(seen.find(item) for item in stop if item in seen)] if ends else text


@given(
    st.text(st.sampled_from(LETTERS), max_size=12).filter(lambda text: CLOSING not in text),
    st.text(st.sampled_from(LETTERS), max_size=20),
    st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_stop_string_ends_the_answer_and_not_its_thoughts(
    thoughts: str, answer: str, stop: list[str], begun: bool
) -> None:
    before = f"{'' if begun else ' ' + OPENING}{thoughts}{CLOSING}"
    spaces = answer[: len(answer) - len(answer.lstrip())]
    text, found = stream(before + answer, tuple(stop), begun=begun)
    rest = answer.removeprefix(spaces)
    assert text == before + spaces + stopped(rest, tuple(stop))
    assert (found is None) == (stopped(rest, tuple(stop)) == rest and found is None)
    assert found is None or found in rest


@given(
    st.text(st.sampled_from(LETTERS), min_size=1, max_size=20).filter(lambda text: text[0] == "a"),
    st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_an_answer_without_thoughts_ends_as_any_text(answer: str, stop: list[str]) -> None:
    assert stream(answer, tuple(stop), begun=False)[0] == stopped(answer, tuple(stop))


def test_marks_that_are_tokens_without_a_text_are_seen() -> None:
    tokenizer = FakeTokenizer(OPENING, CLOSING)
    unshown = ((FIRST_SPECIAL, OPENING), (FIRST_SPECIAL + 1, CLOSING))
    made = TextStream(tokenizer, (), ("b",), marks=marks(begun=False, unshown=unshown))
    for token in tokenizer.encode(f"{OPENING}abc{CLOSING}\n\n", special_tokens=False):
        made.push(token, TARGET)
    assert made.stopped is None
    made.push(ord("b"), TARGET)
    assert made.stopped == "b"


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_mark_is_found_however_it_is_cut(cut: int) -> None:
    followed = Thoughts(marks(begun=False))
    text = f"{OPENING}a</thin{CLOSING} \nb"
    told = [followed.read(text[at : at + cut]) for at in range(0, len(text), cut)]
    assert (followed.over, told[-1], sum(told)) == (True, 1, 1)
