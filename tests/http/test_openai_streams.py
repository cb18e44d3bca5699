"""Streams and probabilities in OpenAI's form, on a fake service."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specops.request import FinishReason, Logprob, Output, Piece
from tests.asgi import AsgiClient
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


@pytest.mark.parametrize("path", BODIES)
async def test_who_waits_long_gets_signs_of_life(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specops.http.answering.job._PAUSE_SECONDS", 0.01)
    waiting, end = b": waiting\n\n", b"data: [DONE]\n\n"
    async with api(FakeService()) as here, asyncio.timeout(60):
        client = AsgiClient(here.app, path).send_json(BODIES[path] | {"stream": True})
        handle = await here.service.submitted.get()
        told = b""
        while told.count(waiting) < 2:
            told += (await client.next_message()).get("body", b"")
        handle.push(output("late", finish=FinishReason.STOP))
        while not told.endswith(end):
            told += (await client.next_message()).get("body", b"")
        await client.done
    assert b"late" in told


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
