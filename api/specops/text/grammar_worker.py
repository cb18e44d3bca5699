"""The process that writes grammars in the grammar library's form, and tries them.

A grammar is an untrusted program: a short one can make the library recurse or allocate without
end, and only the operating system can stop that. So each grammar is compiled here first, with a
vocabulary of single bytes. Only a grammar that stays within the limits is compiled again in the
service, for the model's vocabulary. That takes the same memory and recursion, on a larger stack,
and rewrites nothing.

A request is:

    {"grammar": ..., "effort": 0, "marks": {"<|im_end|>": 2, ...}, "size": 49152}

`effort` is the first way of writing the grammar to try. The answer is JSON, too: `text`, `ignored`,
`effort` and `bytes`; in a refusal `message` and `in_tools`.
"""

import ctypes
import itertools
import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from specops.request import Grammar
from specops.text.confined_worker import EXCEEDED, REFUSED, TEXT, confine, serve
from specops.text.grammar_source import (
    LIMITS,
    MEMORY_BYTES,
    SPECIAL,
    STACK_BYTES,
    GrammarError,
    Source,
    check,
    efforts,
    explained,
    grammar_of,
    vocabulary_of,
    write,
)
from specops.text.schemas.trial import forget

MAX_BYTES = 32 << 20
"""Maximum memory of one compiled grammar."""
MAX_CERTAIN = 1 << 14
"""Maximum length in bytes of the text that a grammar forces every answer to begin with."""
_BYTES = 256
_ERROR_CHARACTERS = 1000  # the library shows the grammar's lines


@lru_cache(maxsize=1)
def _vocabulary(marks: tuple[tuple[str, int], ...], size: int) -> LLTokenizer:
    """Return a vocabulary with a token for each byte, and the model's marks at their numbers."""
    taken = {token: SPECIAL + mark.encode() for mark, token in marks}
    free = (token for token in itertools.count() if token not in taken)
    *letters, end = itertools.islice(free, _BYTES + 1)
    taken |= {token: bytes([byte]) for byte, token in enumerate(letters)}
    taken[end] = SPECIAL + b"end"
    tokens = [taken.get(token, b"") for token in range(max(size - 1, *taken) + 1)]
    return vocabulary_of(tokens, [end], lambda text: [letters[it] for it in text.encode()], [])


def answer(request: bytes) -> tuple[bytes, bytes]:
    """Carry out a request; return the answer's kind and text."""
    try:
        try:
            asked = json.loads(request)
            forget()  # else the time it takes could tell a client of another client's schemas
            vocabulary = _vocabulary(tuple(asked["marks"].items()), asked["size"])
            tried = _first_accepted(grammar_of(asked["grammar"]), asked["effort"], vocabulary)
            return TEXT, json.dumps(tried).encode()
        except MemoryError:
            raise
        except GrammarError as error:
            told = {"message": str(error)[:_ERROR_CHARACTERS], "in_tools": error.in_tools}
            return REFUSED, json.dumps(told).encode()
    except MemoryError:
        return EXCEEDED, b""


def _first_accepted(grammar: Grammar, first: int, vocabulary: LLTokenizer) -> dict[str, Any]:
    """Return the best source of a grammar that the library accepts.

    Raises:
        GrammarError: it accepts none; the message says why not the best one.
    """
    reason: GrammarError | None = None
    previous = ""
    for effort in efforts(grammar):
        try:
            source = write(grammar, effort)
            again, previous = source.text == previous, source.text
            if again or effort < first:
                continue
            return {
                "text": source.text,
                "ignored": [(item.path, item.tool) for item in source.ignored],
                "effort": effort,
                "bytes": _try(grammar, source, vocabulary),
            }
        except GrammarError as error:
            reason = reason or error
    raise reason or GrammarError("it allows no text")


def _try(grammar: Grammar, source: Source, vocabulary: LLTokenizer) -> int:
    """Compile a source; return the bytes that it takes."""
    before = _allocated()
    matcher = LLMatcher(vocabulary, source.text, log_level=0, limits=LIMITS)
    try:
        check(matcher)
        certain = len(matcher.compute_ff_bytes())
        matcher.compute_bitmask()
        check(matcher)
    except GrammarError as error:
        raise explained(str(error), grammar, source) from None
    if certain > MAX_CERTAIN:
        raise GrammarError(f"all answers begin with the same text of more than {MAX_CERTAIN} bytes")
    if (taken := _allocated() - before) > MAX_BYTES:
        raise GrammarError(f"it takes more than {MAX_BYTES >> 20} MiB of memory")
    return taken


class _Allocated(ctypes.Structure):
    """`struct mallinfo2`: its fifth and eighth figures are the bytes of blocks in use."""

    _fields_ = (("figures", ctypes.c_size_t * 10),)


def _mallinfo2() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Allocated
    return function


_info = _mallinfo2()  # None: not glibc


def _allocated() -> int:
    """Return the bytes that the process has allocated; 0 if unknown."""
    if _info is None:
        return 0
    figures = _info().figures
    return int(figures[4] + figures[7])


def main(parent: int) -> None:
    """Run as a parent's process for grammars, until the parent closes the socket."""
    serve(answer, confine(parent, MEMORY_BYTES, STACK_BYTES))
