"""No text has fewer tokens than its bytes say, and what cannot fit shows by them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from specops.text.tokenizer import Tokenizer
from tests.text import published_tokenizers as published
from tests.text.test_tokenizer import KINDS as SMALL
from tests.text.test_tokenizer_kinds import KINDS as PUBLISHED


def small(*, unknown: bool, spaces: bool, form: normalizers.Normalizer | None = None) -> Tokenizer:
    """A tokenizer without bytes: what it does not know is nothing, or one token however long."""
    entries = ["<unk>", "▁", "a", "b", "aa", "K", "é", "▁▁"]
    fast = FastTokenizer(
        models.BPE(
            vocab={entry: index for index, entry in enumerate(entries)},
            merges=[("a", "a"), ("▁", "▁")],
            unk_token="<unk>" if unknown else None,
            fuse_unk=unknown,
        )
    )
    fast.normalizer = normalizers.Sequence(
        [*([form] if form else []), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    fast.add_tokens([AddedToken("<strip>", lstrip=spaces, rstrip=spaces)])
    return Tokenizer(fast)


def with_form(form: normalizers.Normalizer) -> Tokenizer:
    """SmolLM2's letters behind a Unicode form."""
    fast = FastTokenizer.from_str(published.smollm2().to_str())
    fast.normalizer = form
    return Tokenizer(fast)


def without_bytes(*missing: int) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    left = [letter for index, letter in enumerate(letters) if index not in missing]
    fast = FastTokenizer(models.BPE(vocab={it: n for n, it in enumerate(left)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast)


def with_runs_of_marks() -> Tokenizer:
    """Bytes, and a token of four of SentencePiece's marks for a space, which here are no spaces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("▁")
    one, two, three = parts[0][0]
    mark = one + two + three
    merges = [(one, two), (one + two, three), (mark, mark), (mark * 2, mark * 2)]
    entries = [*letters, *("".join(pair) for pair in merges)]
    fast = FastTokenizer(models.BPE(vocab={it: n for n, it in enumerate(entries)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast)


KINDS = {
    "runs of marks": with_runs_of_marks(),
    **{name: kind for name, (kind, _) in PUBLISHED.items()},
    **SMALL,
    "unknown letters vanish": small(unknown=False, spaces=False),
    "unknown letters are one": small(unknown=True, spaces=False),
    "a token takes the spaces around it": small(unknown=True, spaces=True),
    "small, NFKC": small(unknown=False, spaces=False, form=normalizers.NFKC()),
    **{f"{it}": with_form(getattr(normalizers, it)()) for it in ("NFC", "NFD", "NFKC", "NFKD")},
    "lower case": with_form(normalizers.Lowercase()),
    "accents go": with_form(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "some bytes have no token": without_bytes(3, 50, 120, 200),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
# Letters that forms merge, split, shrink or turn into plain ones; spaces; marks of our own.
ODD = (
    *("e\u0301", "s\u0323\u0307", "\u03c9\u0314\u0342\u0345", "\u1112\u1161\u11ab", "\u212a"),
    *("\U0001d400", "\ufb03", "\uff11", "\u037e", "\ufdfa", "\u3000", "\u00a0", "\u2028", "\x1c"),
    *("▁", "▁▁▁▁", "<strip>", "<|end|>", "<|assistant|>", "</s>", "<0x41>", "   ", "\n\n", "aaaa"),
    *("1" * 9, "é", "🙂", "한", "漢", "=" * 40, " " * 70, "def add(a, b):\n    return"),
)
PIECES = st.one_of(st.sampled_from(ODD), st.text(max_size=8))


@every_kind
@settings(deadline=None)  # the first call looks at the vocabulary
@given(pieces=st.lists(PIECES, max_size=12), times=st.integers(1, 40))
def test_no_text_has_fewer_tokens(kind: str, pieces: list[str], times: int) -> None:
    text = "".join(pieces) * times
    assert KINDS[kind].least_tokens(text) <= len(KINDS[kind].encode(text, special_tokens=False))


def longest_first(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts of the vocabulary's own longest tokens: none is better at having few tokens."""
    entries = sorted(tokenizer.vocabulary().items(), key=lambda item: -len(item[0]))[:300]
    for _, token in entries:
        yield tokenizer.decode([token, token])


@every_kind
def test_the_longest_tokens_are_within_the_bound(kind: str) -> None:
    tokenizer, chosen = KINDS[kind], random.Random(4)
    texts = list(longest_first(tokenizer))
    for text in [*texts, *("".join(chosen.choices(texts, k=30)) for _ in range(50))]:
        found = len(tokenizer.encode(text * 20, special_tokens=False))
        assert tokenizer.least_tokens(text * 20) <= found


@pytest.mark.parametrize("kind", [name for name in PUBLISHED if name != "phi3"])
def test_a_megabyte_of_prose_or_digits_cannot_fit_a_small_context(kind: str) -> None:
    """Published vocabularies have long runs of spaces, which say nothing about letters."""
    rows = "".join(f"{number} the quick brown fox, {number * 7}\n" for number in range(30_000))
    assert KINDS[kind].least_tokens(rows) > 8192
    assert KINDS[kind].least_tokens("7" * 1_000_000) > 8192


def test_a_vocabulary_of_single_letters_is_counted_exactly() -> None:
    tokenizer = SMALL["byte-level"]
    for text in ("abc", "é🙂", " " * 1000, ""):
        assert tokenizer.least_tokens(text) == len(tokenizer.encode(text)) == len(text.encode())


@pytest.mark.parametrize("change", ["truncation", "padding"])
def test_a_published_file_cuts_or_fills_up_no_text(change: str, tmp_path: Path) -> None:
    """Some files have it in them: a prompt was cut at so many tokens, and nobody told."""
    fast = FastTokenizer.from_str(published.smollm2().to_str())
    if change == "truncation":
        fast.enable_truncation(4)
    else:
        fast.enable_padding(length=512)
    path = tmp_path / "tokenizer.json"
    path.write_text(fast.to_str())
    assert json.loads(path.read_text())[change] is not None
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a b c d e f g") == KINDS["smollm2"].encode("a b c d e f g")
