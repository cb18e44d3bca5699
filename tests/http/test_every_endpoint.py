"""What all endpoints that generate do alike: refusals, failures, and clients that leave."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from specops.engine.engine import UnknownToken
from specops.engine.model_info import ModelState
from specops.request import FinishReason, PromptTooLong
from specops.serving.admission import QueueFull
from specops.serving.async_engine import NotReady
from specops.serving.request_handle import QueuePosition
from tests.asgi import AsgiClient
from tests.fakes import FakeService, output
from tests.http.openai_api import (
    ANSWER,
    BODIES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    api,
    events,
    problem,
)
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio
every_endpoint = pytest.mark.parametrize("path", ENDPOINTS)


# -- the service says no -----------------------------------------------------------------------

FAILED = {"state": ModelState.FAILED, "info": None, "error": "no such folder"}
REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "full": ({"refusal": QueueFull(12)}, 429, "queue_full"),
    "too long": ({"refusal": PromptTooLong(123, 64)}, 400, "context_length_exceeded"),
    "unknown token": ({"refusal": UnknownToken("no token")}, 400, "invalid_value"),
    "loading": ({"state": ModelState.LOADING, "info": None}, 503, "model_loading"),
    "failed": (FAILED, 503, "model_failed"),
    "ending": ({"refusal": NotReady(ModelState.DRAINING, "the end")}, 503, "model_draining"),
    "bug": ({"refusal": RuntimeError("unforeseen")}, 500, "internal_error"),
}
# Client libraries and agents look for these words, which are the official services'.
_OPENAI = "This model's maximum context length is"
TOO_LONG = {
    CHAT: (f"{_OPENAI} 64 tokens. However, you requested 124 tokens (123 in the messages",),
    COMPLETIONS: (f"{_OPENAI} 64 tokens. However, you requested 124 tokens (123 in the prompt",),
    MESSAGES: ("prompt is too long: 123 tokens > 63 maximum",),
    RESPONSES: ("Your input exceeds the context window of this model", _OPENAI, "123"),
    EMBEDDINGS: (f"{_OPENAI} 64 tokens, however you requested 123 tokens",),
}
PROMPT = {CHAT: "messages", RESPONSES: "input", EMBEDDINGS: "input"}  # "prompt" elsewhere


@every_endpoint
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", REFUSALS)
async def test_a_refusal_of_the_service_says_why(
    path: str, why: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields, status, code = REFUSALS[why]
    service = FakeService()
    vars(service).update(fields)
    if why == "full":  # before anything is computed
        service.loaded.encode = None  # type: ignore[assignment]
    async with api(service) as here:
        response = await here.ask(path, stream=stream)
    error = problem(response, status)
    if path != MESSAGES:
        of_the_prompt = why in ("too long", "unknown token")
        wrong = PROMPT.get(path, "prompt") if of_the_prompt else None
        assert (error["code"], error["param"]) == (code, wrong)
    words = {"too long": TOO_LONG.get(path, ("123", "64")), "failed": ("no such folder",)}
    assert all(word in error["message"] for word in words.get(why, ()))
    assert ("unforeseen" in caplog.text) == (why == "bug")
    assert "unforeseen" not in response.text
    names = {"x-request-id"} if path == GENERATE else {"x-request-id", "request-id"}
    assert {name for name in response.headers if name.endswith("request-id")} == names
    assert len({response.headers[name] for name in names}) == 1
    if path == MESSAGES:
        assert response.json()["request_id"] == response.headers["request-id"]
    seconds = response.headers.get("retry-after", "0")
    assert (int(seconds) > 0) == (status in (429, 503))
    assert seconds == "12" or why != "full"
    assert here.rejected("not_ready") == (status == 503)


@pytest.mark.parametrize("path", BODIES)
async def test_full_queue_is_429_without_waiting_for_the_body(path: str) -> None:
    service = FakeService()
    service.refusal = QueueFull(12)
    async with api(service) as here:
        client = AsgiClient(here.app, path)
        status, body = await asyncio.wait_for(client.response(), PATIENCE)
        await client.done
        assert (await here.client.get(path)).status_code == 405
    assert (status, body["error"]["code"], client.received) == (429, "queue_full", 0)


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != GENERATE])
async def test_another_model_does_not_exist(path: str) -> None:
    async with api(unknown_model="refuse") as here:
        error = problem(await here.ask(path, model="gpt-5"), 404)
    assert (error.get("code"), error.get("param")) in [("model_not_found", "model"), (None, None)]
    assert "gpt-5" in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_headers_have_the_position_in_the_queue(path: str, stream: bool) -> None:
    service = FakeService(ANSWER)
    service.queue_position = QueuePosition(3, 1.25)
    async with api(service) as here:
        response = await here.ask(path, stream=stream)
    assert response.headers["x-queue-position"] == "3"
    assert response.headers["x-estimated-wait"] == "1.25"


# -- failures ----------------------------------------------------------------------------------

every_failure = pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (FinishReason.TIMEOUT, 504, "timeout"),
        (FinishReason.ERROR, 500, "internal_error"),
        (FinishReason.CANCELLED, 503, "draining"),
    ],
)


@every_endpoint
@every_failure
async def test_a_request_that_fails_has_a_status_as_long_as_nothing_was_sent(
    path: str, finish: FinishReason, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    for stream, first in ((False, ""), (True, ""), (False, "Hel")):
        last = replace(output(finish=finish), error="/secret/path is broken")
        service = FakeService([output(first), last] if first else [last])
        async with api(service) as here:
            response = await here.ask(path, stream=stream)
        error = problem(response, status)
        assert path == MESSAGES or error["code"] == code
        assert ("retry-after" in response.headers) == (status == 503)
        assert "secret" not in str(error)
    reasons = [record.fields for record in caplog.records if record.message == "generation failed"]  # type: ignore[attr-defined]
    assert ("secret" in str(reasons)) == (finish is FinishReason.ERROR)


@pytest.mark.parametrize("path", BODIES)
@every_failure
async def test_a_stream_that_fails_halfway_ends_with_the_error_and_no_finish(
    path: str, finish: FinishReason, status: int, code: str
) -> None:
    async with api(FakeService([output("Hel"), output("lo", finish=finish)])) as here:
        *sent, last = events(await here.ask(path, stream=True))
    assert last["error"]["code"] == code
    assert "lo" in str(sent)
    assert not any(choice["finish_reason"] for event in sent for choice in event.get("choices", ()))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_one_choice_that_fails_ends_the_others(path: str) -> None:
    async with api(FakeService()) as here:
        asking = asyncio.create_task(here.ask(path, n=2))
        handle = await here.service.submitted.get()
        handle.push(output("a", finish=FinishReason.TIMEOUT), to=1)
        assert problem(await asking, 504)["code"] == "timeout"
        assert handle.cancelled.is_set()


async def test_bug_in_the_middle_of_a_stream_cuts_it_off(caplog: pytest.LogCaptureFixture) -> None:
    async with api(FakeService()) as here:
        client = AsgiClient(here.app, GENERATE).send_json({"prompt": "a", "stream": True})
        handle = await here.service.submitted.get()
        handle.push(output("first"), RuntimeError("unforeseen"))
        assert (await client.next_event())["text"] == "first"
        with pytest.raises(RuntimeError):  # the server closes the connection, nothing says DONE
            await client.done
        assert handle.cancelled.is_set()
    assert "unforeseen" in caplog.text


# -- departures --------------------------------------------------------------------------------


@every_endpoint
@pytest.mark.parametrize("pieces", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_of_a_client_that_leaves_is_cancelled(
    path: str, stream: bool, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specops")
    async with api(FakeService()) as here:
        client = AsgiClient(here.app, path).send_json(ENDPOINTS[path] | {"stream": stream})
        handle = await here.service.submitted.get()
        handle.push(*[output("x")] * pieces)
        if stream and pieces and path != EMBEDDINGS:
            await client.next_message()
        assert not handle.cancelled.is_set()
        client.leave()
        await asyncio.wait_for(handle.cancelled.wait(), PATIENCE)
        await asyncio.wait_for(client.done, PATIENCE)
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert line.fields["status"] == 499  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_cancels_its_request(stream: bool) -> None:
    async with api(FakeService()) as here:
        client = AsgiClient(here.app, GENERATE).send_json({"prompt": "a", "stream": stream})
        handle = await here.service.submitted.get()
        client.done.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.done
        assert handle.cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_finished_request_is_not_cancelled(stream: bool) -> None:
    async with api() as here:
        await here.generate(stream=stream)
    assert not here.service.submitted.get_nowait().cancelled.is_set()
