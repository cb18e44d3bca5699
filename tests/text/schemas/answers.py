"""Answers at random by a schema's grammar, and whether they follow the schema.

Each token is drawn from those that the grammar allows. After a while the walk prefers tokens that
end something, so that most answers end.
"""

import copy
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from specops.request import Grammar, GrammarKind
from specops.text.grammar import Grammars, Matcher
from specops.text.tokenizer import Tokenizer

_ENDINGS = frozenset({'"', "}", "]", '"}', '"]', "}}", "]}", "}]", '",', "0", "1", "e"})
_LATE = 40  # tokens after which the walk wants to end


def json_schema(schema: Any, *, strict: bool = False) -> Grammar:
    """The grammar of a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=strict)


def follows(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer by a grammar."""
    tokens = tokenizer.encode(text, special_tokens=False)
    matcher = grammars.matcher(grammar)
    if matcher.allows(tokens) < len(tokens):
        return False
    for token in tokens:
        matcher.advance(token)
    return matcher.complete or bool(_allowed(matcher)[0] == 0)


def at_random(
    matcher: Matcher, tokenizer: Tokenizer, rng: np.random.Generator, *, end: int, most: int = 400
) -> str | None:
    """Return an answer; None if it did not end.

    Args:
        end: the token that ends a text.
        most: tokens of an answer.
    """
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = _allowed(matcher)
        late = len(tokens) > _LATE
        if end in allowed and (late or rng.random() < 0.5 or len(allowed) == 1):
            return tokenizer.decode(tokens)
        options = allowed[allowed != end]
        if late and rng.random() < 0.8:
            ending = [token for token in options[:500] if int(token) in _endings(tokenizer)]
            options = np.array(ending or options)
        token = int(rng.choice(options))
        matcher.advance(token)
        tokens.append(token)
        if matcher.complete:
            return tokenizer.decode(tokens)
    return None


@cache
def _endings(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end something."""
    tokens = tokenizer.vocabulary().values()
    return frozenset(token for token in tokens if tokenizer.decode([token]) in _ENDINGS)


def _allowed(matcher: Matcher) -> Any:
    bits = np.unpackbits(matcher.masks(())[0].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def faults(schema: Any, value: Any, left_out: Iterable[str] = ()) -> list[str]:
    """Return what is wrong with a value by a schema, apart from keywords that were left out.

    Args:
        left_out: JSON pointers of the keywords.
    """
    checked = _without(schema, left_out)
    validator = validator_for(checked, default=Draft202012Validator)
    errors = validator(checked, format_checker=validator.FORMAT_CHECKER).iter_errors(value)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]


def _without(schema: Any, pointers: Iterable[str]) -> Any:
    schema = copy.deepcopy(schema)
    for pointer in pointers:
        *parts, keyword = (
            part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]
        )
        node = schema
        for part in parts:
            node = node[int(part)] if isinstance(node, list) else node.get(part, {})
        value = node.pop(keyword, None)
        if keyword == "oneOf" and value is not None:  # at least one of them holds
            node.setdefault("allOf", []).append({"anyOf": value})
        for name in ("then", "else") if keyword == "if" else ():
            node.pop(name, None)
    return schema
