"""The pre-tokenizers of byte-level tokenizers, which cut a text into words: `tokenizer.ggml.pre`.

A GGUF holds only the name. llama.cpp has the expressions in its source, adapted to its own engine;
here they are as in the published tokenizer.json. An unknown name is refused: a wrong pre-tokenizer
gives other tokens, which a model understands badly, without any error.
"""

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
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + "".join(
    rf"|\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
) + r"|\s"  # fmt: skip
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
_NUMBERS = r"\p{N}{1,3}"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3_WORD = rf"{_ASCII_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPARK = rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_LLM = (
    *(r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_SIGNS}]+", r"\s+$"),
    *(_HAN, r"\p{N}+"),
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _CASED.replace("{end}", _CONTRACTIONS + "?") + r"|\p{N}" + _REST_OF_CASED,
)
_CHAMELEON = (
    *(r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )"),
    *(r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
)
_THREES_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)
_AFMOE = (_THREES_FROM_THE_END, f"[{_ASIAN}]+", _DEEPSEEK3)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    r"[\p{Han}]+|"
    + _CASED.replace("{end}", _CONTRACTIONS + "?")
    .replace(_UPPER, _UPPER[:-1] + _NO_HAN)
    .replace(_LOWER, _LOWER[:-1] + _NO_HAN)
    + r"|\p{N}{1,3}"
    + _REST
)
_LINES = r"[^\n]+|[\n]+"


class PreTokenizer(NamedTuple):
    """A pre-tokenizer and the other settings that its name implies.

    `whole_words`: a word that is in the vocabulary is one token, whatever the merges say.
    `composed`: the text is normalized to NFC first. `adds_bos`: a text begins with bos, unless the
    file says otherwise. `letters`: bytes are spelled as letters; if not, tokens are spelled as
    SentencePiece does, with its mark for a space, and merges join its pieces.
    """

    part: pre_tokenizers.PreTokenizer
    whole_words: bool = False
    composed: bool = False
    adds_bos: bool = False
    letters: bool = True


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
_LIKE_STABLELM2 = PreTokenizer(_by(_QWEN2))
_LIKE_GPT4O = PreTokenizer(_by(_GPT4O))
_LIKE_DEEPSEEK3 = PreTokenizer(_by(_NUMBERS, _HAN_KANA, _DEEPSEEK3))
_LIKE_BLOOM = PreTokenizer(_by(_BLOOM))
_LIKE_BAILING = PreTokenizer(_by(_BAILING))
_PIECES = PreTokenizer(pre_tokenizers.Split(Regex(_LINES), "isolated"), letters=False)
_LIKE_GEMMA4 = _PIECES._replace(adds_bos=True)
# llama.cpp's choice for files without a name.
_DEFAULT = PreTokenizer(_by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_JINA = ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code")
PRE_TOKENIZERS: dict[str, PreTokenizer] = {  # by `tokenizer.ggml.pre`
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mpt", "olmo", "jais", "exaone4"), _LIKE_GPT2),
    **dict.fromkeys((*_JINA, "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"), _LIKE_GPT2),
    **dict.fromkeys(("trillion", "granite-docling"), _LIKE_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _LIKE_STARCODER),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _LIKE_STARCODER),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LIKE_LLAMA3),
    **dict.fromkeys(("falcon-h1", "midm-2.0", "lfm2", "jina-v5-nano"), _LIKE_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _PLAIN_LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), _PLAIN_LLAMA3._replace(whole_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"), _LIKE_QWEN2),
    "qwen35": PreTokenizer(_by(_QWEN35), composed=True),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), _LIKE_STABLELM2),
    "tekken": PreTokenizer(_by(_TEKKEN), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _LIKE_GPT4O),
    "granite-embed-multi-97m": _LIKE_GPT4O._replace(whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(_by(_THREES_FROM_THE_END, _GPT4O))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _LIKE_DEEPSEEK3),
    "deepseek-llm": PreTokenizer(_by(*_DEEPSEEK_LLM)),
    "deepseek-coder": PreTokenizer(_by(*_DEEPSEEK_CODER)),
    "spark2_5": PreTokenizer(_by(_NUMBERS, _HAN_KANA, _SPARK, r"\p{N}")),
    "youtu": PreTokenizer(_by(*_YOUTU), whole_words=True),
    "falcon": PreTokenizer(_by(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "jais-2": PreTokenizer(_by(_JAIS2)),
    "minicpm5": PreTokenizer(_by(_NUMBERS, _MINICPM5), whole_words=True),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _LIKE_BLOOM),
    "viking": PreTokenizer(_by(_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer(_by(*_CHAMELEON), adds_bos=True),
    "superbpe": PreTokenizer(_by(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _LIKE_BAILING),
    "seed-coder": PreTokenizer(_by(_SEED_CODER)),
    "exaone-moe": PreTokenizer(_by(_EXAONE_MOE)),
    "ufakzeka": PreTokenizer(_by(_QWEN2.removeprefix(f"{_CONTRACTIONS}|"))),
    "afmoe": PreTokenizer(_by(*_AFMOE)),
    "laguna": PreTokenizer(_by(_LINES, _QWEN2)),
    "kimi-k2": PreTokenizer(_by(_KIMI)),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _LIKE_GEMMA4),
    "sarvam-moe": _PIECES,
}
