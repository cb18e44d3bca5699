"""More than 200 JSON schemas: every keyword that llguidance supports, alone and nested."""

from typing import Any

Schema = dict[str, Any]


def form(**properties: Schema) -> Schema:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(**more: Any) -> Schema:
    return {"type": "string", "maxLength": 16, **more}


_INTEGER: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
_NODE = {
    "type": "object",
    "properties": {"name": _text(), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
    "required": ["name", "next"],
    "additionalProperties": False,
}
_FORMATS = ("date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "uuid", "hostname")

LEAVES: dict[str, Schema] = {
    "string": _text(),
    "minLength": _text(minLength=5),
    "exact length": {"type": "string", "minLength": 3, "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern with choices": {"type": "string", "pattern": "^(small|large) (cat|dog)s?$"},
    **{f"format {name}": {"type": "string", "format": name, "maxLength": 40} for name in _FORMATS},
    "integer": _INTEGER,
    "negative integer": {"type": "integer", "minimum": -50, "maximum": -1},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "multipleOf": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "number below": {"type": "number", "minimum": -1, "exclusiveMaximum": 0},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["boolean", "null"]},
    "enum of strings": {"enum": ["red", "green", "dark green"]},
    "enum of all kinds": {"enum": [1, "one", None, True, [1], {"a": 1}]},
    "enum of other scripts": {"enum": ["über", "日本", "🙂"]},
    "enum with quotes": {"enum": ['say "no"', "back\\slash", "two\nlines"]},
    "const": {"const": "fixed text"},
    "const object": {"const": {"version": 2, "beta": False}},
    "anyOf": {"anyOf": [_INTEGER, {"enum": ["none", "many"]}]},
    "oneOf": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "items": {"type": "array", "items": _INTEGER, "maxItems": 4},
    "minItems": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, _text()],
        "items": False,
        "minItems": 2,
    },
    "empty array": {"type": "array", "maxItems": 0},
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "object": form(name=_text(), age=_INTEGER),
    "empty object": {"type": "object", "additionalProperties": False},
    "optional property": {
        "type": "object",
        "properties": {"a": _INTEGER, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": _INTEGER},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^[xy]_[0-9]$": _INTEGER},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "title and description": _text(title="A name", description="of somebody", default="Ada"),
    "keys of other scripts": form(**{"größe": _INTEGER, "名前": _text()}),
    "keys with quotes": form(**{'a "b"': {"type": "boolean"}, "c\\d": {"type": "null"}}),
}
# Functions that nest a schema in another one; `$defs` are at the top of the result.
_AROUND = {
    "alone": lambda leaf: leaf,
    "as a property": lambda leaf: form(kind={"const": "answer"}, value=leaf),
    "in a list": lambda leaf: {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2},
    "by reference": lambda leaf: {
        **form(first={"$ref": "#/$defs/part"}, second={"$ref": "#/$defs/part"}),
        "$defs": {"part": leaf},
    },
    "or null": lambda leaf: form(value={"anyOf": [{"type": "null"}, leaf]}),
}
SCHEMAS: dict[str, Schema] = {
    f"{name}, {where}": around(leaf)
    for name, leaf in LEAVES.items()
    for where, around in _AROUND.items()
} | {"recursive list": {"$ref": "#/$defs/n", "$defs": {"n": _NODE}}}

_NAME = {"type": "string", "maxLength": 30}
FORMS: dict[str, Schema] = {
    "person": form(
        first_name=_NAME,
        last_name=_NAME,
        age={"type": "integer", "minimum": 0, "maximum": 120},
        city=_NAME,
        profession=_NAME,
        married={"type": "boolean"},
    ),
    "invoice": form(
        invoice_number={"type": "string", "pattern": "^[0-9]{6}$"},
        date={"type": "string", "format": "date"},
        customer=form(
            name=_NAME,
            street=_NAME,
            postal_code={"type": "string", "pattern": "^[0-9]{5}$"},
            country={"enum": ["Germany", "France", "Austria"]},
        ),
        currency={"enum": ["EUR", "USD"]},
        total_amount={"type": "integer", "minimum": 1, "maximum": 9999},
        paid={"type": "boolean"},
    ),
    "list of 20 products": {
        "type": "array",
        "minItems": 20,
        "maxItems": 20,
        "items": form(
            identifier={"type": "integer", "minimum": 1, "maximum": 99},
            category={"enum": ["fruit", "vegetable", "meat"]},
            available={"type": "boolean"},
        ),
    },
}
