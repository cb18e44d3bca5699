"""The benchmark of structured output runs on a tiny model and finds what does not fit."""

import json

import pytest
from jsonschema import Draft202012Validator

from bench.models import BenchModel
from bench.structured import structured
from bench.structured.schemas import FORMS, SCHEMAS
from specops.request import Grammar, GrammarKind
from tests.simulated_target import grammars


def test_there_are_200_schemas_and_all_compile() -> None:
    assert len(SCHEMAS) >= 200
    for schema in (*SCHEMAS.values(), *FORMS.values()):
        Draft202012Validator.check_schema(schema)
        grammars().matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_answers_are_compared_and_checked(tiny: BenchModel) -> None:
    outcome = structured.run(tiny, structured.QUICK)
    assert outcome.sound
    result = json.loads(json.dumps(outcome.result, allow_nan=False))
    assert result["schemas"]["valid"] == result["schemas"]["complete"]
    assert all(form["equal"] and form["origins"]["grammar"] for form in result["forms"].values())


@pytest.mark.parametrize(
    ("text", "fits"),
    [('{"a": 1}', True), ('{"a": "1"}', False), ('{"a": 1', False), ('{"a": 1, "b": 2}', False)],
)
def test_an_answer_that_does_not_fit_is_found(text: str, fits: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert structured.fits(text, schema) is fits
