"""Keywords beyond the library's own are enforced where they can be, and named where they cannot."""

import json
from typing import Any

import pytest

from specops.text.grammar_source import GrammarError
from specops.text.schemas import patterns
from specops.text.schemas.writer import rewrite
from tests.simulated_target import grammars, tokenizer
from tests.text.schemas.answers import faults, follows, json_schema

AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
OBJECT = {"type": "object", "properties": AB}
KIND = {"kind": {"enum": ["x", "y"]}, "a": {"type": "integer"}}
# A schema, values that follow it, and values that do not.
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "propertyNames, a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": True},
        [{}, {"a": 1}, {"a": 1, "b": 2}], [{"c": 1}]),
    "propertyNames, a pattern": (
        {"propertyNames": {"pattern": "^k[0-9]$"}, "additionalProperties": {"type": "integer"}},
        [{}, {"k1": 1}], [{"k": 1}, {"k1": "x"}]),
    "propertyNames, a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"ab": 1}, {"abc": None}], [{"a": 1}, {"abcd": 1}]),
    "dependentRequired": (OBJECT | {"dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    "dependencies": (OBJECT | {"dependencies": {"a": ["b"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "dependentSchemas": (OBJECT | {"dependentSchemas": {"a": {"properties": {"b": {"const": 7}}}}},
        [{"a": 1}, {"a": 1, "b": 7}, {"b": 8}], [{"a": 1, "b": 8}]),
    "if and then": (
        {
            "type": "object",
            "properties": KIND,
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"required": ["a"]},
        },
        [{"kind": "y"}, {"kind": "x", "a": 1}],
        [{"kind": "x"}],
    ),
    "if, then and else": (
        {
            "type": "object",
            "properties": KIND,
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
            "then": {"required": ["a"]},
            "else": {"properties": {"a": False}},
        },
        [{"kind": "y"}, {"kind": "x", "a": 1}],
        [{"kind": "x"}, {"kind": "y", "a": 1}],
    ),
    "not of texts": ({"type": "string", "not": {"enum": ["ab", "b"]}},
        ["", "a", "abc", "bb", "é"], ["ab", "b"]),
    "not of a type": ({"not": {"type": ["string", "object"]}}, [1, None, [1]], ["a", {}]),
    "not of what is required": (OBJECT | {"not": {"required": ["a", "b"]}},
        [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    "not of numbers": ({"type": "integer", "not": {"enum": [3, 5]}}, [2, 4, 6], [3, 5]),
    "not of a bound": ({"type": "integer", "not": {"minimum": 5}}, [4], [5, 6]),
    "not of one of several": (
        OBJECT | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        [{}], [{"a": 1}, {"b": 1}]),
    "oneOf of what is required": (OBJECT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
    "oneOf of objects with other names": (
        {
            "oneOf": [
                {"type": "object", "properties": {name: {}}, "required": [name]} for name in "ab"
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "oneOf of patterns": (
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
        ["a", "bx"], ["c"]),
    "contains": ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}},
        [[5], [5, 1]], [[], [1]]),
    "uniqueItems of few values": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["b", "a"]], [["a", "a"], []]),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        [[1]], [[1, 2]]),
    "minProperties": (OBJECT | {"minProperties": 1}, [{"a": 1}, {"a": 1, "b": 1}], [{}]),
    "minProperties of three": ({"properties": AB | {"c": {"type": "integer"}}, "minProperties": 2},
        [{"a": 1, "c": 1}], [{"a": 1}]),
    "maxProperties": (OBJECT | {"maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}]),
    "patternProperties that overlap and say the same": (
        {"patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "integer"}}},
        [{"ab": 1}, {"cb": 1}], [{"ab": "x"}]),
    "look-ahead": ({"type": "string", "pattern": "^(?=.*[0-9])(?=.*[A-Z]).{3,5}$"},
        ["aB1", "1xXy"], ["abc", "aB1aB1", "aB"]),
    "negative look-ahead": ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ["1", "-0.5", ".5"], ["", "+", "."]),
    "dates of the calendar": ({"type": "string", "format": "date"},
        ["2024-02-29", "2026-11-26"], ["2026-02-29", "2026-04-31", "26-11-26", "0000-01-01"]),
    "relative references of pages": (
        {"type": "string", "format": "uri-reference"},
        ["a/b?c=d#e", "/x", "https://example.org/a"],
        ["a b", "%zz"],
    ),
    "JSON pointers": ({"type": "string", "format": "json-pointer"}, ["", "/a~1b"], ["a", "/~2"]),
    "anchors": (
        {"$ref": "#thing", "$defs": {"x": {"$anchor": "thing", "type": "integer"}}},
        [1],
        ["a"],
    ),
    "identifiers": (
        {
            "$id": "https://example.org/root.json",
            "$ref": "part.json#/$defs/n",
            "$defs": {"p": {"$id": "part.json", "$defs": {"n": {"type": "integer"}}}},
        },
        [1],
        ["a"],
    ),
    "draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        [4],
        [3],
    ),
    "unknown keywords": ({"type": "integer", "x-order": 1, "discriminator": {}}, [1], ["a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
def test_answers_keep_to_a_keyword(name: str) -> None:
    schema, right, wrong = ENFORCED[name]
    assert rewrite(schema, strict=True).ignored == ()
    for value in (*right, *wrong):
        text = json.dumps(value, ensure_ascii=False)
        assert follows(grammars(), tokenizer(), json_schema(schema), text) is (value in right), text
        if value in right:
            assert faults(schema, value) == []


# A schema, and the JSON pointers of what it says and the grammar does not.
LEFT_OUT: dict[str, tuple[Any, set[str]]] = {
    "format": ({"properties": {"a": {"type": "string", "format": "path"}}},
        {"/properties/a/format"}),
    "format of a number": ({"type": "integer", "format": "int64"}, set()),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"/uniqueItems"}),
    "pattern": ({"type": "string", "pattern": "a(?<!b)c"}, {"/pattern"}),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 5}]}, {"/oneOf"}),
    "not": ({"type": "string", "not": {"pattern": "a"}}, {"/not"}),
    "if": ({"type": "string", "if": {"pattern": "a"}, "then": {"minLength": 2}}, {"/if"}),
    "contains": ({"type": "array", "contains": {}, "maxContains": 2}, {"/contains"}),
    "look-ahead of letters that may be each other": (
        {"type": "string", "pattern": r"^(?!.*\d\w)a"},
        {"/pattern"},
    ),
    "a name that there may not be": (
        {"properties": {"a": {}}, "required": ["a", "b"], "additionalProperties": False},
        {"/required"},
    ),
    "a pattern of names": (
        {"type": "object", "propertyNames": {"pattern": r"a\b"}},
        {"/propertyNames"},
    ),
    "a number with 400 digits": ({"type": "number", "minimum": 10**400}, {"/minimum"}),
    "a path with a slash": (
        {"$defs": {"a/b": {"type": "string", "format": "password"}}, "$ref": "#/$defs/a~1b"},
        {"/$defs/a~1b/format"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_not_enforced_is_named_or_refused(name: str) -> None:
    schema, paths = LEFT_OUT[name]
    matcher = grammars().matcher(json_schema(schema))
    assert {item.path for item in matcher.ignored} == paths
    for path in paths:
        with pytest.raises(GrammarError) as refused:
            grammars().matcher(json_schema(schema, strict=True))
        assert path in str(refused.value)


WRONG: dict[str, tuple[Any, str]] = {
    "type": ({"items": {"type": "king"}}, "/items/type: Invalid type: 'king'"),
    "properties": ({"properties": []}, "/properties: it is not an object"),
    "required": ({"required": "a"}, "/required: it is not a list of names"),
    "minLength": ({"type": "string", "minLength": -1}, "/minLength: it is not a count"),
    "minimum": ({"minimum": "1"}, "/minimum: it is not a number"),
    "enum": ({"enum": "a"}, "/enum: it is not a list"),
    "anyOf": ({"anyOf": {}}, "/anyOf: it is not a list of schemas"),
    "items": ({"items": 5}, "/items: a schema is an object, true or false"),
    "$ref": ({"$ref": "#/nowhere"}, "/$ref: #/nowhere does not exist"),
    "$ref to a value": ({"$ref": "#/x", "x": 5}, "/$ref: #/x does not exist"),
    "false": (False, "the schema: it allows nothing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_by_its_path(name: str) -> None:
    schema, message = WRONG[name]
    with pytest.raises(GrammarError) as refused:
        grammars().matcher(json_schema(schema))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("pattern", "pieces"),
    [
        ("^abc$", ["^abc$"]),
        ("^(?=.*x)a|b", None),
        ("a(?=b)", None),
        ("^(?!\\.)(?!.*\\.\\.)x$", ["^(?:$|[^\\.])", "^(?:(?:\\.)?[^\\.])*(?:\\.)?$", "^x$"]),
        ("^(?!ab)x", None),
        (r"^(?!.*\d\w)x", None),
        (r"^(?!.*\d\d)x", [r"^(?:(?:\d)?[^\d])*(?:\d)?$", "^x"]),
        (r"^(?!.*\--)x", [r"^(?:(?:\-)?[^\-])*(?:\-)?$", "^x"]),
        (r"^(?!\b)x", None),
    ],
)
def test_a_lookahead_is_taken_apart_at_the_beginning_only(
    pattern: str, pieces: list[str] | None
) -> None:
    assert patterns.split_lookahead(pattern) == pieces
