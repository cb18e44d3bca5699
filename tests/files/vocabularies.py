"""The vocabularies that llama.cpp tests itself with, against its library.

The documents are those of llama.cpp's tests, whose expected tokens come from transformers, and
random texts of all scripts, whose expected tokens come from the library. Vocabularies without
documents of their own have all documents of the others. The library leaves normalization to NFC,
which the published tokenizers of Qwen have, to its users: there it gets normalized texts.
"""

import json
import unicodedata
from pathlib import Path

from tokenizers import Tokenizer

from specops.models.convert import ExportError
from specops.models.convert.gguf.header import Metadata, read_header
from specops.models.convert.gguf.tokenizer import tokenizer_files
from tests.files.packages import llama_cpp, llama_tokens
from tests.files.report import Row
from tests.text.test_tokenizer_kinds import random_texts

_MARK = "\n__ggml_vocab_test__\n"
_PREFIX = "ggml-vocab-"


def tokenizer_of(file: Path) -> Tokenizer:
    """The tokenizer that the converter makes of a GGUF; raises ExportError if it makes none."""
    made = tokenizer_files(Metadata(read_header(file).metadata, file))
    return Tokenizer.from_str(json.dumps(made.files["tokenizer.json"]))


def compare() -> list[Row]:
    """One row for each vocabulary."""
    texts = random_texts(5)
    return [_compared(file, texts) for file in sorted(_folder().glob(f"{_PREFIX}*.gguf"))]


def _compared(file: Path, random: list[str]) -> Row:
    name = file.stem.removeprefix(_PREFIX)
    documents = _documents(file.with_name(f"{file.name}.inp"))
    published = _tokens(file.with_name(f"{file.name}.out"))
    texts = [*(documents or all_documents()), *random]
    try:
        tokenizer = tokenizer_of(file)
    except ExportError as error:
        return Row(name, len(texts), 0, len(texts), str(error).partition(": ")[2].partition(";")[0])
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    composed = tokenizer.normalizer is not None and "NFC" in str(tokenizer.normalizer)
    normal = [unicodedata.normalize("NFC", text) for text in texts] if composed else texts
    expected = llama_tokens(file, normal)
    for index, tokens in enumerate(published):
        if normal[index] == texts[index]:
            expected[index] = tokens
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    return Row(name, len(texts), equal, 0, "library: no NFC" if composed else "")


def _folder() -> Path:
    return llama_cpp() / "models"


def all_documents() -> list[str]:
    """The documents of all vocabularies, each once."""
    files = sorted(_folder().glob(f"{_PREFIX}*.gguf.inp"))
    return list(dict.fromkeys(text for file in files for text in _documents(file)))


def _documents(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split(_MARK) if file.is_file() else []


def _tokens(file: Path) -> list[list[int]]:
    """The expected tokens of the documents, a line each."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [list(map(int, line.split())) for line in lines]
