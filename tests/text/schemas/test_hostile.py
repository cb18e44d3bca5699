"""Schemas that are made to grow: they are compiled or refused, and what is written stays small."""

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from specops.text.grammar_source import GrammarError
from specops.text.schemas.references import SchemaError
from specops.text.schemas.writer import rewrite
from tests.simulated_target import grammars
from tests.text.schemas.answers import json_schema
from tests.text.test_grammar import doubling

MAX_WRITTEN = 1 << 20  # characters


def _all_to_all(keyword: str, count: int = 40) -> dict[str, Any]:
    definitions = {
        f"d{one}": {
            keyword: [{"$ref": f"#/$defs/d{other}"} for other in range(count)],
            "properties": {f"p{one}": {"type": "string"}},
        }
        for one in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _chain(count: int = 1000) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}], "properties": {"a": {}}}
        for index in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {}}}


def _fields(start: str, count: int) -> dict[str, Any]:
    return {f"{start}{index}": {"type": "string"} for index in range(count)}


HOSTILE: dict[str, Any] = {
    "all refer to all, anyOf": _all_to_all("anyOf", 20),
    "all refer to all, allOf": _all_to_all("allOf"),
    "all refer to all, oneOf": _all_to_all("oneOf", 12),
    "chain": _chain(),
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    "circle of opposites": {"not": {"$ref": "#"}},
    **{f"doubling {keyword}": doubling(keyword, 30) for keyword in ("anyOf", "allOf", "oneOf")},
    "many branches": {
        "oneOf": [{"properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(300)]
    },
    "many names in many branches": {
        "properties": _fields("p", 1000),
        "anyOf": [{"properties": {f"q{n}": {}}} for n in range(1000)],
    },
    "many conditions": {
        "allOf": [
            {"if": {"properties": {"a": {"const": n}}}, "then": {"required": [f"p{n}"]}}
            for n in range(300)
        ]
    },
    "many opposites": {"type": "string", "not": {"enum": [f"{n:05}" * 3 for n in range(500)]}},
    "many subsets": {"properties": _fields("p", 60), "minProperties": 30},
    "long values without repetition": {
        "uniqueItems": True,
        "type": "array",
        "items": {"enum": [letter * 5000 for letter in "abcde"]},
    },
    "large repetition": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "patterns that overlap": {
        "type": "object",
        "patternProperties": {f"^(a|b)*{n}$": {} for n in range(40)},
    },
}


TOO_LARGE = "it is too large once it is expanded"
UNWRITTEN = {  # those that cannot be written: what is said
    **dict.fromkeys(("all refer to all, anyOf", "all refer to all, oneOf"), TOO_LARGE),
    "many names in many branches": TOO_LARGE,
    "chain": "it refers to itself too deeply",
}
REFUSED = UNWRITTEN | {
    "all refer to all, allOf": "recursion limit",
    "circle": "it allows no text",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_that_grows_is_written_small_or_refused(name: str) -> None:
    for plain in (False, True):
        with refusal(SchemaError, UNWRITTEN.get(name)):
            assert len(json.dumps(rewrite(HOSTILE[name], plain=plain).schema)) < MAX_WRITTEN
    with refusal(GrammarError, REFUSED.get(name)):
        assert grammars().matcher(json_schema(HOSTILE[name])).masks(()).any()


def refusal(kind: type[Exception], message: str | None) -> AbstractContextManager[object]:
    return nullcontext() if message is None else pytest.raises(kind, match=message)
