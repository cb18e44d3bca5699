"""The `openai` library against a real server: it understands all that it is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from specops.config import Settings
from specops.http.app import create_app
from specops.http.server import make_server
from specops.request import FinishReason, PromptTooLong
from specops.serving.admission import QueueFull
from tests.fakes import FakeService, output

pytestmark = pytest.mark.anyio
KEY = "the-key"
ASK = [{"role": "user", "content": "abc"}]
ANSWER = (output("Hel", "lo"), output(" world", finish=FinishReason.STOP))


@pytest.fixture
def service() -> FakeService:
    return FakeService(ANSWER)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[AsyncOpenAI]:
    settings = Settings(api_keys=KEY, queue_size=2)
    server = make_server(create_app(settings, service), settings)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        async with AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=10) as made:
            yield made
        server.should_exit = True
        await asyncio.wait_for(serving, 10)


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).owned_by == "specops"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_chat_streamed_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake",
        messages=ASK,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 5


async def test_the_librarys_own_stream_helper_puts_the_answer_together(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="fake", messages=ASK) as stream:  # type: ignore[arg-type]
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"


async def test_errors_are_the_librarys_own(client: AsyncOpenAI, service: FakeService) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="fake", prompt="a", temperature=3)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="functions: this server does not support"):
        await client.chat.completions.create(
            model="fake",
            messages=ASK,  # type: ignore[arg-type]
            functions=[{"name": "f"}],
        )
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="other").models.list()
    service.refusal = PromptTooLong(123, 64)
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="fake", prompt="a")
    assert long.value.code == "context_length_exceeded"
    service.refusal = QueueFull(7)
    with pytest.raises(openai.RateLimitError) as full:
        await client.completions.create(model="fake", prompt="a")
    assert full.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (FinishReason.TIMEOUT, openai.InternalServerError),
        (FinishReason.ERROR, openai.InternalServerError),
    ],
)
async def test_failures_of_the_engine_are_5xx(
    client: AsyncOpenAI,
    service: FakeService,
    finish: FinishReason,
    error: type[openai.APIStatusError],
) -> None:
    service.answer = (output("a", finish=finish),)
    with pytest.raises(error):
        await client.completions.create(model="fake", prompt="a")
    stream = await client.completions.create(model="fake", prompt="a", stream=True)
    with pytest.raises(openai.APIError):
        _ = [chunk async for chunk in stream]


async def test_a_client_that_closes_its_stream_frees_its_place(
    client: AsyncOpenAI, service: FakeService
) -> None:
    service.answer = None
    asking = asyncio.create_task(
        client.chat.completions.create(model="fake", messages=ASK, stream=True)  # type: ignore[arg-type]
    )
    handle = (await service.submitted.get()).push(output("a"))
    stream = await asking
    await anext(stream)
    await stream.close()
    await asyncio.wait_for(handle.cancelled.wait(), 5)
