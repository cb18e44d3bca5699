"""Grammars that are made to take long, sent to a real engine while other requests stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from specops.config import Settings
from tests.http.real_engine import served
from tests.text.test_grammar import doubling

pytestmark = pytest.mark.anyio
MEGABYTE = 1 << 20

REFUSED: dict[str, dict[str, Any]] = {
    "exponential regex": {"guided_regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "exponential Lark": {"guided_grammar": 'start: (("a"{0,1000}){0,1000}){0,1000}'},
    "long schema": {"guided_json": {"enum": ["a" * (MEGABYTE - 1000)]}},
    "long regex": {"guided_regex": "a" * (MEGABYTE - 1000)},
    "many choices": {"guided_choice": [str(number) for number in range(100_000)]},
    "schema nested deeply": {"guided_json": "[" * 100_000},
    "remote reference": {"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """As everywhere, but for all tests here, which share a server."""
    return "asyncio"


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


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": doubling("allOf", 30)},
        {"guided_regex": "(x+x+)+y"},
        {"guided_json": {"type": "array", "items": {"$ref": "#"}}},
        {"guided_grammar": 'start: start start | "a"'},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
async def test_a_recursive_grammar_is_followed_or_ends_its_own_request(
    client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    name = (await client.models.list()).data[0].id
    asked = client.completions.create(
        model=name, prompt="a", max_tokens=40, extra_body=fields, temperature=0
    )
    beside = client.completions.create(model=name, prompt="def", max_tokens=40, temperature=0)
    found, other = await asyncio.gather(asked, beside, return_exceptions=True)
    assert isinstance(found, openai.BadRequestError) or found.choices[0].text
    assert other.choices[0].text
