"""How few tokens a text can have, from its bytes alone: what cannot fit need not be encoded.

A token of n bytes stands for 1/n of a token at each of them. If w(b) is the length of the longest
token with the byte b, a text has at least as many tokens as the sum of 1/w(b) over its bytes. A
long token of spaces so says nothing about digits, which in most vocabularies stand alone.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

_SPACE = "\u2581"  # SentencePiece's sign for a space
_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_MOST_SHRUNK = 4  # bytes that a Unicode form makes one of: a bold letter becomes a plain one
_ASCII = 128


class LeastTokens:
    """A lower bound for the tokens of texts.

    It is 0 where the tokenizer may drop or merge letters in a way that this does not know.

    Args:
        tokenizer: the library's.
        letters: the byte of each letter of a byte-level vocabulary.
    """

    def __init__(self, tokenizer: FastTokenizer, letters: Mapping[str, int]) -> None:
        parts = [*parts_of(tokenizer.normalizer), *parts_of(tokenizer.pre_tokenizer)]
        kinds = {part["type"] for part in parts}
        self._changes = bool(kinds & _FORMS)  # letters that are not ASCII
        added = tokenizer.get_added_tokens_decoder().values()
        self._drops_space = any(token.lstrip or token.rstrip for token in added)
        self._shares = np.zeros(256)  # of a token, by byte
        self._least = 0.0  # of a token, for each byte that a Unicode form changes
        self._space = ""
        if not all(map(keeps, parts)) or not splits_into_letters(tokenizer.model, "BPE", "Unigram"):
            return
        byte_level = "ByteLevel" in kinds
        self._space = "" if byte_level else _SPACE  # what stands for a space in the vocabulary
        table = {ord(letter): byte for letter, byte in letters.items()}
        by_length: defaultdict[int, bytearray] = defaultdict(bytearray)
        for token in added:
            content = self._as_spaces(token.content).encode()
            by_length[len(content)] += content
        for entry in entries(tokenizer):
            if byte_level and letters.keys() >= set(entry):
                content = entry.translate(table).encode("latin-1")
            else:
                content = self._as_spaces(entry).encode()
            by_length[len(content)] += content
        for length, found in sorted(by_length.items()):
            self._shares[np.frombuffer(found, np.uint8)] = 1 / max(1, length)
        unknown = list(unknown_bytes(tokenizer, letters if byte_level else None))
        self._shares[unknown] = 0
        if not unknown:
            self._least = 1 / max(by_length) / _MOST_SHRUNK

    def of(self, text: str) -> int:
        """Return a number of tokens of which a text has no fewer."""
        if self._drops_space:
            text = "".join(text.split())
        content = np.frombuffer(self._as_spaces(text).encode("utf-8", "replace"), np.uint8)
        counts = np.bincount(content, minlength=256)
        if not self._changes:
            return _rounded_up(float(counts @ self._shares))
        others = content >= _ASCII
        # A letter before some that are not ASCII may become one of them, as an accent's does.
        merged = np.count_nonzero(others[1:] & ~others[:-1])
        plain = float(counts[:_ASCII] @ self._shares[:_ASCII])
        other = int(counts[_ASCII:].sum()) * self._least
        return max(0, _rounded_up(plain - int(merged) + other))

    def _as_spaces(self, text: str) -> str:
        return text.replace(self._space, " ") if self._space else text


def _rounded_up(tokens: float) -> int:
    return math.ceil(tokens * (1 - 1e-9))  # the sum's own rounding is much smaller


def entries(tokenizer: FastTokenizer) -> Iterable[str]:
    """Return the vocabulary without added tokens; one entry at a time where its ids have no gap."""
    model, size = tokenizer.model, tokenizer.get_vocab_size(with_added_tokens=False)
    if any(model.id_to_token(index) is None for index in range(size)):
        return tokenizer.get_vocab(with_added_tokens=False)
    return map(model.id_to_token, range(size))


def parts_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or a pre-tokenizer, as tokenizer.json describes them."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        described = waiting.pop()
        inner = described.get("normalizers", described.get("pretokenizers"))
        if described["type"] == "Sequence" and inner is not None:
            waiting += inner
        else:
            yield described


def keeps(part: Mapping[str, Any]) -> bool:
    """Return whether every letter still has its own bytes behind a part, but for Unicode forms."""
    match part:
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(spelled)}:
            return spelled == _SPACE
        case {"type": "Metaspace", "replacement": str(spelled)}:
            return spelled == _SPACE
        case {"type": kind}:
            return kind in {"ByteLevel", "Digits", "Prepend", "UnicodeScripts", *_FORMS}
    return False


def splits_into_letters(model: Any, *kinds: str) -> bool:
    """Return whether a model is of such a kind, and writes no signs beside a word's letters."""
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    return type(model).__name__ in kinds and not any(getattr(model, it, None) for it in affixes)


def unknown_bytes(
    tokenizer: FastTokenizer, letters: Mapping[str, int] | None = None
) -> Iterator[int]:
    """Yield the bytes that may have no token: the library drops them, or makes one of many."""
    if letters is not None:
        yield from (byte for it, byte in letters.items() if tokenizer.token_to_id(it) is None)
        return
    falls_back = getattr(tokenizer.model, "byte_fallback", False)
    if not falls_back or any(tokenizer.token_to_id(f"<0x{n:02X}>") is None for n in range(256)):
        for byte in range(_ASCII):
            spelled = _SPACE if byte == ord(" ") else chr(byte)
            if tokenizer.token_to_id(spelled) is None:
                yield byte
        yield from range(_ASCII, 256)
