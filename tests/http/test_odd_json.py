"""What JSON can spell and other formats cannot: half characters, long numbers, odd line ends."""

import json
import re
from typing import Any

import pytest

from tests.http.chat_clients import ASK, CHAT_TOOLS, PROTOCOLS, RESPONSES_TOOLS, clients
from tests.http.costly import usual_of
from tests.http.openai_api import CHAT, MESSAGES, RESPONSES

pytestmark = pytest.mark.anyio
both_ways = pytest.mark.parametrize("stream", [False, True])
ASKED = [{"role": "user", "content": ASK}]
HALF = '{"a": "\\ud83d"}'
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": 0}}
LONG = 123456789012345678901234567890


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'


async def test_half_a_character_in_an_earlier_call_becomes_a_replacement_character() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": HALF}}
    turns = [{"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "1", "content": "x"}]
    async with clients() as here:
        here.say("a")
        body = {"model": "fake", "messages": [*ASKED, *turns]}
        answer = await here.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert "\ufffd" in here.prompt


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [FUNCTION]}),
        (MESSAGES, {"max_tokens": 9, "tools": [{"name": "f", "input_schema": 0}]}),
        (CHAT, {"chat_template_kwargs": 0}),
    ],
)
async def test_half_a_character_in_a_clients_object_is_its_mistake(
    path: str, fields: dict[str, Any]
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        return {"description": "\ud800"} if value == 0 else value

    async with clients() as here:
        body = {"model": "fake", "messages": ASKED, **filled(fields)}
        headers = {"content-type": "application/json"}
        answer = await here.http.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 400
    assert "unpaired surrogate" in answer.text


WRITTEN = [
    (protocol, stream, arguments)
    for protocol in PROTOCOLS
    for stream in (False, True)
    for arguments in (HALF, f'{{"a": {LONG}}}')
    # Anthropic's own parser of pieces takes no half characters.
    if (protocol, stream, arguments) != ("messages", True, HALF)
]


@pytest.mark.parametrize(("protocol", "stream", "arguments"), WRITTEN)
async def test_every_protocol_writes_what_a_model_wrote(
    protocol: str, stream: bool, arguments: str
) -> None:
    async with clients() as here:
        here.say(call_of(arguments))
        said = await PROTOCOLS[protocol](here, stream=stream)
    ((name, _),) = said.calls
    assert name == "get_weather"


@both_ways
@pytest.mark.parametrize("arguments", [HALF, f'{{"a": {LONG}}}', '"\\ud83d"'])
async def test_ollama_has_the_call_and_its_end(stream: bool, arguments: str) -> None:
    async with clients() as here:
        here.say(call_of(arguments))
        body = {"model": "fake", "messages": ASKED, "tools": CHAT_TOOLS, "stream": stream}
        answer = await here.http.post("/api/chat", json=body)
    assert answer.status_code == 200
    assert '"name":"get_weather"' in answer.text.replace('": "', '":"')
    assert '"done_reason":"stop"' in answer.text


async def test_a_tools_schema_may_have_long_numbers() -> None:
    tool = RESPONSES_TOOLS[0] | {"parameters": {"type": "object", "maximum": LONG}}
    async with clients() as here:
        here.say("Hello")
        answer = await here.http.post(
            RESPONSES, json={"model": "fake", "input": "a", "tools": [tool], "stream": True}
        )
    assert str(LONG) in answer.text
    assert "response.completed" in answer.text


async def test_ollamas_client_reads_texts_with_line_ends_of_unicode() -> None:
    text = "a\u2028b\u2029c\u0085d"
    async with clients() as here:
        here.say(text)
        parts = [
            part.message.content
            async for part in await here.ollama.chat("fake", ASKED, stream=True)
        ]
    assert "".join(parts) == text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/api/chat"])
async def test_no_event_has_a_character_at_which_clients_end_lines(path: str) -> None:
    text = "a\u2028b\u2029c\u0085d"
    async with clients() as here:
        here.say(text)
        body = usual_of(path, "fake") | {"stream": True}
        answer = await here.http.post(path, json=body)
    assert answer.text.splitlines() == re.split("\r\n|\n", answer.text.removesuffix("\n"))
    assert r"\u2028b\u2029c\u0085d" in answer.text


@pytest.mark.parametrize("origin", [None, "http://elsewhere"])
async def test_ollamas_bodies_need_no_type_but_those_of_other_sites_do(origin: str | None) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    if origin:
        headers["origin"] = origin
    async with clients() as here:
        here.say("Hello")
        content = b'{"model": "fake", "prompt": "a", "stream": false}'
        answer = await here.http.post("/api/generate", content=content, headers=headers)
    assert answer.status_code == (415 if origin else 200)


async def test_thoughts_that_the_server_sent_come_back_to_the_model() -> None:
    async with clients() as here:
        here.say("<think>hm</think>", call_of("{}"))
        first = await here.openai.responses.create(
            model="fake",
            input="a",
            tools=RESPONSES_TOOLS,  # type: ignore[arg-type]
        )
        given = [item.model_dump() for item in first.output]
        call = given[-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        here.say("Sunny")
        await here.openai.responses.create(
            model="fake",
            input=[{"role": "user", "content": "a"}, *given, result],  # type: ignore[arg-type]
            tools=RESPONSES_TOOLS,  # type: ignore[arg-type]
        )
        assert "<think>hm</think>" in here.prompt
