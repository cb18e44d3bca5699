"""Finds out from the grammar library whether it can enforce a small schema."""

import json
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher

from specops.text.schemas.references import Schema


def enforced(schema: Schema) -> bool:
    """Whether the library accepts a schema, or finds that no value can follow it."""
    reason = _tried(json.dumps(schema))
    return not reason or _impossible(reason)


def are_disjoint(schemas: Sequence[Schema]) -> bool:
    """Whether no text follows all schemas, as far as the library can tell."""
    return _impossible(_tried(json.dumps({"type": "string", "allOf": schemas})))


def forget() -> None:
    """Forget the library's answers."""
    _tried.cache_clear()


def _impossible(reason: str) -> bool:
    return "Unsatisfiable" in reason


@lru_cache(512)
def _tried(text: str) -> str:
    """Return the library's reason against a schema; empty if it accepts it."""
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
