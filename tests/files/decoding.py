"""Published tokenizers: what is streamed, token by token, is what the library decodes as a whole.

The documents are llama.cpp's, random texts of all scripts, code with every indentation, and random
tokens. The library decodes a run of byte tokens as one: if the run is not UTF-8, each of its bytes
becomes U+FFFD, whole characters too. A stream cannot wait for the end of a run, so random tokens
have no such runs.
"""

import random
import re

from tokenizers import Tokenizer as Library

from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.tokenizer import Tokenizer
from tests.files.packages import TOKENIZERS, tokenizer_folder
from tests.files.report import Row
from tests.files.vocabularies import all_documents
from tests.text.test_tokenizer_kinds import random_texts

_RANDOM = 3000
_LONGEST = 30
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_CODE = [f"{space * count}if x:{line}{space * count}  return  1" for space in (" ", "\t")
         for count in range(33) for line in ("\n", "\n\n", "\r\n", "\n" * count)]  # fmt: skip


def compare() -> list[Row]:
    """One row for each tokenizer."""
    return [_compared(name) for name in TOKENIZERS]


def _compared(name: str) -> Row:
    library = Library.from_file(str(tokenizer_folder(name) / "tokenizer.json"))
    tokenizer = Tokenizer.load(tokenizer_folder(name))
    texts = [*all_documents(), *random_texts(6), *_CODE]
    cases = [library.encode(text).ids for text in texts]
    drawn, size = random.Random(7), library.get_vocab_size()
    for _ in range(_RANDOM):
        tokens = [drawn.randrange(size) for _ in range(drawn.randint(1, _LONGEST))]
        cases.append(_without_runs(library, tokens))
    equal = sum(_streamed(tokenizer, tokens) == library.decode(tokens) for tokens in cases)
    return Row(name, len(cases), equal)


def _streamed(tokenizer: Tokenizer, tokens: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, ())
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def _without_runs(library: Library, tokens: list[int]) -> list[int]:
    """The tokens without byte tokens that follow another one."""
    kept: list[int] = []
    for token in tokens:
        pair = [library.id_to_token(one) or "" for one in (*kept[-1:], token)]
        if len(pair) < 2 or not all(map(_BYTE.fullmatch, pair)):
            kept.append(token)
    return kept
