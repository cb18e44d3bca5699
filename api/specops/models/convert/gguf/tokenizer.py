"""The tokenizer of a GGUF as the files that other checkpoints have beside their weights.

There are two kinds: `gpt2`, merges of bytes that are spelled as letters, and `llama`,
SentencePiece's pieces with scores. Each token has a type. It says whether the token is matched in a
text before the text is cut into words, and whether the token is shown.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers

from specops.models.convert.gguf.header import Metadata
from specops.models.convert.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from specops.models.paths import tools_template
from specops.models.sentencepiece import CONTROL, UNKNOWN, bpe_tokenizer, match_first

_BYTE = 6  # a type of tokens; the other types are SentencePiece's
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_TEMPLATE, _TOOLS_TEMPLATE = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
# Control tokens that end a turn: some files name only one end token.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<|EOT|>", "<EOT>", "<|return|>", "<|call|>", "<end_of_utterance>"),
}
# Phi-3's special tokens remove the spaces after them, except these. A file does not say so.
_PHI3_PLAIN = {"<unk>", "<s>", "<|endoftext|>", "<|end|>", "<|placeholder1|>"}


class TokenizerFiles(NamedTuple):
    """Files by name, JSON or text; the number of tokens; ids that begin and end a text."""

    files: dict[str, Any]
    size: int
    bos: int | None
    ends: list[int]


class _Vocabulary(NamedTuple):
    """Tokens and their types, in the order of their ids."""

    tokens: list[str]
    types: list[int]


def tokenizer_files(metadata: Metadata) -> TokenizerFiles:
    """tokenizer.json, tokenizer_config.json and the chat template.

    Raises:
        ExportError: the kind of tokenizer or pre-tokenizer is unknown, or an entry is malformed.
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
    vocabulary = _Vocabulary(tokens, types)
    bos = _token(metadata, "bos", tokens)
    adds_bos = True
    if kind == "gpt2":
        words = _pre_tokenizer(metadata)
        adds_bos = words.adds_bos
        made = json.loads(_byte_level(metadata, vocabulary, words).to_str())
    else:
        made = json.loads(_sentencepiece(metadata, vocabulary).to_str())
        if metadata.architecture == "phi3":
            for token in made["added_tokens"]:
                token["rstrip"] = token["content"] not in _PHI3_PLAIN
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)
    made["post_processor"] = None
    if bos is not None and adds_bos:
        made["post_processor"] = _begins_with(tokens[bos], bos)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, role in roles.items():
        index = _token(metadata, role, tokens)
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    files = {"tokenizer.json": made, "tokenizer_config.json": settings}
    if _TEMPLATE in metadata:
        files["chat_template.jinja"] = metadata.text(_TEMPLATE)
    if _TOOLS_TEMPLATE in metadata:
        settings |= tools_template(metadata.text(_TOOLS_TEMPLATE))
    return TokenizerFiles(files, len(tokens), bos, _ends(metadata, vocabulary))


def _token(metadata: Metadata, role: str, tokens: list[str]) -> int | None:
    """The id of the token with a role; None if there is none."""
    key = f"tokenizer.ggml.{role}_token_id"
    found = metadata.optional_integer(key)
    if found is not None and found >= len(tokens):
        raise metadata.error(key, f"is {found}, and there are {len(tokens)} tokens")
    return found


def _ends(metadata: Metadata, vocabulary: _Vocabulary) -> list[int]:
    """All end tokens: those that the file names, and those that end a turn."""
    named = [_token(metadata, role, vocabulary.tokens) for role in ("eos", "eot", "eom")]
    by_text = [
        index
        for index, (text, kind) in enumerate(zip(*vocabulary, strict=True))
        if kind == CONTROL and text in _ENDS
    ]
    return list(dict.fromkeys([token for token in named if token is not None] + by_text))


def _begins_with(text: str, token: int) -> dict[str, Any]:
    """The post-processor that puts a token in front of a text."""

    def sequence(name: str, number: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": text, "type_id": number}},
            {"Sequence": {"id": name, "type_id": number}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(
            "tokenizer.ggml.pre",
            f"is {name}, a way to cut words that is not known; known are "
            + ", ".join(PRE_TOKENIZERS),
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary, words: PreTokenizer) -> Tokenizer:
    vocab = {text: index for index, text in enumerate(vocabulary.tokens)}
    merges = []
    for text in metadata.listed(_MERGES, str):
        one, _, other = text.partition(" ")
        if not (one in vocab and other in vocab and one + other in vocab):
            raise metadata.error(_MERGES, f"has {text[:80]!r}, which are or make no tokens")
        merges.append((one, other))
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=words.whole_words))
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.part
    tokenizer.decoder = decoders.ByteLevel()
    match_first(tokenizer, zip(*vocabulary, strict=True))
    return tokenizer


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> Tokenizer:
    tokens, types = vocabulary
    scores = metadata.listed(_SCORES, float)
    if len(scores) != len(tokens):
        raise metadata.error(_SCORES, f"has {len(scores)} for {len(tokens)} tokens")
    unknown = _token(metadata, "unknown", tokens)
    if unknown is None:
        unknown = next((index for index, kind in enumerate(types) if kind == UNKNOWN), 0)
    return bpe_tokenizer(
        list(zip(tokens, scores, types, strict=True)),
        unknown=unknown,
        byte_fallback=_BYTE in types,
        space_first=metadata.flag("tokenizer.ggml.add_space_prefix", True),
    )
