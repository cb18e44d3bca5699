"""How byte-level tokenizers cut a text into words before they merge: by `tokenizer.ggml.pre`.

A GGUF names the way; llama.cpp keeps the expressions, adapted to its own engine, in its source.
Here they stand as the published tokenizer.json have them. A name that is not here is refused:
words cut in another way have other tokens, which a model understands badly without any error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+{{end}}|{_BEFORE}{_UPPER}+{_LOWER}*{{end}}"
_REST_OF_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("{end}", "") + r"|\p{N}" + _REST_OF_CASED
_GPT4O = _CASED.replace("{end}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _REST_OF_CASED
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


class PreTokenizer(NamedTuple):
    """The part of a tokenizer.json, and what else goes by the same name.

    `whole_words`: a word that is a token is one, whatever the merges make of it. `composed`:
    characters are composed first (NFC). `adds_bos`: a text begins with bos where a file does not
    say whether it does.
    """

    parts: tuple[dict[str, Any], ...]
    whole_words: bool = False
    composed: bool = False
    adds_bos: bool = False

    @property
    def json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a tokenizer.json."""
        if len(self.parts) == 1:
            return self.parts[0]
        return {"type": "Sequence", "pretokenizers": list(self.parts)}


def _bytes(*, words: bool) -> dict[str, Any]:
    """Letters for bytes, of words cut as GPT-2 does it or as they are."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": words,
    }


def _split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_LIKE_GPT2 = PreTokenizer((_bytes(words=True),))
_LIKE_STARCODER = PreTokenizer((_DIGITS, _bytes(words=True)))
_LIKE_LLAMA3 = PreTokenizer((_split(_LLAMA3), _bytes(words=False)), whole_words=True, adds_bos=True)
_LIKE_QWEN2 = PreTokenizer((_split(_QWEN2), _bytes(words=False)), composed=True)
_PLAIN_LLAMA3 = PreTokenizer((_split(_LLAMA3), _bytes(words=False)))
_DEFAULT = PreTokenizer(  # what llama.cpp does with files that do not say it
    (
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(_GPT2),
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
        _bytes(words=False),
    )
)
_KNOWN: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mpt", "olmo", "jais", "exaone4"), _LIKE_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _LIKE_STARCODER),
    **dict.fromkeys(("exaone", "minerva-7b"), _LIKE_STARCODER),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LIKE_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _PLAIN_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _LIKE_QWEN2),
    "stablelm2": PreTokenizer((_split(_QWEN2), _bytes(words=False))),
    "tekken": PreTokenizer((_split(_TEKKEN), _bytes(words=False)), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_split(_GPT4O), _bytes(words=False)))),
}


def pre_tokenizer(name: str) -> PreTokenizer | None:
    """The way of a name; None where it is not known."""
    return _KNOWN.get(name)


def known_names() -> list[str]:
    """Every name that is known."""
    return list(_KNOWN)
