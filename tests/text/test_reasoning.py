"""Stop strings count only behind an answer's reasoning, however tokens and marks are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.request import TARGET, ReasoningMarks, TokenOutput
from specops.text.reasoning import Reasoning
from specops.text.text_stream import TextStream
from tests.fakes import FIRST_SPECIAL, FakeTokenizer
from tests.text.test_tokenizer import byte_level

OPENING, CLOSING = "<think>", "</think>"
LETTERS = "ab<k /"


def marks(*, inside: bool, unshown: tuple[tuple[int, str], ...] = ()) -> ReasoningMarks:
    return ReasoningMarks(OPENING, CLOSING, inside, unshown, tuple(CLOSING.encode()))


def stream(text: str, stop: tuple[str, ...], *, inside: bool) -> tuple[str, str | None]:
    """The text that comes out, and the stop string that ended it; a token a byte."""
    tokenizer = byte_level()
    made = TextStream(tokenizer, (), stop, marks=marks(inside=inside))
    pieces: list[TokenOutput] = []
    for token in tokenizer.encode(text):
        pieces += made.push(token, TARGET)
        if made.stopped:
            break
    return "".join(piece.text for piece in [*pieces, *made.flush()]), made.stopped


def stopped(text: str, stop: tuple[str, ...]) -> str:
    """A text without reasoning, up to where it ends."""
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
    reasoning: str, answer: str, stop: list[str], inside: bool
) -> None:
    before = f"{'' if inside else ' ' + OPENING}{reasoning}{CLOSING}"
    spaces = answer[: len(answer) - len(answer.lstrip())]
    text, found = stream(before + answer, tuple(stop), inside=inside)
    rest = answer.removeprefix(spaces)
    assert text == before + spaces + stopped(rest, tuple(stop))
    assert (found is None) == (stopped(rest, tuple(stop)) == rest and found is None)
    assert found is None or found in rest


@given(
    st.text(st.sampled_from(LETTERS), min_size=1, max_size=20).filter(lambda text: text[0] == "a"),
    st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_an_answer_without_reasoning_ends_as_any_text(answer: str, stop: list[str]) -> None:
    assert stream(answer, tuple(stop), inside=False)[0] == stopped(answer, tuple(stop))


def test_marks_that_are_tokens_without_a_text_are_seen() -> None:
    tokenizer = FakeTokenizer(OPENING, CLOSING)
    unshown = ((FIRST_SPECIAL, OPENING), (FIRST_SPECIAL + 1, CLOSING))
    made = TextStream(tokenizer, (), ("b",), marks=marks(inside=False, unshown=unshown))
    for token in tokenizer.encode(f"{OPENING}abc{CLOSING}\n\n", special_tokens=False):
        made.push(token, TARGET)
    assert made.stopped is None
    made.push(ord("b"), TARGET)
    assert made.stopped == "b"


def test_a_closing_mark_without_a_text_hides_no_stop_string_before_it() -> None:
    tokenizer = FakeTokenizer(CLOSING)
    unshown = ((FIRST_SPECIAL, CLOSING),)
    made = TextStream(tokenizer, (), ("\n\n",), marks=marks(inside=False, unshown=unshown))
    pieces: list[TokenOutput] = []
    for token in tokenizer.encode("\n" * 12 + CLOSING, special_tokens=False):
        pieces += made.push(token, TARGET)
    assert (made.stopped, "".join(piece.text for piece in pieces)) == ("\n\n", "")


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_mark_is_found_however_it_is_cut(cut: int) -> None:
    followed = Reasoning(marks(inside=False))
    text = f"{OPENING}a</thin{CLOSING} \nb"
    told = [followed.read(text[at : at + cut]) for at in range(0, len(text), cut)]
    assert (followed.over, told[-1], sum(told)) == (True, 1, 1)
