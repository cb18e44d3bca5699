"""Finds where to cut a long text so that its parts have the same tokens as the whole.

The library needs up to 300 bytes per byte of text, so a long text is encoded in parts. A cut lies
between two characters that the pre-tokenizer always separates; a few thousand short texts test this
when a tokenizer gets its first long text. If nothing separates words, as in SentencePiece's BPE,
the cut lies between two characters that no token contains side by side, so no merge crosses it. A
part is encoded with the last character before it, whose tokens are dropped, because some tokenizers
put a space before a text.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

PART = 1 << 14  # characters
LONGEST = 1 << 16  # bytes of a part without a cut
# The characters before and after a cut, each as a class, then examples of both classes.
_PLACES = (
    (r"[\w!-~]", " ", "aBé1漢.'_)", " "),
    ("[A-Za-z]", "[0-9]", "aB", "1"),
    ("[0-9]", "[A-Za-z]", "1", "aB"),
    ("[A-Za-z0-9]", r"[\n!-&(-/:-@[-`{-~]", "aB1", "\n!(-/:@[_{~"),  # no apostrophe
    ("[ぁ-んァ-ヶ一-龥가-힣]", r"[、。\uff0c\n]", "漢かカ한", "、。\uff0c\n"),
)
_LETTERS = "aB1 .'\n漢é、-\t_"  # for the text around a cut
_TRIES, _MAX_AROUND = 1500, 7  # test texts per kind of place, and characters on each side
_SPELLED = {ord(letter): " " for letter in "▁Ġ"} | {ord("Ċ"): "\n"}  # vocabularies' spellings


class UncutText(ValueError):  # noqa: N818 - named as what it says
    """A long text has nowhere to be cut."""

    def __init__(self) -> None:
        super().__init__(
            f"the text has more than {LONGEST:,} bytes in a row that can only be encoded together: "
            "put spaces or line ends between them, or shorten the text"
        )


class Cuts:
    """Cuts texts for one tokenizer."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        kinds = [*_parts_of(tokenizer.normalizer), *_parts_of(tokenizer.pre_tokenizer)]
        places: list[str] = []
        if all(map(_keeps, kinds)) and _merges_letters(tokenizer.model):
            words = partial(_words, tokenizer)
            by_bytes = any(kind["type"] == "ByteLevel" for kind in kinds)
            # If the library drops a letter, its neighbours could merge.
            apart = not by_bytes and _knows_all_bytes(tokenizer) and _never_splits(words)
            for before, behind, *some in _PLACES:
                if apart or _separates(words, *some):
                    places.append(f"(?<={before})(?={behind})")
        self._place = re.compile("|".join(places) or "(?!)")
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._ends = {content[-1:] for content in added}
        self._inside: set[str] = set()  # pairs that occur within a token
        for entry in [*added, *_entries(tokenizer)] if places else ():
            spelled = entry.translate(_SPELLED)
            for found in self._place.finditer(spelled):
                self._inside.add(spelled[found.start() - 1 : found.start() + 1])

    def parts(self, text: str) -> list[tuple[str, str]]:
        """Return each part, with the character before it.

        Raises:
            UncutText: a part would be too long.
        """
        places = [0]
        while places[-1] < len(text):
            places.append(self._next(text, places[-1] + PART))
        parts = [
            (text[max(0, start - 1) : start], text[start:end]) for start, end in pairwise(places)
        ]
        if any(len(part.encode(errors="replace")) > LONGEST for _, part in parts):
            raise UncutText
        return parts

    def _next(self, text: str, least: int) -> int:
        """Return the first place to cut from `least` on; the text's end if there is none."""
        for found in self._place.finditer(text, least, least + LONGEST):
            pair = text[found.start() - 1 : found.start() + 1]
            if pair[0] not in self._ends and pair not in self._inside:
                return found.start()
        return len(text)


def _entries(tokenizer: FastTokenizer) -> Iterable[str]:
    """Return the vocabulary without added tokens; lazily if its ids have no gap."""
    model, size = tokenizer.model, tokenizer.get_vocab_size(with_added_tokens=False)
    if any(model.id_to_token(index) is None for index in range(size)):
        return tokenizer.get_vocab(with_added_tokens=False)
    return map(model.id_to_token, range(size))


def _parts_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or a pre-tokenizer, as tokenizer.json describes them."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        described = waiting.pop()
        inner = described.get("normalizers", described.get("pretokenizers"))
        if described["type"] == "Sequence" and inner is not None:
            waiting += inner
        else:
            yield described


def _keeps(part: Mapping[str, Any]) -> bool:
    """Return whether a part preserves every letter's bytes, except for Unicode normalization."""
    match part:
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
        case {"type": "Metaspace", "replacement": "▁"}:
            return True
        case {"type": kind}:
            forms = {"NFC", "NFD", "NFKC", "NFKD"}
            return kind in {"ByteLevel", "Digits", "Prepend", "UnicodeScripts", *forms}
    return False


def _merges_letters(model: Any) -> bool:
    """Return whether a model merges a word's letters and adds no marks to them."""
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    return type(model).__name__ == "BPE" and not any(getattr(model, it, None) for it in affixes)


def _knows_all_bytes(tokenizer: FastTokenizer) -> bool:
    """Return whether each byte has a token; otherwise the library drops or merges some letters."""
    names = (f"<0x{byte:02X}>" for byte in range(256))
    falls_back = getattr(tokenizer.model, "byte_fallback", False)
    return falls_back and all(tokenizer.token_to_id(name) is not None for name in names)


Words = Callable[[str], list[str]]


def _words(tokenizer: FastTokenizer, text: str) -> list[str]:
    """Split a text as the tokenizer does before it looks for tokens."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _around(chosen: random.Random) -> str:
    return "".join(chosen.choices(_LETTERS, k=chosen.randrange(_MAX_AROUND)))


def _separates(words: Words, before: str, behind: str) -> bool:
    """Return whether texts are split in the same way as a whole and in two parts."""
    chosen = random.Random(1)  # nosec B311
    for _ in range(_TRIES):
        last = chosen.choice(before)
        left, right = _around(chosen) + last, chosen.choice(behind) + _around(chosen)
        if words(left) + words(last + right)[len(words(last)) :] != words(left + right):
            return False
    return True


def _never_splits(words: Words) -> bool:
    chosen = random.Random(2)  # nosec B311
    return all(len(words("a" + _around(chosen))) == 1 for _ in range(_TRIES))
