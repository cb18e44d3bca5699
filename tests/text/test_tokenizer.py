"""Text comes back from its tokens; wrong tokenizers are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.tokenizer import Tokenizer, TokenizerError


def byte_level() -> Tokenizer:
    """One token for each of the 256 bytes: every multi-byte character is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(
        models.BPE(vocab=dict(zip(alphabet, range(256), strict=True)), merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer)


def straddling() -> Tokenizer:
    """The byte-level tokenizer with one more token: last byte of an é, first of the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "©Ã"])}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer)


def sentencepiece() -> Tokenizer:
    """Llama's kind: a mark for spaces, byte tokens for characters outside of the vocabulary."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ö", "▁a"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = FastTokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(tokenizer)


KINDS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    tokenizer = straddling()
    vocabulary = tokenizer.vocabulary()
    first, both, last = (vocabulary[token] for token in ("Ã", "©Ã", "©"))
    detokenizer = IncrementalDetokenizer(tokenizer, (vocabulary["x"],))
    seen = [(detokenizer.push(token), bool(detokenizer.rest)) for token in (first, *[both] * 20)]
    assert seen == [("", True), *[("é", True)] * 20]
    assert (detokenizer.push(last), bool(detokenizer.rest)) == ("é", False)
    assert detokenizer.flush() == ""


def test_a_run_of_byte_tokens_in_the_prompt_is_not_cut_inside_a_character() -> None:
    """Byte fallback decodes a run of bytes together: a broken start would break the whole run."""
    tokenizer = KINDS["sentencepiece"]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("🙂🙂"))
    assert "".join(map(detokenizer.push, tokenizer.encode("🙂")[1:])) == "🙂"


def test_a_space_after_special_tokens_is_not_lost() -> None:
    tokenizer = KINDS["sentencepiece"]
    a, unknown = tokenizer.vocabulary()["▁a"], 10_000  # an id without an entry has no text
    detokenizer = IncrementalDetokenizer(tokenizer, (a, *[unknown] * 20))
    text = [detokenizer.push(token) for token in (a, *[unknown] * 40, a)]
    assert (text[0], text[-1]) == (" a", " a")


def test_broken_bytes_do_not_hold_the_text_back_forever() -> None:
    tokenizer = KINDS["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    lone = tokenizer.encode("🙂")[1]
    text = "".join(detokenizer.push(lone) for _ in range(12))
    assert set(text) == {"\ufffd"}


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for content in (b"{", b'{"version": "\xa0"}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(TokenizerError, match="cannot be read"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("change", ["truncation", "padding"])
def test_a_published_file_cuts_or_fills_up_no_text(change: str, tmp_path: Path) -> None:
    """Some files have it in them: a prompt was cut at so many tokens, and nobody told."""
    fast = FastTokenizer.from_str(KINDS["byte-level"]._tokenizer.to_str())
    if change == "truncation":
        fast.enable_truncation(4)
    else:
        fast.enable_padding(length=512)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())[change] is not None
    assert Tokenizer.load(tmp_path).encode("a b c d") == KINDS["byte-level"].encode("a b c d")


def test_an_unknown_kind_of_decoder_is_refused(tmp_path: Path) -> None:
    tokenizer = FastTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    for decoder in (None, decoders.WordPiece(), decoders.CTC()):
        tokenizer.decoder = decoder
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerError, match="neither byte-level nor SentencePiece's"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.lists(st.integers(0, 262), max_size=30))
def test_tokens_in_any_order_add_their_bytes(kind: str, tokens: list[int]) -> None:
    tokenizer = KINDS[kind]
    detokenizer = IncrementalDetokenizer(tokenizer, ())
    shown = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    spelled = b"".join(map(tokenizer.shown_bytes, tokens)).decode(errors="replace")
    assert shown == (spelled.removeprefix(" ") if tokenizer.drops_first_space else spelled)


@pytest.mark.parametrize("key", ["continuing_subword_prefix", r"\u0063ontinuing_subword_prefix"])
@pytest.mark.parametrize("merge", [["a", "é"], "a é"])
def test_a_prefix_that_would_cut_a_character_is_refused(
    tmp_path: Path, key: str, merge: object
) -> None:
    """Without the check, the library would end the process."""
    vocab = {"a": 0, "é": 1, "a\u00a9": 2}
    model = {"type": "BPE", "vocab": vocab, "merges": [merge], "PREFIX": "x"}
    content = json.dumps({"version": "1.0", "added_tokens": [], "model": model}, ensure_ascii=False)
    (tmp_path / "tokenizer.json").write_text(content.replace("PREFIX", key))
    with pytest.raises(TokenizerError, match="does not continue with 'x'"):
        Tokenizer.load(tmp_path)


def test_where_the_library_panics_one_request_ends(tmp_path: Path) -> None:
    """A panic of the library is no ordinary exception, and would end the engine."""
    model = {"type": "BPE", "vocab": {"a": 0, "\u00e4": 1}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    content |= {"normalizer": {"type": "Prepend", "prepend": ""}}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content |= {"pre_tokenizer": letters, "decoder": letters}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match="the tokenizer failed: index out of bounds"):
        tokenizer.encode("The fox, \u00e4")
