"""Writes the complement of a schema as a schema, for `not`, and for `if` with `else`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from specops.text.schemas import patterns
from specops.text.schemas.references import Schema
from specops.text.schemas.shapes import TYPES

# Keywords that constrain nothing.
ANNOTATIONS = frozenset(
    {
        *("$anchor", "$defs", "definitions", "$schema", "$id", "id", "$comment", "title"),
        *("description", "default", "readOnly", "writeOnly", "examples", "deprecated"),
        *("contentMediaType", "contentEncoding", "contentSchema", "$vocabulary"),
        *("$dynamicAnchor", "$recursiveAnchor"),
    }
)
_DEEPEST = 8  # references to references
# Each bound's complement: its type, its keyword, and the values' difference.
_BOUNDS: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
Resolve = Callable[[Schema], Any]


def complement(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """Return a schema of all values that do not follow `schema`; None: it cannot be expressed.

    Args:
        schema: the schema, as read from JSON.
        resolve: returns the target of a schema's `$ref`, or the schema if it has none. It is
            called for each schema, and raises `SchemaError` for an invalid one.
        depth: how deep this schema lies within the first one.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    meant = resolve(schema)
    options = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        said = meant if keyword == "$ref" else value
        option = _against(keyword, said, schema, resolve, depth + 1)
        if option is None:
            return None
        if option is not False:
            options.append(option)
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


def _against(keyword: str, value: Any, schema: Schema, resolve: Resolve, depth: int) -> Any:
    """Return the values that do not follow one keyword; None: they cannot be expressed."""
    match keyword, value:
        case "$ref", _:
            against = complement(value, resolve, depth)
        case "not", _:
            against = value
        case "type", _:
            against = _other_types([value] if isinstance(value, str) else value)
        case "const", _:
            against = _other_values([value])
        case "enum", list():
            against = _other_values(value)
        case "required", list():
            lacking = [{"type": "object", "properties": {name: False}} for name in value]
            against = {"anyOf": lacking} if lacking else False
        case "properties", dict():
            against = _other_properties(value, resolve, depth)
        case "anyOf" | "allOf", list():
            others = [complement(inner, resolve, depth) for inner in value]
            joined = "allOf" if keyword == "anyOf" else "anyOf"
            against = None if not others or None in others else {joined: others}
        case _:
            against = _beyond(keyword, value, schema)
    return against


def _beyond(keyword: str, value: Any, schema: Schema) -> Any:
    """Return the values beyond a bound."""
    as_in_draft_4 = isinstance(schema.get(f"exclusive{keyword.capitalize()}"), bool)
    if keyword not in _BOUNDS or not _is_number(value) or as_in_draft_4:
        return None
    kind, other_keyword, step = _BOUNDS[keyword]
    bound = value + step
    return {"type": kind, other_keyword: bound} if kind == "number" or bound >= 0 else False


def _other_properties(properties: Schema, resolve: Resolve, depth: int) -> Any:
    """Return the objects with a property that does not follow its schema."""
    options = []
    for name, schema in properties.items():
        other = complement(schema, resolve, depth)
        if other is None:
            return None
        if other is not False:
            options.append({"type": "object", "required": [name], "properties": {name: other}})
    return {"anyOf": options} if options else False


def _other_types(types: Any) -> Any:
    if "any" in types:
        return False
    if "integer" in types and "number" not in types:
        return None  # fractions only: they cannot be expressed
    others = [kind for kind in TYPES if kind not in types]
    return {"type": others} if others else False


def _other_values(values: list[Any]) -> Any:
    """Return all values but these; None if one is a list or an object, or there are none."""
    if not values or any(isinstance(value, list | dict) for value in values):
        return None
    texts = [value for value in values if isinstance(value, str)]
    truths = [value for value in values if isinstance(value, bool)]
    numbers = sorted({value for value in values if _is_number(value)})
    kinds = ["array", "object"]
    options: list[Schema] = []
    if texts:
        options.append({"type": "string", "pattern": patterns.complement(texts)})
    else:
        kinds.append("string")
    if None not in values:
        kinds.append("null")
    if truths:
        options += [{"const": value} for value in (True, False) if value not in truths]
    else:
        kinds.append("boolean")
    if numbers:
        options.append({"type": "number", "exclusiveMaximum": numbers[0]})
        options += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(numbers)
        ]
        options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    else:
        kinds.append("number")
    return {"anyOf": [{"type": kinds}, *options]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
