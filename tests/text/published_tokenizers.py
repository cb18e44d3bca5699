"""Tokenizers with the configuration of published ones, trained during the tests.

Normalizer, pre-tokenizer, options of the model, decoder, post-processor and added tokens are those
of the published tokenizer.json. The merges come from a few lines of text. Further entries fill the
vocabulary up to the published size, so that every id has a text.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

MARK = "\u2581"  # SentencePiece's sign for a space
END_OF_TEXT = "<|endoftext|>"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_TEXT = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog, isn't it? 1234567890",
    "Größe, façade, naïve, Ærø. Съешь ещё этих мягких французских булок.",
    "日本語の文章です。你好世界。 안녕하세요",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया 👩‍👩‍👧‍👦 🙂🏽",
]  # fmt: skip
_MERGES = 200
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PHI3_ADDED = (
    *("<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|placeholder2|>", "<|placeholder3|>"),
    *("<|placeholder4|>", "<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>"),
    "<|user|>",
)
_SPELLED_SPACES = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])


# -- SentencePiece's BPE with byte fallback --------------------------------------------------------


@cache
def llama(size: int = 32_000) -> Tokenizer:
    """Llama 1 and 2, TinyLlama, JackFram: every text begins with the mark for a space."""
    tokenizer = _sentencepiece(size)
    tokenizer.normalizer = _SPELLED_SPACES
    tokenizer.post_processor = _begins_with("<s>", 1)
    return tokenizer


@cache
def llama_not_legacy(size: int = 32_000) -> Tokenizer:
    """The same with `legacy: false`: only the first word of a text gets the mark."""
    tokenizer = _sentencepiece(size)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = _begins_with("<s>", 1)
    return tokenizer


@cache
def phi3(size: int = 32_000) -> Tokenizer:
    """Phi-3: Llama's entries, then tokens that remove the space after them; no `<s>`."""
    tokenizer = _sentencepiece(size)
    tokenizer.normalizer = _SPELLED_SPACES
    tokenizer.add_tokens([AddedToken("</s>", rstrip=True, normalized=False, special=False)])
    for content in _PHI3_ADDED:
        rstrip = content not in (END_OF_TEXT, "<|end|>", "<|placeholder1|>")
        tokenizer.add_special_tokens([AddedToken(content, rstrip=rstrip, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    # Read as from a file: the library remembers that `</s>` was a special token before.
    return Tokenizer.from_str(tokenizer.to_str())


@cache
def gemma3(size: int = 32_000) -> Tokenizer:
    """Gemma 3: no space before a text; runs of spaces and of line ends are added tokens."""
    made = json.loads(_sentencepiece(size).to_str())
    vocab = made["model"]["vocab"]
    runs = [sign * count for sign in (MARK, "\n") for count in (1, 2, 4)]
    last = sorted(vocab, key=vocab.__getitem__)[-len(runs) :]  # give their places to the runs
    for run, word in zip(runs, last, strict=True):
        if run not in vocab:
            vocab[run] = vocab.pop(word)
    made["model"]["merges"][:0] = [[run, run] for run in runs if run * 2 in vocab]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs if len(run) > 1])
    tokenizer.post_processor = _begins_with("<s>", 1)
    return tokenizer


def _sentencepiece(size: int) -> Tokenizer:
    entries, merges = _trained(pre_tokenizers.Metaspace(split=True), alphabet=[])
    vocab = _numbered(["<unk>", "<s>", "</s>", *_BYTES, *entries], size, MARK)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(content, normalized=False) for content in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


# -- byte-level BPE --------------------------------------------------------------------------------


@cache
def gpt2(size: int = 50_257) -> Tokenizer:
    """GPT-2 and its distillation: `<|endoftext|>` is the last entry."""
    tokenizer = _byte_level([], size - 1)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=True)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@cache
def smollm2(size: int = 49_152) -> Tokenizer:
    """SmolLM2: digits one by one, special tokens first."""
    special = [END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]
    tokenizer = _byte_level(special, size)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(content, normalized=False) for content in special])
    return tokenizer


@cache
def starcoder2(size: int = 49_152) -> Tokenizer:
    """StarCoder2 and Granite 3: special tokens first, those of gaps among them."""
    special = [END_OF_TEXT, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    special += ["<repo_name>", "<file_sep>"]
    tokenizer = _byte_level(special, size)
    tokenizer.add_special_tokens([AddedToken(content, normalized=False) for content in special])
    return tokenizer


@cache
def qwen2_coder() -> Tokenizer:
    """Qwen2.5-Coder: Qwen2's, with the tokens of gaps and files behind its others."""
    tokenizer = Tokenizer.from_str(qwen2().to_str())
    tools = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([f"<|unnamed_{number}|>" for number in range(11)])
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in tools])
    gaps = [*(f"fim_{part}" for part in ("prefix", "middle", "suffix", "pad"))]
    marks = [f"<|{name}|>" for name in (*gaps, "repo_name", "file_sep")]
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in marks])
    return tokenizer


@cache
def qwen2(size: int = 151_643) -> Tokenizer:
    """Qwen2 and 2.5: composed characters, words by an expression of its own."""
    tokenizer = _byte_level([], size)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(content, normalized=False) for content in special])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@cache
def opt(size: int = 50_265) -> Tokenizer:
    """OPT as transformers reads `write_opt_files`: `</s>` begins a text."""
    tokenizer = _byte_level(["<s>", "<pad>", "</s>", "<unk>"], size)
    tokenizer.add_special_tokens(
        [AddedToken(content, normalized=True) for content in ("<pad>", "</s>")]
    )
    tokenizer.post_processor = _begins_with("</s>", 2)
    return tokenizer


def write_opt_files(folder: Path, size: int = 50_265) -> None:
    """Write the tokenizer as facebook/opt-125m has it: no tokenizer.json, vocabulary and merges."""
    model = json.loads(opt(size).to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    end, pad = {"content": "</s>", **options}, {"content": "<pad>", **options}
    special = {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": pad}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    settings: dict[str, Any] = {
        name: {**token, "__type": "AddedToken"} for name, token in special.items()
    }
    settings |= {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "errors": "replace"}
    settings |= {"add_prefix_space": False, "special_tokens_map_file": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_level(special: list[str], size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    entries, merges = _trained(words, alphabet)
    tokenizer = Tokenizer(models.BPE(_numbered([*special, *entries], size, "\u0120"), merges))
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# -- helpers ---------------------------------------------------------------------------------------


def written(make: Callable[[], Tokenizer]) -> Callable[[Path, int], None]:
    """A writer of tokenizer.json, as `tests.checkpoints.write_checkpoint` takes one."""

    def write(folder: Path, vocab: int) -> None:
        tokenizer = make()
        assert tokenizer.get_vocab_size() <= vocab
        tokenizer.save(str(folder / "tokenizer.json"))

    return write


def _trained(words: Any, alphabet: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return entries and merges, trained on the text cut into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGES + 512, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    entries = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return entries, [tuple(pair) for pair in model["merges"]]


def _numbered(entries: list[str], size: int, space: str) -> dict[str, int]:
    """Number the entries, and words that fill the vocabulary up to `size`."""
    assert len(entries) <= size
    return {
        entry: index for index, entry in enumerate([*entries, *_words(size - len(entries), space)])
    }


def _words(count: int, space: str) -> Iterator[str]:
    return (f"{space}w{number}" for number in range(count))


def _begins_with(token: str, token_id: int) -> Any:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])
