"""Ollama's own client."""

from collections.abc import Iterator, Sequence
from typing import Any

import ollama

from tests.clients.drivers import SHORT, STRUCTURED, Form, Server
from tests.clients.forms import earlier_calls, get_weather


def client(server: Server) -> ollama.Client:
    return ollama.Client(server.address)


def request(server: Server, question: str, max_tokens: int = SHORT) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    options = {"temperature": 0, "num_predict": max_tokens}
    return {"model": server.model, "messages": messages, "options": options}


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    body = request(server, "") | {"messages": messages}
    return client(server).chat(**body).message.content


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    for part in client(server).chat(**request(server, question, max_tokens), stream=True):
        yield part.message.content or ""


def tools(server: Server, question: str) -> dict[str, Any]:
    body = request(server, question)
    body["messages"] = earlier_calls(text=False) + body["messages"]
    made = client(server).chat(**body, tools=[get_weather])
    calls = [
        {"name": call.function.name, "arguments": dict(call.function.arguments)}
        for call in made.message.tool_calls or ()
    ]
    results = [
        {"role": "tool", "tool_name": call["name"], "content": get_weather(**call["arguments"])}
        for call in calls
    ]
    body["messages"] += [made.message, *results]
    return {"calls": calls, "answer": client(server).chat(**body).message.content}


def structured(server: Server, form: type[Form], question: str) -> Form:
    body = request(server, question, STRUCTURED)
    answer = client(server).chat(**body, format=form.model_json_schema())
    return form.model_validate_json(answer.message.content)


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    answer = client(server).embed(server.model, list(texts))
    return [list(vector) for vector in answer.embeddings]
