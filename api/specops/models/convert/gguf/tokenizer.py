"""Writes a GGUF's tokenizer as the files that other checkpoints have with their weights.

There are three kinds: `gpt2`, merges of bytes that are spelled as letters, `llama`, SentencePiece's
pieces with scores, and `gemma4`, such pieces with merges. Each token has a type. It says whether
the token is matched in a text before the text is cut into words, and whether the token is shown.

Absent and impossible values get llama.cpp's defaults, which docs/gguf.md lists.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers

from specops.models.convert.gguf.header import Metadata
from specops.models.convert.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from specops.models.sentencepiece import (
    CONTROL,
    MARK,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    bpe_tokenizer,
    described,
    match_first,
    pieces_decoder,
)
from specops.text.files import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TOOL_USE, named_template
from specops.text.fill_in_forms import FORMS

_NORMAL = 1  # a type of tokens; the other types are SentencePiece's
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_PRE = "tokenizer.ggml.pre"
_BOS = "tokenizer.ggml.bos_token_id"
_UNKNOWN = "tokenizer.ggml.unknown_token_id"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_TEMPLATE, _TOOLS_TEMPLATE = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
_PIECES_WITH_MERGES = "gemma4"  # a kind, and the name of its pre-tokenizer
_KINDS = ("gpt2", "llama", _PIECES_WITH_MERGES)
_FALCONS = 11
# Tokens of special roles in files that do not name them. Falcon's only if it is a special token.
_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": _FALCONS, "eos": _FALCONS},
    _PIECES_WITH_MERGES: dict[str, int](),
}
_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")  # pre-tokenizers whose files have no default for it
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Tokens that end an answer whatever their type in the file: some files name only one end token.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|EOT|>", "<EOT>"),
    *("<end_of_turn>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>"),
    *("<reponame>", "<|file_sep|>"),
}
# These may also be ordinary words: they end an answer only if the file calls them special.
_CONTROL_ENDS = {"</s>", "<eos>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<turn|>", "[PAD]", "<PAD>"}
# Tokens of a gap are matched in texts whatever their type, so that clients can write them.
_FILL_IN = {mark for form in FORMS if form.gap for mark in form.marks}
# Where an answer has channels, <|end|> ends one of them, and the next follows.
_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
_CHANNEL_END = "<|end|>"
_PLAIN_END = ({"<|tool_response>"}, {"<|plamo:eos|>"})  # with these </s> is a word like others
# Phi-3's special tokens remove the spaces after them, except these. A file does not say so.
_PHI3_PLAIN = {"<unk>", "<s>", "<|endoftext|>", "<|end|>", "<|placeholder1|>"}


class TokenizerFiles(NamedTuple):
    """What makes tokenizer.json, and the other files; number of tokens; ids that end a text.

    Merging pieces takes seconds in large vocabularies, so nothing does it before it is needed.
    """

    make: Callable[[], dict[str, Any]]
    others: dict[str, Any]
    size: int
    bos: int | None
    ends: list[int]

    @property
    def files(self) -> dict[str, Any]:
        """All files by name, JSON or text."""
        return {TOKENIZER: self.make(), **self.others}


class _Vocabulary(NamedTuple):
    """Tokens and their types, in the order of their ids."""

    tokens: list[str]
    types: list[int]


def tokenizer_files(metadata: Metadata) -> TokenizerFiles:
    """tokenizer.json, tokenizer_config.json and the chat template.

    Raises:
        ExportError: the kind of tokenizer or pre-tokenizer is unknown, or an entry is malformed.
    """
    kind = _kind(metadata)
    vocabulary = _vocabulary(metadata)
    tokens = vocabulary.tokens
    pre = _PIECES_WITH_MERGES if kind == _PIECES_WITH_MERGES else metadata.text(_PRE, "default")
    bos = (
        None
        if pre in _WITHOUT_BOS and _BOS not in metadata
        else _token(metadata, "bos", vocabulary)
    )
    words = None if kind == "llama" else _pre_tokenizer(metadata, pre)
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", words is None or words.adds_bos)
    adds_bos = adds_bos or pre == _PIECES_WITH_MERGES
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    eos = _token(metadata, "eos", vocabulary)
    around = _surrounded_by(tokens, bos if adds_bos else None, eos if adds_eos else None)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
    }
    named = {"bos": bos, "eos": eos}
    named |= {role: _token(metadata, role, vocabulary) for role in ("unknown", "padding")}
    for name, role in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (index := named[role]) is not None:
            settings[f"{name}_token"] = tokens[index]
    others: dict[str, Any] = {TOKENIZER_CONFIG: settings}
    if _TEMPLATE in metadata:
        others[TEMPLATE] = metadata.text(_TEMPLATE)
    if _TOOLS_TEMPLATE in metadata:
        settings["chat_template"] = [named_template(TOOL_USE, metadata.text(_TOOLS_TEMPLATE))]
    ends = [_token(metadata, role, vocabulary) for role in _ENDING_ROLES]
    ends += _ends_by_text(vocabulary)
    known = dict.fromkeys(token for token in ends if token is not None)

    if words is None:
        build = _sentencepiece(metadata, vocabulary)
    else:
        listed = metadata.listed(_MERGES, str)
        build = partial(_with_merges, metadata, vocabulary, words, listed)

    def make() -> dict[str, Any]:
        made = build() | {"post_processor": around}
        if words is None and metadata.architecture == "phi3":
            for token in made["added_tokens"]:
                token["rstrip"] = token["content"] not in _PHI3_PLAIN
        return made

    return TokenizerFiles(make, others, len(tokens), bos, list(known))


def _kind(metadata: Metadata) -> str:
    """The kind of tokenizer; Ollama's files of Gemma 4 say `llama`, and have merges."""
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise metadata.error(
            "tokenizer.ggml.model",
            f"is {kind}; gpt2 (bytes), llama (SentencePiece) and gemma4 are supported",
        )
    merged = _MERGES in metadata and metadata.text(_PRE, "") == _PIECES_WITH_MERGES
    return _PIECES_WITH_MERGES if kind == "llama" and merged else kind


def _vocabulary(metadata: Metadata) -> _Vocabulary:
    """Tokens and types; a token without a unique text gets one."""
    tokens = metadata.listed(_TOKENS, str)
    known = set[str]()
    for index, text in enumerate(tokens):
        if not text or ("\ufffd" in text and text in known):  # one that is not UTF-8
            tokens[index] = f"[EMPTY_{index}]{text}"
        known.add(text)
    if not tokens or len(set(tokens)) != len(tokens):
        raise metadata.error(_TOKENS, "is empty or has a token twice")
    types = metadata.listed(_TYPES, int) if _TYPES in metadata else [1] * len(tokens)
    if len(types) < len(tokens):
        raise metadata.error(_TYPES, f"has {len(types)} entries for {len(tokens)} tokens")
    vocabulary = _Vocabulary(tokens, types[: len(tokens)])
    eos = _token(metadata, "eos", vocabulary)
    if eos is not None and vocabulary.types[eos] == _NORMAL and tokens[eos] in _CONTROL_ENDS:
        vocabulary.types[eos] = CONTROL
    for index in _ends_by_text(vocabulary):
        vocabulary.types[index] = CONTROL  # matched as a whole, and never shown
    for index, text in enumerate(tokens):
        if text in _FILL_IN:
            vocabulary.types[index] = CONTROL
    if _CHANNEL_END in tokens and vocabulary.types[tokens.index(_CHANNEL_END)] != CONTROL:
        vocabulary.types[tokens.index(_CHANNEL_END)] = USER_DEFINED
    return vocabulary


def _token(metadata: Metadata, role: str, vocabulary: _Vocabulary) -> int | None:
    """The id of the token with a role; None if there is none."""
    key, size = f"tokenizer.ggml.{role}_token_id", len(vocabulary.tokens)
    default = _DEFAULTS[_kind(metadata)].get(role)
    if default is not None and (
        default >= size or (default == _FALCONS and vocabulary.types[default] == _NORMAL)
    ):
        default = None
    found = metadata.raw(key) if key in metadata else None
    if found is None:
        return default
    if type(found) is not int:
        raise metadata.error(key, f"must be an integer, is {found!r}")
    if 0 <= found < size:
        return found
    instead = "it is ignored" if default is None else f"{default} is used instead"
    metadata.warn(key, f"is {found}, but the vocabulary has {size} tokens: {instead}")
    return default


def _ends_by_text(vocabulary: _Vocabulary) -> list[int]:
    """The tokens that end an answer by their text."""
    texts = set(vocabulary.tokens)
    ends = _ENDS | _CONTROL_ENDS
    if any(channels <= texts for channels in _CHANNELS):
        ends -= {_CHANNEL_END}
    if any(signs <= texts for signs in _PLAIN_END):
        ends -= {"</s>"}
    return [
        index
        for index, (text, kind) in enumerate(zip(*vocabulary, strict=True))
        if text in ends and (kind == CONTROL or text in _ENDS)
    ]


def _surrounded_by(tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """The post-processor that puts tokens before and after a text."""
    around = [index for index in (bos, eos) if index is not None]
    if not around:
        return None

    def special(index: int | None, number: int) -> list[dict[str, Any]]:
        return [] if index is None else [{"SpecialToken": {"id": tokens[index], "type_id": number}}]

    def sequence(name: str, number: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": number}}
        return [*special(bos, number), text, *special(eos, number)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in around
        },
    }


def _pre_tokenizer(metadata: Metadata, name: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise metadata.error(
            _PRE,
            f"is {name}, which is not supported; supported are " + ", ".join(PRE_TOKENIZERS),
        )
    return PRE_TOKENIZERS[name]


def _with_merges(
    metadata: Metadata, vocabulary: _Vocabulary, words: PreTokenizer, listed: list[str]
) -> dict[str, Any]:
    vocab = {text: index for index, text in enumerate(vocabulary.tokens)}
    merges = []
    for text in listed:
        at = text.find(" ", 1)  # a part may be a space
        one, other = text[:at], text[at + 1 :]
        if one in vocab and other in vocab and one + other in vocab:
            merges.append((one, other))
    if skipped := len(listed) - len(merges):
        metadata.warn(_MERGES, f"has {skipped} merges whose parts or results are no tokens")
    tokenizer = Tokenizer(models.BPE())
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.part
    tokenizer.decoder = decoders.ByteLevel()
    if not words.letters:
        tokenizer.normalizer = normalizers.Replace(" ", MARK)
        tokenizer.decoder = pieces_decoder()
    match_first(tokenizer, zip(*vocabulary, strict=True))
    options = {"ignore_merges": words.whole_words, "byte_fallback": not words.letters}
    return described(tokenizer, vocab, merges, **options)


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> Callable[[], dict[str, Any]]:
    tokens, types = vocabulary
    scores = metadata.listed(_SCORES, float) if _SCORES in metadata else [0.0] * len(tokens)
    if len(scores) < len(tokens):
        raise metadata.error(_SCORES, f"has {len(scores)} for {len(tokens)} tokens")
    unknown = next((index for index, kind in enumerate(types) if kind == UNKNOWN), 0)
    if _UNKNOWN in metadata:
        unknown = _token(metadata, "unknown", vocabulary) or 0
    kinds = [_NORMAL if kind == UNUSED else kind for kind in types]  # as llama.cpp takes them
    return partial(
        bpe_tokenizer,
        list(zip(tokens, scores, kinds, strict=False)),
        unknown=unknown,
        byte_fallback=not _BYTES.isdisjoint(tokens),  # whatever their types
        space_first=metadata.flag("tokenizer.ggml.add_space_prefix", True),
    )
