"""LiteLLM; the model's prefix chooses the protocol."""

from collections.abc import Iterator, Sequence
from typing import Any

import litellm

from tests.clients.drivers import KEY, SHORT, STRUCTURED, Form, Server
from tests.clients.drivers.openai_chat import TOOL, answer_calls
from tests.clients.forms import earlier_calls


def request(server: Server, question: str, max_tokens: int = SHORT) -> dict[str, Any]:
    return {
        "model": server.model,
        **endpoint(server),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "num_retries": 0,
    }


def endpoint(server: Server) -> dict[str, str]:
    below = "/v1" if server.model.startswith("openai/") else ""
    return {"api_base": server.address + below, "api_key": KEY}


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    body = request(server, "") | {"messages": messages}
    return litellm.completion(**body).choices[0].message.content


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    chunks = litellm.completion(**request(server, question, max_tokens), stream=True)
    try:
        for chunk in chunks:
            yield chunk.choices[0].delta.content or ""
    finally:
        chunks.close()


def tools(server: Server, question: str) -> dict[str, Any]:
    body = request(server, question) | {"tools": [TOOL]}
    required, none = {"tool_choice": "required"}, {"tool_choice": "none"}
    if server.model.startswith("ollama"):  # which has no such choice
        required = none = {}
        body["messages"] = earlier_calls(text=True) + body["messages"]
    message = litellm.completion(**body, **required).choices[0].message
    calls, results = answer_calls(message.tool_calls)
    body["messages"] += [message.model_dump(exclude_none=True), *results]
    if not none:
        del body["tools"]
    answer = litellm.completion(**body, **none).choices[0].message.content
    return {"calls": calls, "answer": answer}


def structured(server: Server, form: type[Form], question: str) -> Form:
    body = request(server, question, STRUCTURED)
    answer = litellm.completion(**body, response_format=form)
    return form.model_validate_json(answer.choices[0].message.content)


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    model = server.model.replace("ollama_chat/", "ollama/")
    answer = litellm.embedding(model=model, input=list(texts), **endpoint(server))
    return [item["embedding"] for item in answer.data]
