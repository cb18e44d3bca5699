"""An agent's loop with a real model: calls are made, answered and talked about, turn after turn."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from scripts.chat_model import chat_model, is_here
from specops.config import Settings
from tests.conftest import THREADS
from tests.http.chat_clients import Official, whole
from tests.http.real_engine import in_process

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.skipif(
        not is_here(chat_model()), reason="no chat model: .venv/bin/python scripts/chat_model.py"
    ),
]
PLACES = {"Paris": "sunny, 21 degrees", "Rome": "rainy, 15 degrees"}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(PLACES)}},
    "required": ["city"],
}
TURNS = ("How is the weather in Paris and in Rome?", "And in Rome alone?")
MODEL, TOKENS = "smollm2", 120
SKIPPED = 8  # of a block that agrees in part, fewer tokens are computed again
SETTINGS = Settings.from_env({"SPECOPS_MODEL": MODEL, "SPECOPS_THREADS": str(THREADS)})


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(SETTINGS) as (_, client):
        yield client


async def streamed(client: Any, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the message that a stream's deltas make up, and its usage."""
    text, calls, usage = "", [], None
    stream = await client.create(**body, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    assert part.id
                    assert part.function.name
                    assert not part.function.arguments
                    call = {"name": part.function.name, "arguments": ""}
                    calls.append({"id": part.id, "type": "function", "function": call})
                else:  # more of the newest call: nothing but arguments
                    assert part.index == len(calls) - 1
                    assert part.id is None
                    assert part.function.name is None
                    calls[-1]["function"]["arguments"] += part.function.arguments
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return message | ({"tool_calls": calls} if calls else {}), usage


async def test_calls_are_made_and_their_results_are_answered(http: httpx.AsyncClient) -> None:
    """By OpenAI's protocol, in streams: nothing that was said is computed twice."""
    client = Official.of(http).openai.chat.completions
    function = {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}
    messages: list[dict[str, Any]] = []
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
    body |= {"tools": [function], "messages": messages}
    ids, before = [], 0
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        message, usage = await streamed(client, body | {"tool_choice": "required"})
        assert usage.prompt_tokens_details.cached_tokens >= before - SKIPPED
        calls = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
        assert 1 <= len(calls) <= len(PLACES)
        assert all(call["city"] in PLACES and calls.count(call) == 1 for call in calls)
        whole = await client.create(**body, tool_choice="required")
        assert [call.function.arguments for call in whole.choices[0].message.tool_calls] == [
            call["function"]["arguments"] for call in message["tool_calls"]
        ]
        assert usage.completion_tokens == whole.usage.completion_tokens
        before = usage.prompt_tokens
        messages.append(message)
        for call, given in zip(message["tool_calls"], calls, strict=True):
            ids.append(call["id"])
            result = PLACES[given["city"]]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        message, usage = await streamed(client, body)
        assert message["content"].strip() or message["tool_calls"]
        assert usage.prompt_tokens_details.cached_tokens >= before - SKIPPED
        before = usage.prompt_tokens
        messages.append({"role": "assistant", "content": message["content"] or "I looked."})
    assert len(set(ids)) == len(ids)


async def test_a_named_tool_is_called_once_and_answered_by_anthropics_protocol(
    http: httpx.AsyncClient,
) -> None:
    client = Official.of(http).anthropic.messages
    tools = [{"name": "get_weather", "input_schema": PLACE}]
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "tools": tools}
    messages: list[dict[str, Any]] = [{"role": "user", "content": TURNS[0]}]
    named = {"type": "tool", "name": "get_weather"}
    answer = await whole(
        client, "message", stream=True, **body, messages=messages, tool_choice=named
    )
    (call,) = answer.content
    assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
    assert call.input["city"] in PLACES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": PLACES[call.input["city"]]}
    messages.append({"role": "assistant", "content": answer.content})
    messages.append({"role": "user", "content": [result]})
    said = await client.create(**body, messages=messages, tool_choice={"type": "none"})
    assert said.content[0].text.strip()
