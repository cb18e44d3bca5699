"""The pre-tokenizers of byte-level tokenizers, which cut a text into words: `tokenizer.ggml.pre`.

A GGUF holds only the name. llama.cpp has the expressions in its source, adapted to its own engine;
here they are as in the published tokenizer.json. An unknown name is refused: a wrong pre-tokenizer
gives other tokens, which a model understands badly, without any error.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

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
    """A pre-tokenizer and the other settings that its name implies.

    `whole_words`: a word that is in the vocabulary is one token, whatever the merges say.
    `composed`: the text is normalized to NFC first. `adds_bos`: a text begins with bos, unless the
    file says otherwise.
    """

    part: pre_tokenizers.PreTokenizer
    whole_words: bool = False
    composed: bool = False
    adds_bos: bool = False


def _by(*expressions: str) -> pre_tokenizers.PreTokenizer:
    """Cuts a text by the expressions, one after the other, and spells bytes as letters."""
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in expressions]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, letters])


_GPT2_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_LIKE_GPT2 = PreTokenizer(_GPT2_BYTES)
_LIKE_STARCODER = PreTokenizer(pre_tokenizers.Sequence([_DIGITS, _GPT2_BYTES]))
_LIKE_LLAMA3 = PreTokenizer(_by(_LLAMA3), whole_words=True, adds_bos=True)
_LIKE_QWEN2 = PreTokenizer(_by(_QWEN2), composed=True)
_PLAIN_LLAMA3 = PreTokenizer(_by(_LLAMA3))
# llama.cpp's choice for files without a name.
_DEFAULT = PreTokenizer(_by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {  # by `tokenizer.ggml.pre`
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mpt", "olmo", "jais", "exaone4"), _LIKE_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _LIKE_STARCODER),
    **dict.fromkeys(("exaone", "minerva-7b"), _LIKE_STARCODER),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LIKE_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _PLAIN_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _LIKE_QWEN2),
    "stablelm2": PreTokenizer(_by(_QWEN2)),
    "tekken": PreTokenizer(_by(_TEKKEN), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_by(_GPT4O))),
}
