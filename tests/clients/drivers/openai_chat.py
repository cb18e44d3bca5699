"""OpenAI's own client, with its chat protocol."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai

from tests.clients.drivers import KEY, SHORT, STRUCTURED, Form, Server
from tests.clients.forms import get_weather

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0)


def request(server: Server, question: str, max_tokens: int = SHORT) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {
        "model": server.model,
        "messages": messages,
        "temperature": 0,
        "max_completion_tokens": max_tokens,
    }


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    body = request(server, "") | {"messages": messages}
    return client(server).chat.completions.create(**body).choices[0].message.content


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    body = request(server, question, max_tokens)
    with client(server).chat.completions.create(**body, stream=True) as chunks:
        for chunk in chunks:
            yield from (choice.delta.content or "" for choice in chunk.choices)


def tools(server: Server, question: str) -> dict[str, Any]:
    body = request(server, question) | {"tools": [TOOL]}
    made = client(server).chat.completions.create(**body, tool_choice="required")
    message = made.choices[0].message
    calls, results = answer_calls(message.tool_calls)
    body["messages"] += [message.model_dump(exclude_none=True), *results]
    answer = client(server).chat.completions.create(**body, tool_choice="none")
    return {"calls": calls, "answer": answer.choices[0].message.content}


def answer_calls(made: Any) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Run the tools; return the calls and the messages with the results."""
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in made
    ]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": get_weather(**ran["arguments"])}
        for call, ran in zip(made, calls, strict=True)
    ]
    return calls, results


def structured(server: Server, form: type[Form], question: str) -> Form:
    body = request(server, question, STRUCTURED)
    answer = client(server).chat.completions.parse(**body, response_format=form)
    return answer.choices[0].message.parsed


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    answer = client(server).embeddings.create(model=server.model, input=list(texts))
    return [item.embedding for item in answer.data]
