"""A long text is encoded in parts, and has the same tokens as at once."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from specops.text import cuts, tokenizer
from specops.text.cuts import LONGEST, PART, UncutText
from specops.text.tokenizer import Tokenizer
from tests.text import published_tokenizers as published
from tests.text.test_tokenizer import KINDS as SMALL
from tests.text.test_tokenizer_kinds import KINDS as PUBLISHED

# Letters that forms merge, split, shrink or turn into plain ones; spaces; marks of our own.
ODD = (
    *("e\u0301", "s\u0323\u0307", "\u03c9\u0314\u0342\u0345", "\u1112\u1161\u11ab", "\u212a"),
    *("\U0001d400", "\ufb03", "\uff11", "\u037e", "\ufdfa", "\u3000", "\u00a0", "\u2028", "\x1c"),
    *("▁", "▁▁▁▁", "<strip>", "<|end|>", "<|assistant|>", "</s>", "<0x41>", "   ", "\n\n", "aaaa"),
    *("1" * 9, "é", "🙂", "한", "漢", "=" * 40, " " * 70, "def add(a, b):\n    return"),
)
WORDS = (
    *("the", " quick", " fox", "Fox", "naïve", "漢字", "カタ", "한국", "、", "。", "\uff0c", "🙂"),
    *("\n", "\n\n", "\r\n", " \n", "\t", " ", "  ", "1", "23", "4567", ".", "'s", "'", "_", "-"),
)


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


KINDS = {
    **{name: kind for name, (kind, _) in PUBLISHED.items()},
    **SMALL,
    "unknown letters vanish": small(unknown=False, spaces=False),
    "unknown letters are one": small(unknown=True, spaces=False),
    "a token takes the spaces around it": small(unknown=True, spaces=True),
    "small, NFKC": small(unknown=False, spaces=False, form=normalizers.NFKC()),
    **{f"{it}": with_form(getattr(normalizers, it)()) for it in ("NFC", "NFD", "NFKC", "NFKD")},
    "lower case": with_form(normalizers.Lowercase()),
    "accents go": with_form(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
}
PIECES = st.one_of(st.sampled_from(WORDS), st.sampled_from(ODD), st.text(max_size=4))
every_published = pytest.mark.parametrize("kind", PUBLISHED)


def at_once(kind: str, text: str, *, special: bool = False) -> tuple[int, ...]:
    whole = KINDS[kind]._tokenizer
    return tuple(whole.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=st.lists(PIECES, max_size=40), special=st.booleans())
def test_parts_have_the_tokens_of_the_whole(kind: str, pieces: list[str], *, special: bool) -> None:
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(cuts, "PART", 3)
        small.setattr(tokenizer, "PART", 3)
        found = KINDS[kind].encode(text, special_tokens=special)
    assert found == at_once(kind, text, special=special)


@every_published
def test_long_texts_of_every_kind_have_the_tokens_of_the_whole(kind: str) -> None:
    chosen = random.Random(3)
    text = "".join(chosen.choices([*WORDS, " a few words,", " 1 of them\n"], k=40_000))
    assert len(KINDS[kind].cuts.parts(text)) > 5
    assert KINDS[kind].encode(text) == at_once(kind, text, special=True)


@every_published
@pytest.mark.parametrize(
    "line",
    [
        "The quick brown fox. ",
        "if x1:\n\treturn{2:0x3F}\n",
        "12,345\n6,7\n",
        "日本語の文章、你好世界。안녕하세요\n",
        "QmFzZTY0IGhhcyBsZXR0ZXJzIGFuZCBkaWdpdHMgMTIzNDU2",
    ],
)
def test_prose_code_numbers_chinese_and_base64_have_cuts(kind: str, line: str) -> None:
    parts = [part for _, part in KINDS[kind].cuts.parts(line * 9_000)]
    assert max(map(len, parts)) < PART + 3 * len(line)
    assert "".join(parts) == line * 9_000


def test_what_cannot_be_cut_is_refused_above_a_bound() -> None:
    for kind in ("smollm2", "llama"):
        for letter in "x漢 ":
            letters = letter * (LONGEST // len(letter.encode()))
            encoded = KINDS[kind].encode(letters, special_tokens=False)
            assert encoded == at_once(kind, letters)
            with pytest.raises(UncutText, match=r"more than 65,536 bytes in a row .* put spaces"):
                KINDS[kind].encode(letters + letter)


_HOSTILE = """
import random, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from specops.system.allocator import configure_malloc
configure_malloc()
from specops.system.memory import process_memory
from specops.text.tokenizer import Tokenizer

chosen, tokenizer = random.Random(1), Tokenizer.load(Path(sys.argv[1]))
def words(length):
    each = ("".join(chosen.choices("abcdefghij", k=length)) for _ in range(500_000 // length))
    return " ".join(each)
tokenizer.encode("a " * 20_000)  # the first long text
before, threads = process_memory().anon, [ThreadPoolExecutor(1) for _ in range(4)]
for thread in threads:  # each keeps tokens of words
    for text in (words(250), words(3), "1 2 3 4 5 6 7 8 " * 30_000, "漢、" * 80_000):
        thread.submit(tokenizer.encode, text).result()
print(process_memory().anon - before)
"""


def test_long_texts_leave_little_memory_taken(tmp_path: Path) -> None:
    published.smollm2().save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", _HOSTILE, tmp_path]
    left = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert left < 32 << 20
