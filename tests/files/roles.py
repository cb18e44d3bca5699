"""Tokens that begin and end texts: those of llama.cpp's library, whatever keys a file has or lacks.

The files are the vocabularies that llama.cpp tests itself with, and made ones in which a key is
absent, impossible or unusual. Each is also asked for the tokens of texts, with those that the file
adds. `EXCEPTIONS` names what is done otherwise on purpose.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer

from specops.models.convert import ExportError
from specops.models.convert.gguf.header import Metadata, read_header
from specops.models.convert.gguf.tokenizer import tokenizer_files
from specops.text.fill_in_forms import FORMS
from tests.files.packages import llama_cpp, llama_roles, llama_tokens
from tests.files.report import Row
from tests.models.convert.gguf.files import (
    tokens_of,
    write_and_close,
    write_pieces,
    write_tokenizer,
)
from tests.text import published_tokenizers as published

_TEXTS = ["a", "Hello world", "x <|im_end|> y", "\u0394<|fim_suffix|> zq", "  the\n"]
_SIZE = 600
_CONTROL = 3  # a type of tokens
_NONE = (1 << 32) - 1
Change = dict[str, Any]  # values of `tokenizer.ggml.…`; None takes a key away
# For a vocabulary of letters (gpt2) and for one of pieces (llama).
LETTERS: dict[str, Change] = {
    "as it is": {},
    "special ends": {"ends": ["<|im_end|>", "<|eot_id|>", "<|eom_id|>"]},
    "ordinary ends": {"ends": ["<|im_end|>", "<|endoftext|>x"], "kind": 1},
    "channels": {"ends": ["<|end|>", "<|return|>", "<|call|>"]},
    "calls without channels": {"ends": ["<|end|>", "<|call|>"]},
    "a word": {"ends": ["</s>", "<|tool_response>"]},
    "fill-in": {"ends": ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]},
    "named fill-in": {"fim_pad_token_id": 20, "fim_rep_token_id": 21, "fim_sep_token_id": 22},
    "named turns": {"eot_token_id": 30, "eom_token_id": 31},
    "bos is no token": {"bos_token_id": _NONE, "eos_token_id": 5, "special": [11]},
    "no bos, no eos": {"bos_token_id": None, "eos_token_id": None, "special": [11]},
    "glm4": {"pre": "glm4", "bos_token_id": None, "special": [11]},
    "llama-bpe": {"pre": "llama-bpe", "bos_token_id": 7},
    "chameleon": {"pre": "chameleon", "bos_token_id": 7},
    "a bos that is not added": {"pre": "llama-bpe", "add_bos_token": False},
    "an eos that is added": {"add_eos_token": True, "add_bos_token": True},
    "no types": {"token_type": None},
    "fill-in of ordinary type": {"ends": FORMS[0].marks, "kind": 1},
    "merges without tokens": {"merges": ["z q", "q qq"]},
}
PIECES: dict[str, Change] = {
    "as it is": {},
    "no ids": {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None},
    "ids are no tokens": {"bos_token_id": _NONE, "eos_token_id": 9999, "padding_token_id": _NONE},
    "no scores": {"scores": None},
    "no space first": {"add_space_prefix": False},
    "no bos": {"add_bos_token": False},
    "an eos that is added": {"add_eos_token": True},
    "scores as integers": {"scores": list(range(0, -_SIZE, -1))},
    "no types": {"token_type": None},
    "no types, no ids": {"token_type": None, "bos_token_id": None, "eos_token_id": None},
    "ordinary special tokens": {"types": {0: 1, 1: 1, 2: 1}},
    "ordinary special tokens, no ids": {
        "types": {0: 1, 1: 1, 2: 1},
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "bytes of ordinary type": {"types": dict.fromkeys(range(3, 259), 1)},
    "unused tokens": {"types": dict.fromkeys(range(300, 400), 5)},
    "undefined tokens": {"types": dict.fromkeys(range(300, 400), 0)},
}
_ADD = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    list: GGUFWriter.add_array,
    str: GGUFWriter.add_string,
}
_WORDS = ("</s>", "<eos>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<turn|>", "[PAD]", "<PAD>")
_MORE = "<|EOT|>"  # of DeepSeek-Coder
EXCEPTIONS = f"`{_MORE}` ends an answer; words such as `</s>` only if special"


def compare() -> list[Row]:
    """A row of the published vocabularies and one of the made ones."""
    with tempfile.TemporaryDirectory() as folder:
        made = [_same(file, texts=True) for file in _made(Path(folder))]
    files = sorted((llama_cpp() / "models").glob("ggml-vocab-*.gguf"))
    found = [_same(file) for file in files]
    refused = found.count(None)
    return [
        Row("published vocabularies", len(found), found.count(True), refused, EXCEPTIONS),
        Row("made vocabularies", len(made), made.count(True)),
    ]


def _same(file: Path, *, texts: bool = False) -> bool | None:
    """Whether tokens have the same roles and texts the same tokens; None for a refused file."""
    metadata = Metadata(read_header(file).metadata, file)
    try:
        made = tokenizer_files(metadata)
    except ExportError:
        return None
    settings = made.files["tokenizer_config.json"]
    tokenizer = Tokenizer.from_str(json.dumps(made.files["tokenizer.json"]))
    expected = llama_roles(file)
    vocabulary, types = metadata.listed("tokenizer.ggml.tokens", str), _types(metadata)
    ends = {
        token
        for token in expected["ends"]
        if token == expected["eos"] or vocabulary[token] not in _WORDS or types[token] == _CONTROL
    } | {token for token, text in enumerate(vocabulary) if text == _MORE}
    found = {
        "bos": -1 if made.bos is None else made.bos,
        "eos": -1 if (eos := settings.get("eos_token")) is None else tokenizer.token_to_id(eos),
        "adds_bos": settings["add_bos_token"],
        "adds_eos": settings["add_eos_token"],
        "ends": sorted(made.ends),
    }
    same = found == {**expected, "ends": sorted(ends)}
    if texts:
        tokens = [tokenizer.encode(text).ids for text in _TEXTS]
        same = same and tokens == llama_tokens(file, _TEXTS, special=True)
    if not same:
        print(f"{file.stem}: {found}, llama.cpp: {expected}")
    return same


def _types(metadata: Metadata) -> list[int]:
    key, tokens = "tokenizer.ggml.token_type", "tokenizer.ggml.tokens"
    if key not in metadata:
        return [1] * len(metadata.listed(tokens, str))
    return metadata.listed(key, int)


def _made(folder: Path) -> Iterator[Path]:
    letters = json.loads(published.gpt2(_SIZE).to_str())
    letters["added_tokens"] = []
    pieces = json.loads(published.llama(_SIZE).to_str())
    for name, change in LETTERS.items():
        yield _changed(folder / f"letters, {name}.gguf", letters, change, pieces=False)
    for name, change in PIECES.items():
        yield _changed(folder / f"pieces, {name}.gguf", pieces, change, pieces=True)


def _changed(file: Path, made: Any, change: Change, *, pieces: bool) -> Path:
    """A file without tensors, with other values of some keys."""
    writer = GGUFWriter(file, "llama")
    (write_pieces if pieces else write_tokenizer)(writer, made)
    values = writer.kv_data[0]
    tokens, types = tokens_of(made)
    ends, kind = change.get("ends", []), change.get("kind", _CONTROL)
    if not pieces:
        for index, text in enumerate(ends):
            tokens[-1 - index], types[-1 - index] = text, kind
        for token in change.get("special", ()):
            types[token] = _CONTROL
        values["tokenizer.ggml.tokens"].value = tokens
        values["tokenizer.ggml.token_type"].value = [int(one) for one in types]
    for token, other in change.get("types", {}).items():
        values["tokenizer.ggml.token_type"].value[token] = other
    for name, value in change.items():
        if name in ("ends", "kind", "special", "types"):
            continue
        values.pop(f"tokenizer.ggml.{name}", None)
        if value is not None:
            _ADD[type(value)](writer, f"tokenizer.ggml.{name}", value)
    write_and_close(writer)
    return file
