"""The tokenizer that a GGUF holds, as the files that checkpoints have beside their weights.

There are two kinds: GPT-2's merges of bytes spelled as letters (`gpt2`) and SentencePiece's pieces
with scores (`llama`). Tokens have a type, which says whether they are matched in a text before it
is cut into words, and whether they are shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from specops.models.convert.gguf.metadata import Metadata
from specops.models.convert.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from specops.models.sentencepiece import CONTROL, UNKNOWN, bpe_tokenizer, match_first

_BYTE = 6  # a type of tokens, as the others are SentencePiece's
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_TEMPLATE = "tokenizer.chat_template"
# Control tokens that end a turn, in files that name one end only.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<|EOT|>", "<EOT>", "<|return|>", "<|call|>", "<end_of_utterance>"),
}
# Phi-3's tokens swallow the spaces after them, which a file does not say; but for these.
_PHI3_PLAIN = {"<unk>", "<s>", "<|endoftext|>", "<|end|>", "<|placeholder1|>"}


@dataclass(frozen=True)
class TokenizerFiles:
    """Files by name, JSON or text; how many tokens there are; ids that begin and end a text."""

    files: dict[str, Any]
    count: int
    bos: int | None
    ends: list[int]


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens in the order of their ids, with their types; bos only where texts begin with it."""

    tokens: list[str]
    types: list[int]
    first: int | None


def tokenizer_files(metadata: Metadata) -> TokenizerFiles:
    """tokenizer.json and what goes with it.

    Raises:
        ExportError: the kind of tokenizer or of words is not known, or an entry makes no sense.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise metadata.error(
            "tokenizer.ggml.model", f"is {kind}; gpt2 (bytes) and llama (SentencePiece) are known"
        )
    tokens = metadata.listed(_TOKENS, str)
    if not tokens or len(set(tokens)) != len(tokens):
        raise metadata.error(_TOKENS, "is empty or has a token twice")
    types = metadata.listed(_TYPES, int) if _TYPES in metadata else [1] * len(tokens)
    if len(types) != len(tokens):
        raise metadata.error(_TYPES, f"has {len(types)} entries for {len(tokens)} tokens")
    bos = _token(metadata, "bos", tokens)
    words = _words(metadata) if kind == "gpt2" else None
    adds_bos = metadata.flag(
        "tokenizer.ggml.add_bos_token", words.adds_bos if words is not None else True
    )
    vocabulary = _Vocabulary(tokens, types, bos if adds_bos else None)
    made: dict[str, Any]
    if words is not None:
        made = json.loads(_letters(metadata, vocabulary, words).to_str())
    else:
        made = json.loads(_pieces(metadata, vocabulary).to_str())
        if metadata.architecture == "phi3":
            for token in made["added_tokens"]:
                token["rstrip"] = token["content"] not in _PHI3_PLAIN
    files: dict[str, Any] = {
        "tokenizer.json": made | {"post_processor": _begins_with(vocabulary)},
        "tokenizer_config.json": _settings(metadata, tokens, adds_bos=adds_bos),
    }
    if _TEMPLATE in metadata:
        files["chat_template.jinja"] = metadata.text(_TEMPLATE)
    return TokenizerFiles(files, len(tokens), bos, _ends(metadata, vocabulary))


def _token(metadata: Metadata, role: str, tokens: list[str]) -> int | None:
    """The id of the token of a role; None where there is none."""
    key = f"tokenizer.ggml.{role}_token_id"
    found = metadata.optional_integer(key)
    if found is not None and found >= len(tokens):
        raise metadata.error(key, f"is {found}, and there are {len(tokens)} tokens")
    return found


def _ends(metadata: Metadata, vocabulary: _Vocabulary) -> list[int]:
    """Every token after which nothing follows: those that the file names, and the ends of turns."""
    named = [_token(metadata, role, vocabulary.tokens) for role in ("eos", "eot", "eom")]
    by_text = [
        index
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == CONTROL and text in _ENDS
    ]
    return list(dict.fromkeys([token for token in named if token is not None] + by_text))


def _settings(metadata: Metadata, tokens: list[str], *, adds_bos: bool) -> dict[str, Any]:
    """tokenizer_config.json: what templates and transformers read."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for short, role in roles.items():
        index = _token(metadata, role, tokens)
        if index is not None:
            settings[f"{short}_token"] = tokens[index]
    return settings


def _begins_with(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """The post-processor that puts bos before a text."""
    if vocabulary.first is None:
        return None
    begin = vocabulary.tokens[vocabulary.first]

    def sequence(name: str, number: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": begin, "type_id": number}},
            {"Sequence": {"id": name, "type_id": number}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {begin: {"id": begin, "ids": [vocabulary.first], "tokens": [begin]}},
    }


# -- bytes as letters ------------------------------------------------------------------------------


def _words(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(
            "tokenizer.ggml.pre",
            f"is {name}, a way to cut words that is not known; known are "
            + ", ".join(PRE_TOKENIZERS),
        )
    return PRE_TOKENIZERS[name]


def _letters(metadata: Metadata, vocabulary: _Vocabulary, words: PreTokenizer) -> Tokenizer:
    vocab = {text: index for index, text in enumerate(vocabulary.tokens)}
    merges = _merges(metadata, vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=words.whole_words))
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.part
    tokenizer.decoder = decoders.ByteLevel()
    match_first(tokenizer, zip(vocabulary.tokens, vocabulary.types, strict=True))
    return tokenizer


def _merges(metadata: Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order in which they are merged: every part, and what they make, is a token."""
    found = []
    for text in metadata.listed(_MERGES, str):
        one, _, other = text.partition(" ")
        if not (one in vocab and other in vocab and one + other in vocab):
            raise metadata.error(_MERGES, f"has {text[:80]!r}, which are or make no tokens")
        found.append((one, other))
    return found


# -- SentencePiece's pieces ------------------------------------------------------------------------


def _pieces(metadata: Metadata, vocabulary: _Vocabulary) -> Tokenizer:
    scores = metadata.listed(_SCORES, float)
    if len(scores) != len(vocabulary.tokens):
        raise metadata.error(_SCORES, f"has {len(scores)} for {len(vocabulary.tokens)} tokens")
    unknown = _token(metadata, "unknown", vocabulary.tokens)
    if unknown is None:
        unknown = next((index for index, kind in enumerate(vocabulary.types) if kind == UNKNOWN), 0)
    return bpe_tokenizer(
        list(zip(vocabulary.tokens, scores, vocabulary.types, strict=True)),
        unknown=unknown,
        byte_fallback=_BYTE in vocabulary.types,
        space_first=metadata.flag("tokenizer.ggml.add_space_prefix", True),
    )
