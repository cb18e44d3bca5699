"""A keyword with a value of a wrong shape is refused by its name, wherever its schema stands."""

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)

from specops.text.grammar_source import Effort, GrammarError, write
from specops.text.schemas.references import SchemaError
from specops.text.schemas.writer import rewrite
from tests.text.schemas.answers import json_schema
from tests.text.schemas.odd import KEYWORDS, schemas, values

DRAFTS = (
    *(Draft3Validator, Draft4Validator, Draft6Validator, Draft7Validator),
    *(Draft201909Validator, Draft202012Validator),
)
OF_EACH_TYPE = (None, True, 1, 1.5, "a", ["a"], {"a": "b"})
PLACES = (  # where a schema may stand
    *("", "/properties/p", "/patternProperties/p", "/additionalProperties", "/propertyNames"),
    *("/items", "/items/0", "/prefixItems/0", "/contains", "/anyOf/0", "/oneOf/0", "/allOf/0"),
    *("/not", "/not/properties/p", "/not/anyOf/0", "/not/not", "/if", "/then", "/else"),
    *("/dependentSchemas/p", "/dependencies/p", "/$defs/p"),
)


def placed(schema: Any, place: str) -> Any:
    for part in reversed(place.split("/")[1:]):
        schema = [schema] if part == "0" else {part: schema}
    return schema | {"$ref": f"#{place}"} if place.startswith("/$defs") else schema


def wrong_in(draft: Any, keyword: str, value: Any) -> bool:
    return any(True for _ in draft(draft.META_SCHEMA).iter_errors({keyword: value}))


KNOWN = {
    keyword: [
        draft for draft in DRAFTS if any(wrong_in(draft, keyword, value) for value in OF_EACH_TYPE)
    ]
    for keyword in KEYWORDS
}


@pytest.mark.parametrize("keyword", KEYWORDS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(value=st.sampled_from(OF_EACH_TYPE) | values, place=st.sampled_from(PLACES))
def test_what_no_draft_takes_is_refused_by_its_keyword(
    keyword: str, value: Any, place: str
) -> None:
    whole = placed({keyword: value}, place)
    repeats = isinstance(value, list) and len({repr(item) for item in value}) < len(value)
    of_draft_4 = keyword.startswith("exclusive") and isinstance(value, bool)  # beside another one
    parts = [value]
    if keyword == "dependencies" and isinstance(value, dict):  # each may be another draft's
        parts = [{name: item} for name, item in value.items()]
    wrong = any(all(wrong_in(draft, keyword, part) for draft in KNOWN[keyword]) for part in parts)
    if not wrong or repeats or of_draft_4 or value == []:
        with contextlib.suppress(SchemaError):
            rewrite(whole)
        return
    with pytest.raises(SchemaError) as refused:
        rewrite(whole)
    assert refused.value.path.startswith(f"{place}/{keyword}")


@settings(max_examples=500, suppress_health_check=list(HealthCheck))
@given(schemas, st.booleans())
def test_any_schema_is_written_or_refused(schema: Any, strict: bool) -> None:
    for effort in (Effort.WHOLE, Effort.PLAIN):
        with contextlib.suppress(GrammarError):
            write(json_schema(schema, strict=strict), effort)
