"""Anthropic's own client."""

from collections.abc import Iterator
from typing import Any

import anthropic

from tests.clients.drivers import KEY, SHORT, STRUCTURED, Form, Server
from tests.clients.drivers.openai_chat import TOOL
from tests.clients.forms import get_weather

_FUNCTION = TOOL["function"]
OWN_TOOL: Any = {"name": _FUNCTION["name"], "description": _FUNCTION["description"]}
OWN_TOOL |= {"input_schema": _FUNCTION["parameters"]}


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0)


def request(server: Server, question: str, max_tokens: int = SHORT) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {
        "model": server.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "extra_body": {"temperature": 0},  # the package has no name for it any more
    }


def text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    return text(client(server).messages.create(**request(server, "") | {"messages": messages}))


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    with client(server).messages.stream(**request(server, question, max_tokens)) as events:
        yield from events.text_stream


def tools(server: Server, question: str) -> dict[str, Any]:
    body = request(server, question) | {"tools": [OWN_TOOL]}
    made = client(server).messages.create(**body, tool_choice={"type": "any"})
    calls = [block for block in made.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
        for call in calls
    ]
    body["messages"] += [
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": results},
    ]
    answer = text(client(server).messages.create(**body, tool_choice={"type": "none"}))
    return {
        "calls": [{"name": call.name, "arguments": call.input} for call in calls],
        "answer": answer,
    }


def structured(server: Server, form: type[Form], question: str) -> Form:
    body = request(server, question, STRUCTURED)
    return client(server).messages.parse(**body, output_format=form).parsed_output
