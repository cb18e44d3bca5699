"""A body that is wrong in a thousand places, or long, costs other requests nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specops.config import Settings
from specops.http.app import create_app
from specops.http.schemas.body import Body
from specops.request import Grammar
from tests.fakes import FakeService, FakeTokenizer
from tests.http.openai_api import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    api,
    problem,
)

pytestmark = pytest.mark.anyio
MANY = 20_000
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [1] * MANY}
COSTLY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [1] * MANY}),
    (CHAT, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (CHAT, {"stop": [1] * MANY}),
    (MESSAGES, {"messages": [{"role": "user", "content": [RESULT]}]}),
    (MESSAGES, {"stop_sequences": [""] * MANY}),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": [1] * MANY}]}),
    (GENERATE, {"logit_bias": {str(number): "" for number in range(MANY)}}),
    (GENERATE, {"bad_words": [1] * MANY}),
    (GENERATE, {"stop_token_ids": [""] * MANY}),
    (COMPLETIONS, {"prompt": [""] * MANY}),
]


@pytest.mark.parametrize(("path", "fields"), COSTLY)
async def test_a_body_with_thousands_of_mistakes_is_refused_for_the_first(
    path: str, fields: dict[str, Any]
) -> None:
    async with api() as here:
        answer = await here.ask(path, **fields)
    error = problem(answer, 422 if path == GENERATE else 400)
    assert len(error["message"]) < 2_000


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """All lists and objects of any length within a pydantic schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict") and "schema_ref" not in schema:
            yield schema
        for value in schema.values():
            yield from lists(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from lists(value)


def bodies(base: type[Body]) -> Iterator[type[Body]]:
    for body in base.__subclasses__():
        yield body
        yield from bodies(body)


def test_every_list_of_a_body_ends_its_check_at_the_first_mistake_or_is_short() -> None:
    create_app(Settings(), FakeService())  # type: ignore[arg-type] - imports all bodies
    seen = 0
    for body in set(bodies(Body)):
        for schema in lists(body.__pydantic_core_schema__):
            if schema["type"] == "list":
                seen += 1
                bounded = schema.get("max_length", MANY) <= 128
                assert schema.get("fail_fast") or bounded, f"{body.__name__}: {schema}"
    assert seen > 20


@pytest.mark.parametrize("name", ["9" * 5_000, "9" * 11, "x" * 300])
async def test_a_bias_for_what_cannot_be_a_token_is_refused(name: str) -> None:
    async with api() as here:
        error = problem(await here.generate(logit_bias={name: 1}), 422)
    assert error["param"] == "logit_bias"


class Waiting(FakeTokenizer):
    """Encodes and decodes when it may."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        self.begun.set()
        assert self.may.wait(60)
        return super().encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        self.encode("")
        return super().decode(tokens)


LONG: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"content": "a" * 5_000}),
    ("/detokenize", {"tokens": [1] * 5_000}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": BODIES[CHAT]["messages"]}),
    ("/apply-template", {"messages": BODIES[CHAT]["messages"]}),
]


async def test_long_texts_beside_the_queue_are_few_at_a_time() -> None:
    async with api() as here:
        here.service.loaded.tokenizer = slow = Waiting()  # type: ignore[assignment]
        (path, body), *_, (short, conversation) = LONG
        asked = [asyncio.create_task(here.client.post(path, json=body)) for _ in range(8)]
        await asyncio.to_thread(slow.begun.wait, 60)
        while (await here.client.post(short, json=conversation)).status_code != 503:
            pass  # not all of them have come to where they wait
        for other, fields in LONG:
            refused = await here.client.post(other, json=fields)
            assert refused.status_code == 503, other
            assert refused.headers["retry-after"]
        assert (await here.ask(COMPLETIONS, prompt=[1])).status_code == 200
        slow.may.set()
        assert {(await task).status_code for task in asked} == {200}
        assert (await here.client.post(path, json=body)).status_code == 200


class Compiler:
    """Compiles grammars when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def compiled(self, _: Grammar) -> None:
        """Nothing is compiled yet."""

    def matcher(self, _: Grammar) -> object:
        assert self.may.wait(60)
        return self


async def test_a_grammar_that_waits_for_others_is_no_mistake_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specops.http.answering.choosing._COMPILE_SECONDS", 0.05)
    async with api() as here:
        here.service.loaded.grammars = compiler = Compiler()
        answers = await asyncio.gather(*(here.ask(COMPLETIONS, guided_regex="a") for _ in range(2)))
        for answer in answers:
            assert problem(answer, 503)["code"] == "grammar_pending"
            assert answer.headers["retry-after"]
        compiler.may.set()
        assert (await here.ask(COMPLETIONS, guided_regex="a")).status_code == 200


async def test_all_pieces_of_a_long_text_are_told() -> None:
    async with api() as here:
        answer = await here.client.post(
            "/tokenize", json={"content": "ab" * 3_000, "with_pieces": True}
        )
    assert answer.json()["tokens"][-1] == {"id": 98, "piece": "b"}
    assert len(answer.json()["tokens"]) == 6_000


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != EMBEDDINGS])
async def test_a_deeply_nested_field_is_refused_or_ignored(path: str) -> None:
    value: Any = 1
    for _ in range(300):
        value = {"a": value}
    async with api() as here:
        for name in ("tools", "metadata", "chat_template_kwargs", "guided_json", "text"):
            answer = await here.ask(path, **{name: value})
            assert answer.status_code in (200, 400, 422), answer.text
        tool = {"type": "function", "name": "f", "other": value}
        answer = await here.ask(path, tools=[tool], text={"format": {"type": "text", "a": value}})
        assert answer.status_code in (200, 400), answer.text
