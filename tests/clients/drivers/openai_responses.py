"""OpenAI's own client, with its newer protocol, responses."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.clients.drivers import SHORT, STRUCTURED, Form, Server, openai_chat
from tests.clients.drivers.openai_chat import client
from tests.clients.forms import get_weather

TOOL: dict[str, Any] = {"type": "function", "strict": False, **openai_chat.TOOL["function"]}


def request(server: Server, question: Any, max_tokens: int = SHORT) -> dict[str, Any]:
    return {
        "model": server.model,
        "input": question,
        "temperature": 0,
        "max_output_tokens": max_tokens,
    }


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    return client(server).responses.create(**request(server, messages)).output_text


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    body = request(server, question, max_tokens)
    with client(server).responses.create(**body, stream=True) as events:
        yield from (event.delta for event in events if event.type == "response.output_text.delta")


def tools(server: Server, question: str) -> dict[str, Any]:
    given: list[Any] = [{"role": "user", "content": question}]
    body = request(server, given) | {"tools": [TOOL]}
    made = client(server).responses.create(**body, tool_choice="required")
    given += made.output
    calls = []
    for item in made.output:
        if item.type == "function_call":
            calls.append({"name": item.name, "arguments": json.loads(item.arguments)})
            result = get_weather(**calls[-1]["arguments"])
            given.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": result}
            )
    answer = client(server).responses.create(**body, tool_choice="none").output_text
    return {"calls": calls, "answer": answer}


def structured(server: Server, form: type[Form], question: str) -> Form:
    body = request(server, question, STRUCTURED)
    return client(server).responses.parse(**body, text_format=form).output_parsed


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    return openai_chat.embeddings(server, texts)
