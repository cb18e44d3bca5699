"""JSON that models and clients write: it may hold what a text, or a fast writer, cannot.

JSON can spell half a surrogate pair, which no encoding of text has, numbers of any length, and any
depth. So values are read, checked and written here.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

# Objects in objects. pydantic and orjson write 250, and an answer puts some around a client's.
DEEPEST = 100


def loads(text: str) -> Any:
    """Read JSON; half surrogate pairs become U+FFFD, as they do in text of invalid bytes.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
        if too_deep(value):
            raise RecursionError
        written = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} objects or lists within each other") from None
    whole = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if whole == written else json.loads(whole)


def dumps(value: Any) -> bytes:
    """Write JSON, at most some levels deeper than `DEEPEST`."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # a number of more than 64 bits, or half a surrogate pair
        return json.dumps(value).encode()


def writable(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a client; one that cannot be written into texts is refused.

    Raises:
        ValueError: it is nested too deeply, or has half a surrogate pair.
    """
    if too_deep(value):
        raise ValueError(f"more than {DEEPEST} objects or lists within each other")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair in a text") from None
    return value


def too_deep(value: Any) -> bool:
    """Whether more than `DEEPEST` objects and lists are within each other."""
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
