"""Grammars that are made to take long, sent to a real engine while other requests stream."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from specops.config import Settings
from specops.request import Grammar, GrammarKind
from tests.asgi import PATIENCE, AsgiClient
from tests.fakes import Waiting
from tests.http.openai_api import COMPLETIONS, api
from tests.http.real_engine import served

pytestmark = pytest.mark.anyio
MEGABYTE = 1 << 20


def nested(count: int) -> dict[str, Any]:
    """A schema of objects within objects, each by a reference."""
    inner = {
        f"d{index}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}}}
        for index in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": inner | {f"d{count}": {"type": "string"}}}


def rules(count: int) -> str:
    """A Lark grammar of rules that name each other in a chain."""
    chain = "".join(f"r{index}: r{index + 1}\n" for index in range(count))
    return f'start: r0\n{chain}r{count}: "a"\n'


REFUSED: dict[str, dict[str, Any]] = {
    "chain of rules": {"guided_grammar": rules(2675)},
    "chain of references": {"guided_json": nested(1200)},
    "optional letters": {"guided_regex": "a?" * 40_000},
    "long choice": {"guided_choice": ["x" * 120_000]},
    "many property names": {
        "guided_json": {"type": "object", "propertyNames": {"enum": [f"n{n}" for n in range(5000)]}}
    },
    "exponential regex": {"guided_regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "exponential Lark": {"guided_grammar": 'start: (("a"{0,1000}){0,1000}){0,1000}'},
    "long schema": {"guided_json": {"enum": ["a" * (MEGABYTE - 1000)]}},
    "long regex": {"guided_regex": "a" * (MEGABYTE - 1000)},
    "many choices": {"guided_choice": [str(number) for number in range(100_000)]},
    "schema nested deeply": {"guided_json": "[" * 100_000},
    "remote reference": {"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}},
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("specops.http.answering.submit.COMPILE_SECONDS", 300.0)


@pytest.fixture(scope="module")
async def client(anyio_backend: str, tiny_settings: Settings) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(replace(tiny_settings, draft="none")) as client:
        yield client


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
async def test_a_hostile_grammar_ends_in_400_while_others_stream(
    client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    name = (await client.models.list()).data[0].id
    asked: dict[str, Any] = {"model": name, "prompt": "def", "max_tokens": 60, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    alone = (await client.completions.create(**asked)).choices[0].text

    async def streamed() -> str:
        stream = await client.completions.create(**asked, stream=True)
        return "".join([part.choices[0].text async for part in stream if part.choices])

    beside = [asyncio.create_task(streamed()) for _ in range(2)]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=name, prompt="a", extra_body=fields)
    assert await asyncio.gather(*beside) == [alone] * 2
    again = await client.completions.create(
        model=name, prompt="a", max_tokens=20, extra_body={"guided_choice": ["ab", "ac"]}
    )
    assert refused.value.param in {None, *fields}  # none where it is refused as it is followed
    assert refused.value.code == "invalid_grammar"
    assert again.choices[0].text in ("ab", "ac")


CHAIN = nested(1200)
FUNCTION = {"name": "f", "parameters": CHAIN}
MESSAGES = [{"role": "user", "content": "a"}]
WAYS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "strict": True, "schema": CHAIN},
        },
    },
    "/v1/responses": {
        "input": "a",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": CHAIN, "strict": True}},
    },
    "/v1/chat/completions tools": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": FUNCTION | {"strict": True}}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": CHAIN, "strict": True}],
        "tool_choice": {"type": "any"},
    },
    "/api/chat": {"messages": MESSAGES, "format": CHAIN},
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_chain_of_references_is_refused_by_every_way_in(way: str) -> None:
    async with api() as here:
        answer = await here.client.post(way.partition(" ")[0], json={"model": "fake", **WAYS[way]})
    assert answer.status_code == 400, answer.text
    assert "nested too deeply" in answer.text


class Stopped(Waiting):
    """A compiler that works until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[object] = []

    def matcher(self, *asked: object) -> Waiting:
        self.asked.append(asked[0])
        return super().matcher(*asked)

    def stop(self) -> None:
        self.may.set()


async def test_compilations_of_clients_that_left_hold_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "specops")
    async with api() as here:
        here.service.loaded.grammars = compiler = Stopped()  # type: ignore[assignment]
        body = {"model": "fake", "prompt": "a"}
        leaving = []
        for number in range(3):
            asked = body | {"guided_regex": f"left {number}"}
            leaving.append(AsgiClient(here.app, COMPLETIONS).send_json(asked))
        await asyncio.to_thread(compiler.begun.wait, PATIENCE)
        staying = asyncio.create_task(here.ask(COMPLETIONS, guided_regex="stays"))
        for client in reversed(leaving):
            client.leave()
            await asyncio.wait_for(client.done, PATIENCE)
        assert (await staying).status_code == 200
    first, last = (Grammar(GrammarKind.REGEX, text) for text in ("left 0", "stays"))
    assert compiler.asked == [first, last]
    lines = [vars(line)["fields"]["status"] for line in caplog.records if line.msg == "request"]
    assert lines == [499] * 3 + [200]
