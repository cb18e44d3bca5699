"""What constrains an answer: taken on every endpoint, compiled before it is queued, or refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from specops.request import FinishReason, Grammar, GrammarKind
from specops.text.grammar import GrammarError
from tests.fakes import FakeService, output
from tests.http.openai_api import CHAT, COMPLETIONS, GENERATE, api, both, problem

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}
WRITTEN = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["x"]}}}'
pytestmark = pytest.mark.anyio
every = pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])


def wrapped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@every
@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("response_format", {"type": "text"}, None),
        (
            "response_format",
            {"type": "json_object"},
            Grammar(GrammarKind.JSON_OBJECT, '{"type":"object"}'),
        ),
        ("response_format", wrapped(SCHEMA), Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        ("guided_json", SCHEMA, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        ("guided_json", WRITTEN, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        ("guided_regex", "[0-9]+", Grammar(GrammarKind.REGEX, "[0-9]+")),
        ("guided_choice", ["a", "é"], Grammar(GrammarKind.CHOICE, '["a","é"]')),
        ("guided_grammar", 'start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
    ],
)
async def test_a_constraint_reaches_the_engine(
    path: str, field: str, value: Any, grammar: Grammar | None
) -> None:
    """Properties in the order in which the schema has them."""
    async with api() as here:
        assert (await here.ask(path, **{field: value})).status_code == 200
        assert here.request.sampling.grammar == grammar


@both
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("response_format", wrapped({"type": "king"}), "Invalid type"),
        ("response_format", wrapped({"$ref": "http://example.com/a.json"}), "does not fetch"),
        ("guided_json", "{", "EOF"),
        ("guided_regex", "(?=a)b", "look-around"),
        ("guided_regex", "a" * 200_000, "characters"),
        ("guided_grammar", "start: missing", "unknown name"),
    ],
)
async def test_what_cannot_be_compiled_is_400_with_the_librarys_reason(
    path: str, field: str, value: Any, reason: str
) -> None:
    async with api() as here:
        error = problem(await here.ask(path, **{field: value}), 400)
        assert not here.service.requests
    assert (error["param"], error["code"]) == (field, "invalid_grammar")
    assert reason in error["message"]


@both
async def test_two_constraints_are_one_too_many(path: str) -> None:
    async with api() as here:
        error = problem(
            await here.ask(path, guided_regex="a", response_format={"type": "json_object"}), 400
        )
    assert error["param"] == "guided_regex"


async def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    nested = "[" * 400 + "]" * 400
    body = f'{{"prompt": "a", "model": "fake", "guided_json": {{"enum": {nested}}}}}'
    async with api() as here:
        headers = {"content-type": "application/json"}
        error = problem(await here.client.post(COMPLETIONS, content=body, headers=headers), 400)
    assert error["param"] == "guided_json"


class Slow:
    """Compiles when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def matcher(self, grammar: Grammar) -> None:
        assert self.may.wait(60)
        raise GrammarError("at last")


async def test_what_compiles_for_long_holds_up_no_other_request() -> None:
    async with api() as here:
        slow = here.service.loaded.grammars = Slow()
        waiting = asyncio.create_task(here.ask(CHAT, guided_regex="a"))
        assert (await here.ask(CHAT)).status_code == 200
        assert not waiting.done()
        slow.may.set()
        assert "at last" in problem(await waiting, 400)["message"]


async def test_a_grammar_that_cannot_be_followed_further_is_the_clients_error() -> None:
    last = output(finish=FinishReason.GRAMMAR)
    async with api(FakeService([last])) as here:
        error = problem(await here.ask(CHAT, guided_regex="a+"), 400)
    assert error["code"] == "invalid_grammar"


async def test_every_choice_follows_the_grammar() -> None:
    async with api() as here:
        await here.ask(CHAT, n=2, response_format=wrapped(SCHEMA))
        kinds = {json.loads(item.sampling.grammar.text)["type"] for item in here.service.requests}
    assert (len(here.service.requests), kinds) == (2, {"object"})


@every
async def test_every_way_to_choose_tokens_reaches_the_engine(path: str) -> None:
    body = {
        "min_p": 0.1, "typical_p": 0.9, "top_n_sigma": 1.5, "presence_penalty": 1,
        "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {"5": -100, "a": 1.5},
        "bad_words": ["x"], "stop_token_ids": [7], "min_tokens": 3,
    }  # fmt: skip
    async with api() as here:
        assert (await here.ask(path, **body)).status_code == 200
        sampling = here.request.sampling
        assert (here.request.stop_token_ids, here.request.min_tokens) == ((7,), 3)
    assert (sampling.min_p, sampling.typical_p, sampling.top_n_sigma) == (0.1, 0.9, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -0.5)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((5, -100), (97, 1.5))
    assert sampling.bad_words == ((120,), (32, 120))


@both
@pytest.mark.parametrize("field", ["bad_words", "min_tokens"])
async def test_what_might_leave_no_token_does_not_go_with_a_grammar(path: str, field: str) -> None:
    value = {"bad_words": ["x"], "min_tokens": 3}[field]
    async with api() as here:
        error = problem(await here.ask(path, guided_regex="a+", **{field: value}), 400)
    assert error["param"] == field
