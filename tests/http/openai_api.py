"""The API with a fake service, and a client of it, for the tests of endpoints."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from specops.config import Settings
from specops.http.app import create_app
from specops.http.protocols import PROTOCOLS
from specops.metrics.metrics import Metrics
from specops.request import FinishReason, GenerationRequest
from specops.synonyms import PATHS
from tests.fakes import FakeService, output

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
COMPLETION = "/completion"  # llama-server's
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "fake", "prompt": "abc"},
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "abc"}]},
    GENERATE: {"prompt": "abc"},
}
ENDPOINTS = BODIES | {
    MESSAGES: BODIES[CHAT] | {"max_tokens": 9},
    RESPONSES: {"model": "fake", "input": "abc"},
    EMBEDDINGS: {"model": "fake", "input": "abc"},
    COMPLETION: {"model": "fake", "prompt": "abc"},
}
# The endpoints that the engine works for, by all their names.
PROMPTS = PROTOCOLS.prompts | {
    other: PROTOCOLS.prompts[path] for other, path in PATHS.items() if path in PROTOCOLS.prompts
}
ANSWER = (
    output("Hel", "lo"),
    output(" wor", origin="draft"),
    output("ld", finish=FinishReason.STOP),
)
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def wrapped(schema: Any) -> dict[str, Any]:
    """A schema as a `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class Api:
    """An application on a service, by default a fake one, and a client for it."""

    def __init__(self, service: Any, settings: Settings, metrics: Metrics | None = None) -> None:
        self.service = service
        self.metrics = metrics or Metrics()
        self.app = create_app(settings, service, self.metrics)
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def ask(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=ENDPOINTS[path] | body)

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.ask(GENERATE, **body)

    def rejected(self, reason: str) -> float | None:
        name = "specops_requests_rejected_total"
        return self.metrics.registry.get_sample_value(name, {"reason": reason})

    def http_counts(self) -> dict[tuple[str, str], float]:
        """Number of HTTP requests by endpoint and status."""
        return {
            (sample.labels["endpoint"], sample.labels["status"]): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "specops_http_requests_total"
        }

    @property
    def request(self) -> GenerationRequest:
        """The only request of the engine."""
        (request,) = self.service.requests
        return request


@asynccontextmanager
async def api(service: FakeService | None = None, **changed: Any) -> AsyncIterator[Api]:
    made = Api(service or FakeService(ANSWER), Settings(**changed))
    async with made.client:
        yield made
    made.app.state.specops.executors.shut_down()


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object; every response that is not a success has all its fields."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    if response.url.path == MESSAGES or "anthropic-version" in response.request.headers:
        assert (set(error), response.json()["type"]) == ({"message", "type"}, "error")
    else:
        numbers = {"n_prompt_tokens", "n_ctx"} & set(error)
        assert set(error) == {"message", "type", "param", "code", *numbers}
        assert bool(numbers) == (error["code"] == "context_length_exceeded")
    return error


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last is "DONE" where it ends as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in found)
    sent = [event.removeprefix("data: ") for event in found]
    return ["DONE" if text == "[DONE]" else json.loads(text) for text in sent]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    *found, done = events(response)
    assert done == "DONE"
    return found
