"""What OpenAI's endpoints refuse: each time the field is named, and nothing is computed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specops.serving.admission import QueueFull
from specops.serving.queue_tracker import QueuePosition
from tests.asgi import AsgiClient
from tests.fakes import FakeService
from tests.http.openai_api import ANSWER, BODIES, CHAT, COMPLETIONS, api, both, problem

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- refusals ----------------------------------------------------------------------------------

WRONG: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "max_tokens", 0, "invalid_value"),
    (COMPLETIONS, "temperature", 2.5, "invalid_value"),
    (COMPLETIONS, "temperature", "1", "invalid_value"),
    (COMPLETIONS, "top_p", 0, "invalid_value"),
    (COMPLETIONS, "n", 0, "invalid_value"),
    (COMPLETIONS, "n", 129, "invalid_value"),
    (COMPLETIONS, "stop", ["a"] * 5, "invalid_value"),
    (COMPLETIONS, "stop", "", "invalid_value"),
    (COMPLETIONS, "logprobs", 6, "invalid_value"),
    (COMPLETIONS, "logprobs", True, "invalid_value"),
    (COMPLETIONS, "prompt", [], "invalid_value"),
    (COMPLETIONS, "prompt", None, "invalid_value"),
    (COMPLETIONS, "prompt", [-1], "invalid_value"),
    (COMPLETIONS, "suffix", "x", "unsupported_parameter"),
    (COMPLETIONS, "best_of", 3, "unsupported_parameter"),
    (COMPLETIONS, "logit_bias", {"5": 1}, "unsupported_parameter"),
    (COMPLETIONS, "frequency_penalty", 0.5, "unsupported_parameter"),
    (COMPLETIONS, "presence_penalty", False, "unsupported_parameter"),
    (COMPLETIONS, "max_token", 5, "unknown_parameter"),
    (CHAT, "messages", [], "invalid_value"),
    (CHAT, "messages", [{"role": "king", "content": "a"}], "invalid_value"),
    (CHAT, "messages", [{"role": "user"}], "missing_parameter"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "invalid_value"),
    (CHAT, "top_logprobs", 21, "invalid_value"),
    (CHAT, "response_format", {"type": "json_object"}, "unsupported_parameter"),
    (CHAT, "tools", [{"type": "function"}], "unsupported_parameter"),
    (CHAT, "functions", [{"name": "f"}], "unsupported_parameter"),
    (CHAT, "prediction", {"type": "content", "content": "a"}, "unsupported_parameter"),
    (CHAT, "stream_options", {"include_usages": True}, "unknown_parameter"),
    (CHAT, "prompt", "a", "unknown_parameter"),
]


@pytest.mark.parametrize(("path", "field", "value", "code"), WRONG, ids=str)
async def test_wrong_field_is_400_and_named(path: str, field: str, value: Any, code: str) -> None:
    async with api() as here:
        error = problem(await here.ask(path, **{field: value}), 400)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert error["message"].startswith(f"{field}: ")


NEUTRAL = {
    "logit_bias": {},
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
}


async def test_what_asks_for_nothing_is_taken() -> None:
    async with api() as here:
        assert (await here.ask(CHAT, **NEUTRAL)).status_code == 200


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_missing_field_is_named(missing: str) -> None:
    async with api() as here:
        body = {name: value for name, value in BODIES[CHAT].items() if name != missing}
        error = problem(await here.client.post(CHAT, json=body), 400)
    assert (error["param"], error["code"]) == (missing, "missing_parameter")


async def test_top_logprobs_need_logprobs() -> None:
    async with api() as here:
        assert problem(await here.ask(CHAT, top_logprobs=2), 400)["param"] == "top_logprobs"


async def test_echo_has_no_probabilities() -> None:
    async with api() as here:
        assert problem(await here.ask(COMPLETIONS, echo=True, logprobs=1), 400)["param"] == "echo"


@both
async def test_another_model_does_not_exist(path: str) -> None:
    async with api() as here:
        error = problem(await here.ask(path, model="gpt-5"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@both
async def test_full_queue_is_429_before_anything_is_computed(path: str) -> None:
    service = FakeService()
    service.refusal = QueueFull(12)
    service.loaded.encode = None  # type: ignore[assignment]
    async with api(service) as here:
        response = await here.ask(path)
    error = problem(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert response.headers["retry-after"] == "12"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate"])
async def test_full_queue_is_429_without_waiting_for_the_body(path: str) -> None:
    service = FakeService()
    service.refusal = QueueFull(12)
    async with api(service) as here:
        client = AsgiClient(here.app, path)
        status, body = await asyncio.wait_for(client.response(), 5)
        await client.done
        assert (await here.client.get(path)).status_code == 405
    assert (status, body["error"]["code"], client.received) == (429, "queue_full", 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_headers_tell_the_place_in_the_queue(path: str, stream: bool) -> None:
    service = FakeService(ANSWER)
    service.queue_position = QueuePosition(3, 1.25)
    async with api(service) as here:
        body = BODIES.get(path, {"prompt": "abc"}) | {"stream": stream}
        response = await here.client.post(path, json=body)
    assert response.headers["x-queue-position"] == "3"
    assert response.headers["x-estimated-wait"] == "1.25"
