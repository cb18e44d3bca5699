"""Every published kind of tokenizer gives every text back, as a whole and token by token."""

import random
import sys
import unicodedata
from collections.abc import Callable

import pytest

from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.text_stream import TextStream
from specops.text.tokenizer import Tokenizer
from tests.text import published_tokenizers as published

COUNT = 200
BROKEN = "\ufffd"


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _spaces(text: str) -> str:
    """SentencePiece decodes its own mark for a space as a space."""
    return text.replace(published.MARK, " ")


def _first_space_lost(text: str) -> str:
    """A text that begins with a space gets no further mark, and the decoder removes the first."""
    return _spaces(text).removeprefix(" ")


# A tokenizer, and a function that returns the expected text after encoding and decoding.
KINDS: dict[str, tuple[Tokenizer, Callable[[str], str]]] = {
    "llama": (Tokenizer(published.llama()), _spaces),
    "llama, not legacy": (Tokenizer(published.llama_not_legacy()), _first_space_lost),
    "phi3": (Tokenizer(published.phi3()), _spaces),
    "gemma3": (Tokenizer(published.gemma3()), _spaces),
    "gpt2": (Tokenizer(published.gpt2()), str),
    "opt": (Tokenizer(published.opt()), str),
    "smollm2": (Tokenizer(published.smollm2()), str),
    "qwen2": (Tokenizer(published.qwen2()), _nfc),
}
every_kind = pytest.mark.parametrize("kind", KINDS)

SCRIPTS = [
    (0x20, 0x7E),
    (0xA0, 0x24F),  # Latin
    (0x300, 0x36F),  # combining marks
    (0x370, 0x52F),  # Greek, Cyrillic
    (0x590, 0x6FF),  # Hebrew, Arabic
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x1100, 0x11FF),  # Hangul in parts
    (0x2000, 0x206F),  # spaces, joiners, directions
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xE000, 0xF8FF),  # private
    (0xFE00, 0xFE0F),  # variation selectors
    (0x1F300, 0x1FAFF),
    (0x20000, 0x2FA1F),
    (0x0, sys.maxunicode),
]
CHUNKS = [
    *("👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪", "e\u0301\u0323", "é", "ﬁ"),
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\u3000", "\u00a0", "\u200b", "\x00", "\x1b", "\x7f"),
    *("שלום", "مرحبا", "日本語", "नमस्ते", "안녕", "def f():\n    "),
    *(" the", "fox's", "12 345", "<0x41>"),
    *(published.MARK, "\ufeff", "\u202e", "\U0010ffff"),
]


def random_texts(seed: int) -> list[str]:
    """Texts of up to 20 characters or chunks, of one script or of all."""
    rng = random.Random(seed)

    def character(low: int, high: int) -> str:
        while 0xD800 <= (code := rng.randint(low, high)) <= 0xDFFF:
            pass
        return chr(code)

    def piece(scripts: list[tuple[int, int]]) -> str:
        return rng.choice(CHUNKS) if rng.random() < 0.3 else character(*rng.choice(scripts))

    texts = [*CHUNKS]
    while len(texts) < COUNT:
        scripts = SCRIPTS if rng.random() < 0.5 else [rng.choice(SCRIPTS)]
        texts.append("".join(piece(scripts) for _ in range(rng.randint(1, 20))))
    return [text for text in texts if BROKEN not in text]


TEXTS = random_texts(1)


@every_kind
def test_a_text_comes_back_from_its_tokens(kind: str) -> None:
    tokenizer, expected = KINDS[kind]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == expected(text)


def check_stream(tokenizer: Tokenizer, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """Check that the text after each token is all of the complete text, and nothing else."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    shown = before = tokenizer.decode(prompt)
    for count, token in enumerate(tokens, start=1):
        shown += detokenizer.push(token)
        whole = tokenizer.decode(prompt + tokens[:count])
        assert BROKEN not in shown
        if BROKEN not in whole:
            assert shown == whole
        assert bool(detokenizer.rest) == (BROKEN in whole)
    shown += detokenizer.flush()
    assert shown == tokenizer.decode(prompt + tokens)
    assert shown.startswith(before)


@every_kind
def test_a_text_comes_token_by_token_after_any_prompt(kind: str) -> None:
    """The prompt may end within a word or a line, or with a special token."""
    tokenizer, _ = KINDS[kind]
    for prompt, text in zip(TEXTS, random_texts(2), strict=False):
        tokens = tuple(token for token in tokenizer.encode(text) if tokenizer.decode([0, token]))
        check_stream(tokenizer, tokenizer.encode(prompt), tokens)


@every_kind
def test_any_tokens_are_decoded_as_the_library_does(kind: str) -> None:
    tokenizer, _ = KINDS[kind]
    rng, every = random.Random(3), sorted(tokenizer.vocabulary().values())
    whole = [token for token in every if not _half(tokenizer.shown_bytes(token))]
    for _ in range(COUNT):
        tokens = rng.choices(whole, k=rng.randint(1, 20))
        detokenizer = IncrementalDetokenizer(tokenizer, ())
        assert "".join(map(detokenizer.push, tokens)) == tokenizer.decode(tokens)


def _half(encoded: bytes) -> bool:
    """Whether bytes end within a character, which the library may decode with its neighbours."""
    return BROKEN in encoded.decode(errors="replace")


@every_kind
def test_spellings_of_tokens_make_the_text(kind: str) -> None:
    tokenizer, expected = KINDS[kind]
    decoder_drops_a_space = kind.startswith(("llama", "phi3"))
    for text in TEXTS:
        spelled = b""
        for token in tokenizer.encode(text, special_tokens=False):
            shown, encoded = tokenizer.spelling(token)
            assert shown in (encoded.decode(errors="replace"), f"bytes:{_escaped(encoded)}")
            spelled += encoded
        whole = spelled.decode()
        assert (whole.removeprefix(" ") if decoder_drops_a_space else whole) == expected(text)


def _escaped(encoded: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in encoded)


@every_kind
def test_special_tokens_are_spelled_as_they_are_written(kind: str) -> None:
    tokenizer, _ = KINDS[kind]
    special = next(name for name in ("<|endoftext|>", "</s>") if name in tokenizer.vocabulary())
    token = tokenizer.vocabulary()[special]
    assert tokenizer.spelling(token) == (special, special.encode())


def test_indented_code_of_gemma_has_spaces() -> None:
    """Its runs of spaces are added tokens, which are spelled with SentencePiece's sign."""
    tokenizer, _ = KINDS["gemma3"]
    text = "def f():\n    return  1\n\n\nx"
    tokens = tokenizer.encode(text, special_tokens=False)
    assert any(tokenizer.spelling(token) == ("    ", b"    ") for token in tokens)
    stream = TextStream(tokenizer, tokenizer.encode("x"), ("\n\n\n",))
    pieces = [piece for token in tokens if not stream.stopped for piece in stream.push(token, "")]
    assert stream.stopped == "\n\n\n"
    assert "".join(piece.text for piece in pieces) == "def f():\n    return  1"
    stream = TextStream(tokenizer, tokenizer.encode("x"), ("  1",))
    pieces = [piece for token in tokens if not stream.stopped for piece in stream.push(token, "")]
    assert (stream.stopped, "".join(piece.text for piece in pieces)) == (
        "  1",
        "def f():\n    return",
    )


def test_a_part_of_a_character_says_its_bytes() -> None:
    tokenizer, _ = KINDS["llama"]
    token = tokenizer.vocabulary()["<0xE2>"]
    assert tokenizer.spelling(token) == ("bytes:\\xe2", b"\xe2")
