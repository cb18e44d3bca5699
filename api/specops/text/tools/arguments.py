"""Converts a call's arguments to JSON if the model does not write them as JSON.

Between tags a text has no quotes, so only the tool's schema distinguishes the text `3` from the
number. Schemas come from clients: their invalid parts are ignored.
"""

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from specops.text.json_values import loads
from specops.text.schemas.references import Document, SchemaError

_MAX_REFERENCES = 8  # from an argument's schema to its definition
_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
    str: {"string"},
}
# The tokens of Python literals, with two extensions: keys may be bare, even if they have several
# words (Gemma 4's template marks none), and a trailing comma is allowed.
_LITERAL = r"""
    "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>(?:[^'\\]|\\.)*)'
    | (?P<key>[^\s"'{}\[\](),:][^"{}\[\](),:]{0,63}?) (?=\s*:) | (?P<word>[^\s"'{}\[\](),:]+)
    | (?P<bracket>[()]) | (?P<comma>,) (?=\s*[\])}]) | (?P<unclosed>["'].*)
"""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_ESCAPES |= {letter: letter for letter in "\\\"'/"}
_PIECES = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)|[^\\]+|\\", re.DOTALL
)
UNFINISHED_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}


def argument_schema(parameters: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an argument's schema with references resolved; an empty one if there is none."""
    schema: Any = listed_properties(parameters).get(name)
    if isinstance(schema, dict) and "$ref" in schema:
        return resolved(schema, Document(parameters))
    return schema if isinstance(schema, dict) else {}


def resolved(schema: Any, document: Document) -> dict[str, Any]:
    """Resolve a schema's references within a document; return an empty schema if that fails."""
    with contextlib.suppress(SchemaError):
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict):
                break
            if "$ref" not in schema:
                return schema
            schema = document.resolve(schema["$ref"], schema)
    return {}


def listed_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that a schema lists, by name."""
    listed = schema.get("properties")
    return listed if isinstance(listed, dict) else {}


def types_of(schema: Any, depth: int = _MAX_REFERENCES) -> set[str]:
    """Return the types that a schema names; empty if it allows any."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {item for item in _listed(named) or [named] if isinstance(item, str)}
    if not kinds:
        values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        kinds = {kind for value in values for kind in _TYPES.get(type(value), set())}
    for key in ("anyOf", "oneOf") if depth else ():
        kinds |= {
            kind for choice in _listed(schema.get(key)) for kind in types_of(choice, depth - 1)
        }
    return kinds


def _listed(value: Any) -> list[Any]:
    """Return a value of a client's schema if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_json(text: str, types: set[str]) -> str:
    """Return an argument that a model wrote without quotes as JSON."""
    try:
        value, written = loads(text), text.strip()
        json.dumps(value, allow_nan=False)  # Python's reader accepts NaN, JSON does not
    except ValueError:
        value, written = _of_python(text)
    if not written or isinstance(value, str) or not _fits(value, types):
        return json.dumps(text, ensure_ascii=False)
    return written


def _fits(value: Any, types: set[str]) -> bool:
    """Whether to read a value as itself, rather than as a text that the schema also allows."""
    return "string" not in types or bool(types & types_of({"enum": [value]}))


def _of_python(text: str) -> tuple[Any, str]:
    """Return a Python literal's value, and the value as JSON; "" if it is none."""
    if text.strip()[:1] in tuple("[{TFN") and "\\" not in text:
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = ast.literal_eval(text.strip())
            return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    return None, ""


# -- values written as in Python, or with a format's own marks around texts ------------------------


def literal_as_json(text: str, quote: str, types: set[str]) -> str:
    """Return a value as JSON; anything that is not a value becomes a string.

    Args:
        text: as the model wrote it.
        quote: see `ToolFormat.quote`.
        types: the ones that its schema allows.
    """
    mark = re.escape(quote)
    own = "" if quote == '"' else f"{mark}(?P<marked>.*?){mark} |"
    written = re.sub(own + _LITERAL, _token_as_json, text, flags=re.DOTALL | re.VERBOSE)
    try:
        fits = _fits(loads(written), types)
    except ValueError:
        fits = False
    return as_json(written if fits else text, types)


def _token_as_json(match: re.Match[str]) -> str:
    kind = match.lastgroup or ""
    found = match[kind]
    if kind in ("double", "single"):
        return f'"{text_in_json(found)}"'
    if kind in ("marked", "key"):
        return json.dumps(found, ensure_ascii=False)
    return _WORDS.get(found, found)


def text_in_json(text: str) -> str:
    """Convert the inside of a Python string literal to the inside of a JSON string."""
    return "".join(map(_piece_in_json, _PIECES.findall(text)))


def _piece_in_json(piece: str) -> str:
    kind, digits = piece[1:2], piece[2:]
    with contextlib.suppress(ValueError, OverflowError):
        if piece[0] == "\\" and digits:
            code = int(digits, 16)
            return f"\\u{code:04x}" if code < 1 << 16 else json.dumps(chr(code))[1:-1]
    escaped = piece[0] == "\\" and not digits
    said = _ESCAPES.get(kind, piece) if escaped else piece
    return json.dumps(said, ensure_ascii=False)[1:-1]
