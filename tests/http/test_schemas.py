"""JSON schemas in every protocol: what cannot be enforced is left out and named, or refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from specops.request import GenerationRequest
from specops.text.grammar import Grammars
from tests.http.chat_clients import clients, tool_choice, tools_of
from tests.http.openai_api import CHAT, COMPLETIONS, ENDPOINTS, GENERATE, MESSAGES, RESPONSES
from tests.simulated_target import tokenizer
from tests.text.schemas.answers import follows

pytestmark = pytest.mark.anyio
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
TOOL_PATHS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
FORM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "file": {"type": "string", "format": "path"}},
    "required": ["name"],
}
TURN = [{"role": "user", "content": "a"}]
_NAMED = "#/properties/file/format"


def _chat(schema: Any, strict: bool | None) -> dict[str, Any]:
    form = {"name": "a", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"messages": TURN, "response_format": {"type": "json_schema", "json_schema": form}}


def _responses(schema: Any, strict: bool | None) -> dict[str, Any]:
    form = {"type": "json_schema", "name": "a", "schema": schema}
    form |= {} if strict is None else {"strict": strict}
    return {"input": "a", "text": {"format": form}}


def _messages(schema: Any, _: bool | None) -> dict[str, Any]:
    form = {"format": {"type": "json_schema", "schema": schema}}
    return {"messages": TURN, "max_tokens": 9, "output_config": form}


def _former_messages(schema: Any, _: bool | None) -> dict[str, Any]:
    form = {"type": "json_schema", "schema": schema}
    return {"messages": TURN, "max_tokens": 9, "output_format": form}


# A path, a body with a schema, the field that it stands in, and whether it may be strict.
BODIES: dict[str, tuple[str, Callable[[Any, bool | None], dict[str, Any]], str]] = {
    "chat": (CHAT, _chat, "response_format"),
    "responses": (RESPONSES, _responses, "text"),
    "messages": (MESSAGES, _messages, "output_config"),
    "messages, as before": (MESSAGES, _former_messages, "output_format"),
    "completions": (COMPLETIONS, lambda s, _: {"prompt": "a", "guided_json": s}, "guided_json"),
    "completions, as text": (COMPLETIONS,
        lambda s, _: {"prompt": "a", "json_schema": json.dumps(s)}, "json_schema"),
    "generate": (GENERATE, lambda s, _: {"prompt": "a", "structured_outputs": {"json": s}},
        "structured_outputs"),
    "llama.cpp's": (CHAT,
        lambda s, _: {"messages": TURN, "response_format": {"type": "json_object", "schema": s}},
        "response_format"),
    "Ollama's chat": (OLLAMA_CHAT, lambda s, _: {"messages": TURN, "format": s}, "format"),
    "Ollama's prompt": (OLLAMA_GENERATE, lambda s, _: {"prompt": "a", "format": s}, "format"),
}  # fmt: skip
every_body = pytest.mark.parametrize("name", BODIES)


async def ask(
    name: str, schema: Any, strict: bool | None = None, *, stream: bool = False
) -> tuple[Any, Any]:
    """Send a schema in one of the protocols; returns the response and the engine's request."""
    path, body, _ = BODIES[name]
    async with clients() as here:
        here.say("{}")
        model = {} if path == GENERATE else {"model": "fake"}
        response = await here.http.post(
            path, json=body(schema, strict) | model | {"stream": stream}
        )
        return response, here.service.requests[-1] if here.service.requests else None


def grammar_allows(request: GenerationRequest, value: Any) -> bool:
    """Whether the grammar of a request allows this answer."""
    assert request.sampling.grammar is not None
    made = Grammars(tokenizer(), 4096, frozenset({0}))
    return follows(made, tokenizer(), request.sampling.grammar, json.dumps(value))


@every_body
@pytest.mark.parametrize("stream", [False, True])
async def test_a_keyword_that_cannot_be_enforced_is_left_out_and_named(
    name: str, stream: bool
) -> None:
    response, request = await ask(name, FORM, stream=stream)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == f"{BODIES[name][2]}{_NAMED}"
    assert grammar_allows(request, {"name": "x", "file": "y"})
    assert not grammar_allows(request, {"name": "x", "zip": "y"})


@every_body
async def test_a_schema_that_is_wrong_is_refused_by_field_keyword_and_path(name: str) -> None:
    response, _ = await ask(name, {"type": "object", "properties": {"a": {"type": "king"}}})
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert response.status_code in (400, 422)
    assert "/properties/a/type" in message
    assert "king" in message
    assert BODIES[name][2] in message or error["param"] == BODIES[name][2]


@pytest.mark.parametrize("name", ["chat", "responses"])
async def test_a_strict_schema_is_followed_exactly_or_refused(name: str) -> None:
    response, _ = await ask(name, FORM, strict=True)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_grammar")
    assert "/properties/file/format" in error["message"]
    held = FORM | {"properties": {"name": {"type": "string", "format": "date"}}}
    response, request = await ask(name, held, strict=True)
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers
    assert grammar_allows(request, {"name": "2026-11-26"})
    response, _ = await ask(name, FORM, strict=False)
    assert response.headers["x-ignored-fields"].endswith(_NAMED)


ODD: dict[str, tuple[Any, str]] = {
    "a format": (FORM, "#/properties/file/format"),
    "no type": ({"type": "object", "properties": {"a": {"type": "king"}}}, "#/properties/a/type"),
    "a reference to nowhere": ({"$ref": "https://example.com/a.json"}, "#/$ref"),
    "a contradiction": ({"properties": {"a": False}, "required": ["a"]}, "#"),
    "very large": ({"properties": {"a": {"enum": ["x " * 100_000]}}}, "#"),
}


@pytest.mark.parametrize("protocol", TOOL_PATHS)
@pytest.mark.parametrize("name", ODD)
async def test_a_tool_takes_any_schema_unless_it_is_strict(name: str, protocol: str) -> None:
    """Then the refusal names the tool."""
    schema, path = ODD[name]
    url = TOOL_PATHS[protocol]

    def body(**more: bool) -> dict[str, Any]:
        tools = tools_of(protocol, {"name": "save", "parameters": schema, **more})
        return ENDPOINTS[url] | {"tools": tools} | tool_choice(protocol, "required")

    async with clients() as here:
        here.say('<tool_call>\n{"name": "save", "arguments": {}}\n</tool_call>')
        response = await here.http.post(url, json=body())
        refused = await here.http.post(url, json=body(strict=True))
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == f"tools.save{path}"
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert "%json" not in message
    assert "args_0" not in message
    if path != "#":
        assert "'save'" in message
        assert path.removeprefix("#") in message
