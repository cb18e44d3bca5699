"""Checks the values of a schema's keywords, so that an error names the path of a client's mistake.

Earlier drafts are valid too. Inner schemas are checked when they are used: a mistake in an unused
definition does no harm.
"""

import math
from collections.abc import Callable
from typing import Any

from specops.text.schemas.references import Schema, SchemaError, escaped

Shape = Callable[[Any, str], None]  # raises an error for an invalid value, with its JSON pointer
TYPES = ("null", "boolean", "number", "string", "array", "object")


def check(schema: Schema, at: str) -> None:
    """Refuse a schema with a keyword whose value is invalid.

    Args:
        schema: the schema; inner ones are not checked.
        at: its JSON pointer.

    Raises:
        SchemaError: a value is invalid.
    """
    for keyword, value in schema.items():
        if (shape := _SHAPES.get(keyword)) is not None:
            shape(value, f"{at}/{keyword}")


def whole(value: Any) -> int | None:
    """Return a value as a count; None if it is not a non-negative whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and value == value // 1 else None


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    exact = isinstance(value, int) and not _is_truth(value)
    return exact or (isinstance(value, float) and math.isfinite(value))


def _shape(fits: Callable[[Any], bool], wrong: str) -> Shape:
    def check_value(value: Any, at: str) -> None:
        if not fits(value):
            raise SchemaError(at, wrong)

    return check_value


def _each(inner: Shape, kind: type[dict[str, Any] | list[Any]], wrong: str) -> Shape:
    def check_values(value: Any, at: str) -> None:
        if not isinstance(value, kind):
            raise SchemaError(at, wrong)
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            inner(item, f"{at}/{escaped(str(name))}")

    return check_values


def _type(value: Any, at: str) -> None:
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list):
        raise SchemaError(at, "it is not the name of a type")
    for kind in types:
        if kind not in (*TYPES, "integer", "any"):
            raise SchemaError(at, f"Invalid type: {str(kind)[:64]!r}")


def _forms(value: Any, at: str) -> None:
    _schemas(value, at)
    if not value:
        raise SchemaError(at, "it is empty")


def _items(value: Any, at: str) -> None:
    (_schemas if isinstance(value, list) else _schema)(value, at)


def _needed(value: Any, at: str) -> None:
    if not isinstance(value, str):  # as draft 3 had it
        (_names if isinstance(value, list) else _schema)(value, at)


_schema = _shape(
    lambda value: isinstance(value, dict | bool), "a schema is an object, true or false"
)
_schemas = _each(_schema, list, "it is not a list of schemas")
_names = _shape(_is_names, "it is not a list of names")
# In drafts 3 and 4 these were true or false, and changed another keyword or a property.
_required = _shape(lambda value: _is_truth(value) or _is_names(value), "it is not a list of names")
_bound = _shape(lambda value: _is_truth(value) or _is_number(value), "it is not a number")
_count = _shape(lambda value: whole(value) is not None, "it is not a count")
_above_0 = _shape(lambda value: _is_number(value) and value > 0, "it is not a number above 0")
_SHAPES: dict[str, Shape] = {
    keyword: shape
    for shape, keywords in (
        (_type, "type"),
        (_items, "items"),
        (_forms, "anyOf oneOf"),
        (_schemas, "allOf prefixItems"),
        (_schema, "additionalProperties unevaluatedProperties propertyNames contains"),
        (_schema, "additionalItems unevaluatedItems not if then else"),
        (
            _each(_schema, dict, "it is not an object"),
            "properties patternProperties dependentSchemas",
        ),
        (_each(_needed, dict, "it is not an object"), "dependencies"),
        (_each(_names, dict, "it is not an object"), "dependentRequired"),
        (_required, "required"),
        (_shape(is_text, "it is not a string"), "pattern format $ref $dynamicRef $recursiveRef"),
        (_shape(_is_truth, "it is not true or false"), "uniqueItems"),
        (_shape(lambda value: isinstance(value, list), "it is not a list"), "enum"),
        (_shape(_is_number, "it is not a number"), "minimum maximum"),
        (_bound, "exclusiveMinimum exclusiveMaximum"),
        (_above_0, "multipleOf"),
        (_count, "minLength maxLength minItems maxItems minContains maxContains"),
        (_count, "minProperties maxProperties"),
    )
    for keyword in keywords.split()
}
KEYWORDS = frozenset(_SHAPES)
