"""Stop strings end the text exactly, wherever the tokens were cut."""

from hypothesis import given
from hypothesis import strategies as st

from specops.request import TARGET, TokenOutput
from specops.text.text_stream import TextStream
from tests.text.test_tokenizer import byte_level, straddling

TOKENIZER = byte_level()


def stream(
    text: str, stop: tuple[str, ...], min_indent: int = 0
) -> tuple[list[list[TokenOutput]], TextStream]:
    """Pieces per pushed token, the flushed ones last."""
    result = TextStream(TOKENIZER, TOKENIZER.encode("x"), stop, min_indent)
    steps = []
    for token in TOKENIZER.encode(text):
        steps.append(result.push(token, TARGET))
        if result.stopped or result.dedented:
            break
    steps.append(result.flush())
    return steps, result


def text_of(steps: list[list[TokenOutput]]) -> str:
    return "".join(piece.text for step in steps for piece in step)


@given(
    st.text(st.sampled_from("abé"), max_size=30),
    st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    found = [text.find(item) for item in stop if item in text]
    # The earliest end decides: a stop is seen when its last character is there.
    ends = [text.find(item) + len(item) for item in stop if item in text]
    steps, result = stream(text, tuple(stop))
    assert (result.stopped is not None) == bool(found)
    assert result.stopped is None or result.stopped in stop
    expected = text
    if found:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(item) for item in stop if item in seen)]
    assert text_of(steps) == expected
    tokens = [piece.token for step in steps for piece in step]
    pushed = list(TOKENIZER.encode(text))
    assert tokens == (pushed[: len(tokens)] if found else pushed)  # every token comes out once


@given(st.text(st.sampled_from("ab \t\n"), max_size=30), st.integers(1, 3))
def test_the_text_ends_before_the_first_line_with_less_indentation(text: str, least: int) -> None:
    first, *lines = text.split("\n")
    kept = [first]
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip(" \t"))
        last = number == len(lines) - 1  # may still grow
        if indent < least and not (last and indent == len(line)):
            break
        kept.append(line)
    steps, result = stream(text, (), least)
    assert text_of(steps) == "\n".join(kept)
    assert result.dedented == (len(kept) <= len(lines))
    assert result.stopped is None


def test_whichever_comes_first_ends_the_text() -> None:
    _, stopped = stream("if a:\n  b#\nc", ("#",), 2)
    assert (stopped.stopped, stopped.dedented) == ("#", False)
    steps, dedented = stream("if a:\n  b\nc#", ("#",), 2)
    assert (text_of(steps), dedented.stopped, dedented.dedented) == ("if a:\n  b", None, True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    steps, _ = stream("abc", ())
    assert [[piece.text for piece in step] for step in steps] == [["a"], ["b"], ["c"], []]


def test_a_possible_stop_string_is_held_back() -> None:
    steps, _ = stream("a##b", ("##!",))
    texts = [[piece.text for piece in step] for step in steps]
    assert texts == [["a"], [], [], ["#", "#", "b"], []]


def test_half_a_character_at_the_end_belongs_to_its_token() -> None:
    result = TextStream(TOKENIZER, TOKENIZER.encode("x"), ())
    tokens = TOKENIZER.encode("a🙂")[:3]
    shown = [piece for token in tokens for piece in result.push(token, TARGET)]
    assert [piece.text for piece in shown] == ["a", ""]
    assert [piece.text for piece in result.flush()] == ["\ufffd"]


def test_a_whole_character_and_half_of_the_next_stay_together_at_the_end() -> None:
    tokenizer = straddling()
    vocabulary = tokenizer.vocabulary()
    result = TextStream(tokenizer, (vocabulary["x"],), ())
    shown = [result.push(vocabulary[token], TARGET) for token in ("Ã", "©Ã")]
    assert [piece.text for pieces in shown for piece in pieces] == [""]
    assert [piece.text for piece in result.flush()] == ["é\ufffd"]
