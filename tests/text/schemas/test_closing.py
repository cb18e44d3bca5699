"""An object that lists its properties has no others, unless its schema says otherwise."""

import json
from typing import Any

import pytest

from specops.text.grammar_source import GrammarError
from tests.simulated_target import grammars, tokenizer
from tests.text.schemas.answers import follows, json_schema

NAME, AGE = {"name": {"type": "string"}}, {"age": {"type": "integer"}}
FORM = {"type": "object", "properties": NAME | AGE, "required": ["name", "age"]}
BASE = {"type": "object", "properties": NAME, "required": ["name"]}
KINDS = {
    "type": "object",
    "properties": {"kind": {"type": "string"}},
    "required": ["kind"],
    "oneOf": [
        {"properties": {"kind": {"const": "a"}} | NAME, "required": ["name"]},
        {"properties": {"kind": {"const": "b"}} | AGE, "required": ["age"]},
    ],
}
ANN, BOTH = {"name": "x"}, {"name": "x", "age": 3}
OTHER = BOTH | {"zip": 1}
# A schema, values that an answer may be, and values that it may not be.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": (FORM, [BOTH], [OTHER, ANN]),
    "without a type": ({"properties": NAME}, [ANN, {}], [3, "x", BOTH]),
    "no properties": ({"type": "object"}, [{}, OTHER, {"a": {"b": [1]}}], [[]]),
    "an empty list of them": ({"type": "object", "properties": {}}, [{}], [ANN]),
    "additionalProperties true": (FORM | {"additionalProperties": True}, [BOTH, OTHER], [ANN]),
    "additionalProperties false": (FORM | {"additionalProperties": False}, [BOTH], [OTHER]),
    "additionalProperties of a kind": (FORM | {"additionalProperties": {"type": "integer"}},
        [BOTH, OTHER], [BOTH | {"zip": "x"}]),
    "patternProperties": (BASE | {"patternProperties": {"^z": {"type": "integer"}}},
        [ANN, ANN | {"zip": 1}, ANN | {"other": "x"}], [ANN | {"zip": "x"}]),
    "unevaluatedProperties true": (FORM | {"unevaluatedProperties": True}, [OTHER], [ANN]),
    "unevaluatedProperties false": (
        {"allOf": [BASE], "properties": AGE, "unevaluatedProperties": False},
        [ANN, BOTH], [OTHER]),
    "allOf": ({"allOf": [BASE, {"properties": AGE, "required": ["age"]}]}, [BOTH], [OTHER, ANN]),
    "allOf beside properties": ({"properties": AGE, "allOf": [BASE]}, [ANN], [OTHER]),
    "allOf with an open part": (
        {"allOf": [BASE, {"properties": AGE, "additionalProperties": True}]},
        [BOTH, OTHER], []),
    "$ref": ({"$ref": "#/$defs/f", "$defs": {"f": FORM}}, [BOTH], [OTHER]),
    "$ref beside properties": (
        {"$ref": "#/$defs/b", "properties": AGE, "required": ["age"], "$defs": {"b": BASE}},
        [BOTH],
        [OTHER, ANN],
    ),
    "a definition for values and for parts": (
        {
            "properties": {"one": {"$ref": "#/$defs/b"}, "two": {"$ref": "#/$defs/f"}},
            "$defs": {"b": BASE, "f": {"allOf": [{"$ref": "#/$defs/b"}], "properties": AGE}},
        },
        [{"one": ANN, "two": BOTH}],
        [{"one": BOTH}, {"two": OTHER}],
    ),
    "branches": (
        KINDS,
        [{"kind": "a", "name": "x"}, {"kind": "b", "age": 1}],
        [{"kind": "a", "name": "x", "age": 1}, {"kind": "b", "age": 1, "zip": 1}, {"kind": "c"}],
    ),
    "branches that only require": (
        {"properties": NAME | AGE, "anyOf": [{"required": ["name"]}, {"required": ["age"]}]},
        [ANN, BOTH, {"age": 3}], [{}, OTHER]),
    "branches without a type": (
        {"anyOf": [{"properties": NAME}, {"properties": AGE}], "type": "object"},
        [{}, ANN, {"age": 3}], [3, "x", BOTH]),
    "a type behind the branches": (
        {
            "properties": {"next": {"anyOf": [{"$ref": "#"}], "type": "object"}},
            "additionalProperties": False,
        },
        [{}, {"next": {"next": {}}}],
        [{"next": 3}, 3],
    ),
    "a pattern that says the same as a listed property": (
        {
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "patternProperties": {"^n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "additionalProperties": False,
        },
        [{}, {"next": {"next": None}}, {"n": {}}],
        [{"next": 3}, {"x": 3}],
    ),
    "null or an object": ({"anyOf": [FORM, {"type": "null"}]}, [BOTH, None], [OTHER]),
    "required without being listed": ({"properties": NAME, "required": ["name", "age"]},
        [BOTH, {"name": "x", "age": "any"}], [OTHER, ANN]),
    "objects in objects": ({"properties": {"p": FORM, "list": {"type": "array", "items": BASE}}},
        [{"p": BOTH, "list": [ANN]}], [{"p": OTHER}, {"list": [BOTH]}]),
    "recursion": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "properties": NAME | {"next": {"$ref": "#/$defs/node"}},
                    "required": ["name"],
                }
            },
        },
        [ANN, ANN | {"next": ANN | {"next": ANN}}],
        [ANN | {"next": {"name": "x", "zip": 1}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_the_properties_that_its_schema_lists(name: str) -> None:
    schema, right, wrong = CASES[name]
    for value in (*right, *wrong):
        text = json.dumps(value)
        allowed = follows(grammars(), tokenizer(), json_schema(schema), text)
        assert allowed is (value in right), text


def test_a_schema_that_forbids_what_it_requires_is_refused_in_its_own_words() -> None:
    schema = {"$ref": "#/$defs/f", "$defs": {"f": FORM | {"properties": {"name": False}}}}
    with pytest.raises(GrammarError, match="required property 'name'") as refused:
        grammars().matcher(json_schema(schema))
    assert "$defs/0" not in str(refused.value)
