"""Reads, checks and writes the JSON of models and clients, which can be hostile.

JSON can spell half a surrogate pair, which no text encoding can, and allows numbers of any length
and any depth. Parsing and checking take time in proportion to the parts of a JSON text, so these
are counted first.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

MAX_PARTS = 1 << 14
"""Objects, lists and names in a text. A long chat with a hundred tools has a few thousand."""
MAX_VALUES = 1 << 17
"""Items and fields in a text: as many as the longest context has tokens."""
_PIECE = 1 << 18
_QUOTE, _BACKSLASH = b'"\\'
_HALVES = re.compile("[\ud800-\udfff]+")  # of surrogate pairs
# Line ends that JSON need not escape; they occur only in strings.
_LINE_ENDS = [(end.encode(), rb"\u%04x" % ord(end)) for end in "\u0085\u2028\u2029"]
Bytes = npt.NDArray[np.uint8]
# Nested objects. pydantic and orjson write 250, and an answer puts some around a client's.
DEEPEST = 100


class TooManyParts(ValueError):  # noqa: N818 - named as what it says
    """A JSON text has more parts than the server reads."""


def check_parts(text: bytes | bytearray, most_values: int = MAX_VALUES) -> None:
    """Count the parts of a JSON text without parsing it.

    Args:
        text: the JSON text.
        most_values: maximum number of items and fields.

    Raises:
        TooManyParts: there are too many.
    """
    if len(text) <= MAX_PARTS:
        return
    limits = {"objects, lists and names": MAX_PARTS, "values": most_values}
    # First count characters within strings too, which is faster.
    counts = _counts(np.frombuffer(piece, np.uint8) for piece in _pieces(text))
    if any(count > most for count, most in zip(counts, limits.values(), strict=True)):
        counts = _counts(_outside_strings(_pieces(text)))
    for count, (what, most) in zip(counts, limits.items(), strict=True):
        if count > most:
            raise TooManyParts(f"{count} {what}: this server accepts at most {most}")


def _counts(pieces: Iterable[Bytes]) -> list[int]:
    """Count the characters before objects, lists and names' values, and the commas after items."""
    counts = [0, 0]
    for letters in pieces:
        for index, kinds in enumerate((b"{[:", b",")):
            counts[index] += sum(int(np.count_nonzero(letters == kind)) for kind in kinds)
    return counts


def _pieces(text: bytes | bytearray) -> Iterator[bytes]:
    """Yield a text in pieces, to copy little at a time; none ends within an escape."""
    start = 0
    while start < len(text):
        end = start + _PIECE
        while text[end - 1 : end] == b"\\":
            end += 1
        yield bytes(text[start:end])
        start = end


def _outside_strings(pieces: Iterable[bytes]) -> Iterator[Bytes]:
    """Yield a JSON text's bytes, with those within strings replaced by 0."""
    within = np.uint8(0)
    for piece in pieces:
        # A backslash escapes the next character; the remaining quotation marks delimit strings.
        escaped = _BACKSLASH in piece
        plain = piece.replace(rb"\\", b"__").replace(rb"\"", b"__") if escaped else piece
        letters = np.frombuffer(plain, np.uint8)
        inside = (np.cumsum(letters == _QUOTE, dtype=np.uint8) + within) & 1
        yield letters * (1 - inside)
        within = inside[-1]


def loads(text: str) -> Any:
    """Read JSON; half surrogate pairs become U+FFFD, as they do in text of invalid bytes.

    Raises:
        ValueError: it is not JSON, has too many parts, or is nested too deeply.
    """
    check_parts(text.encode(errors="replace"))
    try:
        value = json.loads(text)
        if too_deep(value):
            raise RecursionError
        return in_whole_characters(value)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} objects or lists nested in each other") from None


def in_whole_characters(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of half surrogate pairs.

    Raises:
        RecursionError: it is nested too deeply.
    """
    try:
        orjson.dumps(value)
        return value
    except orjson.JSONEncodeError:  # it may also have a number of more than 64 bits
        written = json.dumps(value, ensure_ascii=False)
    whole = _HALVES.sub(lambda found: "\ufffd" * len(found[0]), written)
    return value if whole == written else json.loads(whole)


def dumps(value: Any) -> bytes:
    """Write JSON, at most a few levels deeper than `DEEPEST`; NumPy arrays become lists."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # a number of more than 64 bits, or half a surrogate pair
        return json.dumps(value).encode()


def line(value: Any) -> bytes:
    """Write JSON on one line, even for clients that split lines like Python's `splitlines`."""
    text = dumps(value)
    if not text.isascii():
        for end, escaped in _LINE_ENDS:
            text = text.replace(end, escaped)
    return text


def writable(value: dict[str, Any]) -> dict[str, Any]:
    """Return a client's object, unless it cannot be written as text.

    Raises:
        ValueError: it is nested too deeply, or has half a surrogate pair.
    """
    if too_deep(value):
        raise ValueError(f"more than {DEEPEST} objects or lists nested in each other")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("unpaired surrogate in a text") from None
    return value


def too_deep(value: Any) -> bool:
    """Whether more than `DEEPEST` objects and lists are nested."""
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    """Return the objects and lists directly within a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in inner if isinstance(item, dict | list)]
