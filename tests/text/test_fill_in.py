"""Filling in: special tokens in the order of each family."""

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from specops.text.fill_in import FillIn
from specops.text.fill_in_forms import FILE, FORMS, REPOSITORY, FillInForm
from specops.text.tokenizer import Tokenizer
from tests.text import published_tokenizers as published

MIDDLE = "<|fim_middle|>"


class Spelled:
    """A tokenizer whose tokens are single characters and a few marks; texts begin with token 1."""

    def __init__(self, *marks: str) -> None:
        self._marks = {mark: 1000 + index for index, mark in enumerate(marks)}

    def token(self, text: str) -> int | None:
        return self._marks.get(text)

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return ((1,) if special_tokens else ()) + tuple(text.encode())

    def encode_as_text(self, text: str, marks: frozenset[str]) -> tuple[int, ...]:
        return self.encode(text, special_tokens=False)

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
    asked = gap.prompt("ab", "cd", 64)
    assert (tokenizer.spell(asked.tokens), asked.truncated) == (prompt, False)
    assert gap.prompt(list(b"ab"), list(b"cd"), 64) == asked
    typed = gap.prompt("ab", "cd", 64, typed="ef")
    assert typed.tokens == (*asked.tokens, *b"ef")


@pytest.mark.parametrize("says_so", [True, False], ids=["special", "not said to be special"])
@pytest.mark.parametrize("make", [published.smollm2, published.gemma3])
def test_a_file_that_spells_special_tokens_means_their_letters(
    make: Callable[[int], FastTokenizer], *, says_so: bool
) -> None:
    library = FastTokenizer.from_str(make(2000).to_str())
    text = f"x = '{MIDDLE}{MIDDLE}<|im_end|><s>'\n\n  y"
    letters = library.encode(text.replace("<", "\x00"), add_special_tokens=False).ids
    less, null = (library.encode(sign, add_special_tokens=False).ids for sign in ("<", "\x00"))
    assert (len(less), len(null)) == (1, 1)
    letters = [less[0] if token == null[0] else token for token in letters]
    for mark in (*GAP, "<|file_sep|>"):
        library.add_tokens([AddedToken(mark, normalized=False, special=says_so)])
    gap = FillIn.of(Tokenizer(library))
    assert gap is not None
    assert list(gap.encode(text)) == letters
    asked = gap.prompt(text, text, 1000, chunks=[("a.py", text)], typed=text)
    assert asked.tokens.count(library.token_to_id(MIDDLE)) == 1
    assert library.decode(asked.tokens).count(text) == 4


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenizer_that_lacks_one_of_the_tokens_has_no_form(form: FillInForm) -> None:
    for missing in form.marks:
        others = [mark for mark in form.marks if mark != missing]
        assert FillIn.of(Spelled(*others)) is None  # type: ignore[arg-type]


def test_end_tokens_are_those_that_the_tokenizer_has() -> None:
    form = FORMS[0]
    tokenizer = Spelled(form.before, form.behind, form.gap, "<|fim_pad|>", "<|file_sep|>")
    assert FillIn.of(tokenizer).ends == {"<|fim_pad|>": 1003, "<|file_sep|>": 1004}  # type: ignore[arg-type]


@pytest.mark.parametrize("mark", [*REPOSITORY, *FILE])
def test_the_beginning_of_another_file_ends_a_text(mark: str) -> None:
    assert mark in FillIn.of(Spelled(*GAP, mark)).ends  # type: ignore[arg-type]


# -- other files, and what does not fit ------------------------------------------------------------

GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
CHUNKS = [("a.py", "one\n"), ("b.py", "two\n")]


@pytest.mark.parametrize(
    ("marks", "context"),
    [
        (
            ("<|repo_name|>", "<|file_sep|>"),
            "<|repo_name|>myproject\n<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n"
            "<|file_sep|>filename\n",
        ),
        (("<file_sep>",), "<file_sep>a.py\none\n<file_sep>b.py\ntwo\n<file_sep>filename\n"),
        ((), "\n\n--- snippet ---\n\none\n\n\n--- snippet ---\n\ntwo\n"),
    ],
)
def test_chunks_come_first_in_the_order_of_a_repository(
    marks: tuple[str, ...], context: str
) -> None:
    tokenizer = Spelled(*GAP, *marks)
    gap = FillIn.of(tokenizer)  # type: ignore[arg-type]
    asked = gap.prompt("ab", "cd", 256, chunks=CHUNKS)
    assert not asked.truncated
    prompt = tokenizer.spell(asked.tokens)
    assert prompt == f"<s>{context}<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
    one = len("*b.py\ntwo\n" if marks else "\n\n--- snippet ---\n\ntwo\n")
    less = gap.prompt("ab", "cd", 2 * one, chunks=CHUNKS)
    assert less.truncated
    assert "one" not in tokenizer.spell(less.tokens)
    assert "two" in tokenizer.spell(less.tokens)


def test_a_chunk_that_never_fits_leaves_room_for_smaller_ones() -> None:
    tokenizer = Spelled(*GAP, "<|file_sep|>")
    gap = FillIn.of(tokenizer)  # type: ignore[arg-type]
    asked = gap.prompt("ab", "cd", 256, chunks=[*CHUNKS, ("large.py", "x" * 200), ("c.py", "3\n")])
    assert asked.truncated
    prompt = tokenizer.spell(asked.tokens)
    assert "a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>c.py\n3\n" in prompt
    assert "large" not in prompt


def parts(prompt: str) -> tuple[str, str, str]:
    before, _, rest = prompt.removeprefix("<s><|fim_prefix|>").partition("<|fim_suffix|>")
    behind, _, typed = rest.partition("<|fim_middle|>")
    return before, behind, typed


def test_texts_that_are_too_long_lose_their_far_ends() -> None:
    tokenizer = Spelled(*GAP)
    gap = FillIn.of(tokenizer)  # type: ignore[arg-type]
    text = "".join(random.Random(5).choices("abcdefgh \n", k=2000))
    for room in (0, 1, 3, 4, 64, 400):
        asked = gap.prompt(text, text, 2000, most={1: room}.__getitem__, typed=text)
        assert asked.truncated
        before, behind, typed = parts(tokenizer.spell(asked.tokens))
        assert text.endswith(before)
        assert text.startswith(behind)
        assert text.endswith(typed)
        most = room - room // 4
        assert most * 3 // 4 <= len(before) <= most
        assert (len(behind), len(typed)) == (room // 4, 2000 // 8)


@pytest.mark.parametrize("editor", ["sends all", "sends the last lines"])
def test_a_text_that_grows_begins_at_the_same_place_for_long(editor: str) -> None:
    """A prompt's beginning changes rarely: each change has the whole prompt computed again."""
    tokenizer = Spelled(*GAP)
    gap = FillIn.of(tokenizer)  # type: ignore[arg-type]
    text = "".join(random.Random(7).choices("abcdefgh \n", k=4000))
    starts = []
    for length in range(2000, 4000, 10):
        sent = text[:length] if editor == "sends all" else text[length - 1500 : length]
        before, _, _ = parts(tokenizer.spell(gap.prompt(sent, "", 2048).tokens))
        starts.append(text.index(before))
    assert starts == sorted(starts)
    assert len(set(starts)) < len(starts) / 5
