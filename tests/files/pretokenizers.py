"""Every name of a pre-tokenizer that llama.cpp knows, against its library.

Each name stands in a GGUF with a made vocabulary that shows where a text was cut: all pairs of
bytes are tokens, in random order of merging, and a few words that no merges make. The texts are of
all scripts, in the form NFC, which the library leaves to its users. llama.cpp writes some
expressions differently from the tokenizer.json that they come from, because its engine lacks parts
of them: `APPROXIMATED` says where. Such texts are replaced by others.
"""

import itertools
import random
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers

from specops.models.convert.gguf.pretokenizers import PRE_TOKENIZERS
from tests.files.packages import llama_cpp, llama_tokens
from tests.files.report import Row
from tests.files.vocabularies import tokenizer_of
from tests.models.convert.gguf.files import write_and_close
from tests.text.test_tokenizer_kinds import random_texts

COUNT = 2000
_WORDS = ["the", "return", "1234", "Hello", "don", "...", "été", "日本", "мир", "   ", "\n\n"]
_MARK = "\u2581"  # SentencePiece's sign for a space
_PIECES = 200  # characters that are tokens where bytes are not spelled as letters
_NAMES = re.compile(r'tokenizer_pre == "([^"]+)"')
_REFUSED = {"whitespace": "an embedding model's, whose tokens give no text back"}

_Aside = Callable[[str], bool]


def _has(*categories: str, above: int = 0) -> _Aside:
    """Whether a text has a character of these categories, above a code point."""
    return lambda text: any(
        ord(letter) > above and unicodedata.category(letter).startswith(categories)
        for letter in text
    )


def _foreign_case(text: str) -> bool:
    return _has("M")(text) or _has("Lu", "Ll", "Lt", above=127)(text)


def _wide_space(text: str) -> bool:
    return any(letter.isspace() for letter in text if ord(letter) > 127)


def _number_after(text: str) -> bool:
    numbers = [unicodedata.category(letter).startswith("N") for letter in text]
    return (False, True) in itertools.pairwise(numbers)


def _any_case(text: str) -> bool:
    return _has("M", "Lu", "Lt")(text)


_ASCII_CASE = _foreign_case, "case of ASCII alone, no marks"
_NO_CASE = _any_case, "no case, no marks"
_NO_WIDE_SPACE = _wide_space, "no range has U+3000"
_NUMBERS_LATE = _number_after, "what precedes a number is not cut off"
# What the library leaves out, by the names whose expressions have it.
APPROXIMATED: dict[str, tuple[_Aside, str]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _ASCII_CASE),
    "granite-embed-multi-97m": _ASCII_CASE,
    **dict.fromkeys(("youtu", "kimi-k2"), _NO_CASE),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        (lambda text: _any_case(text) or _number_after(text), f"{_NO_CASE[1]}; {_NUMBERS_LATE[1]}"),
    ),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), _NO_WIDE_SPACE),
    "superbpe": (_has("Nd", above=127), "digits of ASCII alone"),
    "afmoe": _NUMBERS_LATE,
}


def compare() -> list[Row]:
    """One row for each name in llama.cpp's source."""
    source = (llama_cpp() / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    return [_compared(name) for name in sorted(set(_NAMES.findall(source)))]


def _compared(name: str) -> Row:
    if name in _REFUSED:
        return Row(name, COUNT, 0, COUNT, _REFUSED[name])
    if name not in PRE_TOKENIZERS:
        return Row(name, COUNT, 0, 0, "unknown")
    aside, note = APPROXIMATED.get(name, (_none, ""))
    texts = list(itertools.islice((text for text in _texts() if not aside(text)), COUNT))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        _write(file, name, letters=PRE_TOKENIZERS[name].letters)
        tokenizer = tokenizer_of(file)
        found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        expected = llama_tokens(file, texts)
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    return Row(name, len(texts), equal, 0, note and f"library: {note}")


def _none(text: str) -> bool:
    del text
    return False


def _texts() -> Iterator[str]:
    """Texts without end, in the form NFC, of assigned characters."""
    for seed in itertools.count(8):
        yield from _drawn(seed)


@cache
def _drawn(seed: int) -> list[str]:
    texts = (unicodedata.normalize("NFC", text) for text in random_texts(seed))
    return [text for text in texts if not _has("Cn", "Co")(text)]


def _write(file: Path, name: str, *, letters: bool) -> None:
    tokens, merges = _letters() if letters else _pieces()
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    kind = {True: TokenType.NORMAL, False: TokenType.BYTE}
    writer.add_token_types([kind[not text.startswith("<0x")] for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    write_and_close(writer)


@cache
def _letters() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of bytes that are spelled as letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _joined(alphabet, [_spelled(word) for word in _WORDS])


@cache
def _pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of characters; other characters are bytes."""
    found = {letter for text in _drawn(8) for letter in text} - {" ", "\0"}
    tokens, merges = _joined([*sorted(found)[:_PIECES], _MARK], ["\n\n\n"])
    return [*(f"<0x{byte:02X}>" for byte in range(256)), *tokens], merges


def _joined(alphabet: list[str], words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    pairs = [(one, other) for one in alphabet for other in alphabet]
    random.Random(9).shuffle(pairs)
    made = dict.fromkeys([*alphabet, *("".join(pair) for pair in pairs), *words])
    return list(made), pairs


def _spelled(word: str) -> str:
    """A word with its bytes spelled as letters."""
    ((spelled, _),) = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(word)
    return spelled
