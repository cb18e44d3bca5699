"""Streams and probabilities in OpenAI's form, on a fake service."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from specops.request import FinishReason, Logprob, Output, Piece
from tests.fakes import FakeService, output
from tests.http.openai_api import BODIES, CHAT, COMPLETIONS, api, both, chunks, problem

pytestmark = pytest.mark.anyio


# -- streams -----------------------------------------------------------------------------------


async def test_chat_stream_has_openais_form() -> None:
    async with api() as here:
        events = chunks(await here.ask(CHAT, stream=True))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " wor"},
        {"content": "ld"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["stop"]
    assert "usage" not in events[0]
    assert events[-1]["timings"]["draft_n_accepted"] == 2


async def test_chat_stream_tells_who_made_which_token_where_that_is_asked_for() -> None:
    async with api() as here:
        events = chunks(await here.ask(CHAT, stream=True, return_tokens=True))
    told = [token for event in events for token in event["choices"][0].get("tokens", ())]
    assert [(token["text"], token["origin"]) for token in told] == [
        *(("Hel", "target"), ("lo", "target"), (" wor", "draft"), ("ld", "target"))
    ]


@both
async def test_usage_comes_last_where_it_is_asked_for(path: str) -> None:
    async with api() as here:
        response = await here.ask(path, stream=True, stream_options={"include_usage": True})
        *events, last = chunks(response)
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    prompt = len(here.request.prompt_tokens)
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["total_tokens"] == prompt + 5
    assert last["timings"]["predicted_n"] == 5


@both
async def test_stream_options_need_a_stream(path: str) -> None:
    async with api() as here:
        error = problem(await here.ask(path, stream_options={"include_usage": True}), 400)
    assert error["param"] == "stream_options"


@both
async def test_stream_that_fails_halfway_ends_with_the_error_and_no_finish(path: str) -> None:
    service = FakeService([output("Hel"), output("lo", finish=FinishReason.TIMEOUT)])
    async with api(service) as here:
        response = await here.ask(path, stream=True)
    assert response.status_code == 200
    events = [json.loads(event[6:]) for event in response.text.split("\n\n") if event]
    assert events[-1]["error"]["code"] == "timeout"
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert "lo" in json.dumps(choices)
    assert not any(choice["finish_reason"] for choice in choices)


@pytest.mark.parametrize("path", BODIES)
async def test_who_waits_long_gets_signs_of_life(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specops.http.routes.job._PAUSE_SECONDS", 0.01)
    body = BODIES.get(path, {"prompt": "abc"}) | {"stream": True}
    async with api(FakeService()) as here:
        seen = asyncio.Event()
        parts: list[bytes] = []

        async def send(message: Any) -> None:
            parts.append(message.get("body", b""))
            if len([part for part in parts if part == b": waiting\n\n"]) == 2:
                seen.set()

        async def receive() -> Any:
            if not asked:
                asked.append(True)
                return {"type": "http.request", "body": json.dumps(body).encode()}
            return await asyncio.Future()

        asked: list[bool] = []
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        answering = asyncio.create_task(
            here.app(scope | {"query_string": b"", "http_version": "1.1"}, receive, send)
        )
        handle = await here.service.submitted.get()
        await asyncio.wait_for(seen.wait(), 5)
        handle.push(output("late", finish=FinishReason.STOP))
        await asyncio.wait_for(answering, 5)
    assert b"late" in b"".join(parts)
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")


# -- probabilities -----------------------------------------------------------------------------


def with_logprobs(finish: FinishReason = FinishReason.STOP) -> Output:
    pieces = (
        Piece(97, "a", "target", Logprob(-0.5, ((97, -0.5), (98, -1.5)))),
        Piece(98, "b", "draft", Logprob(-2.0, ((97, -0.25), (98, -2.0)))),
    )
    return replace(output(finish=finish), pieces=pieces)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_have_openais_form(stream: bool) -> None:
    async with api(FakeService([with_logprobs()])) as here:
        response = await here.ask(CHAT, logprobs=True, top_logprobs=2, stream=stream)
    assert here.request.logprobs == 2
    first = chunks(response)[1] if stream else response.json()
    told = first["choices"][0]["logprobs"]
    assert told["content"][1] == {
        "token": "b",
        "logprob": -2.0,
        "bytes": [98],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -2.0, "bytes": [98]},
        ],
    }
    assert len(told["content"]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_have_openais_form(stream: bool) -> None:
    async with api(FakeService([with_logprobs()])) as here:
        response = await here.ask(COMPLETIONS, logprobs=2, stream=stream)
    body = chunks(response)[0] if stream else response.json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.25, "b": -2.0}],
        "text_offset": [0, 1],
    }


async def test_logprobs_of_nothing_but_the_token_are_asked_for_with_0() -> None:
    async with api() as here:
        await here.ask(CHAT, logprobs=True)
        await here.ask(COMPLETIONS, logprobs=0)
    assert [request.logprobs for request in here.service.requests] == [0, 0]
