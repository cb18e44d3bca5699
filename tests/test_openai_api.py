"""OpenAI's endpoints on a fake service: what reaches the engine, what is said, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from specops.app import create_app
from specops.config import Settings
from specops.metrics import Metrics
from specops.places import Place
from specops.request import FinishReason, GenerationRequest, Logprob, Output, Piece, PromptTooLong
from specops.service import QueueFull
from tests.asgi import AsgiClient
from tests.fakes import INFO, STATS, FakeService, output

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "fake", "prompt": "abc"},
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "abc"}]},
}
ANSWER = (
    output("Hel", "lo"),
    output(" wor", origin="draft"),
    output("ld", finish=FinishReason.STOP),
)
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Api:
    """An application on a fake service, and a client for it."""

    def __init__(self, service: FakeService, settings: Settings) -> None:
        self.service = service
        self.metrics = Metrics()
        self.app = create_app(settings, service, self.metrics)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def ask(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=BODIES[path] | body)

    @property
    def request(self) -> GenerationRequest:
        """What the engine was asked, once."""
        (request,) = self.service.requests
        return request


@asynccontextmanager
async def api(service: FakeService | None = None, **changed: Any) -> AsyncIterator[Api]:
    made = Api(service or FakeService(ANSWER), Settings(**changed))
    async with made.client:
        yield made


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


# -- answers -----------------------------------------------------------------------------------


async def test_completion_has_openais_form() -> None:
    async with api() as here:
        body = (await here.ask(COMPLETIONS)).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body.pop("timings")["draft_n"] == STATS.draft_tokens
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "system_fingerprint": "specops-0.1.0-fake-int8-128-1",
        "choices": [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }


async def test_chat_completion_has_openais_form() -> None:
    async with api() as here:
        body = (await here.ask(CHAT)).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello world", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_timings_tell_of_the_speculation() -> None:
    async with api() as here:
        timings = (await here.ask(CHAT)).json()["timings"]
    assert timings == {
        "prompt_n": 3,
        "prompt_ms": 500.0,
        "prompt_per_second": 6.0,
        "predicted_n": 5,
        "predicted_ms": 2000.0,
        "predicted_per_second": 2.0,
        "draft_n": 3,
        "draft_n_accepted": 2,
        "queue_ms": 250.0,
        "steps": 2,
        "tokens_per_step": 2.0,
        "drafter": "draft",
    }


@both
async def test_defaults_are_openais(path: str) -> None:
    async with api(max_new_tokens=500) as here:
        await here.ask(path)
    sampling = here.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1, 1, 0, None)
    assert here.request.max_new_tokens == (16 if path == COMPLETIONS else 500)
    assert (here.request.stop, here.request.logprobs, here.request.stream) == ((), None, False)


@both
async def test_every_field_reaches_the_engine(path: str) -> None:
    async with api() as here:
        await here.ask(
            path,
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=-3,
            stop=["\n", "END"],
            stream=True,
            k_draft=2,
            drafter="ngram",
            adaptive=False,
            exact=True,
            top_k=40,
            ignore_eos=True,
            user="me",
        )
    request = here.request
    assert (request.max_new_tokens, request.stop, request.stream) == (7, ("\n", "END"), True)
    assert (request.drafter, request.k_draft) == ("ngram", 2)
    assert (request.adaptive, request.exact, request.ignore_eos) == (False, True, True)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert sampling.seed == (1 << 63) - 3


@both
async def test_null_is_as_good_as_nothing(path: str) -> None:
    names = "max_tokens temperature top_p n seed stop stream stream_options user logprobs"
    async with api() as here:
        response = await here.ask(path, **dict.fromkeys(names.split()))
    assert response.status_code == 200
    assert here.request.sampling.temperature == 1


async def test_max_completion_tokens_is_the_newer_name() -> None:
    async with api() as here:
        await here.ask(CHAT, max_completion_tokens=9)
        both_names = await here.ask(CHAT, max_completion_tokens=9, max_tokens=9)
    assert here.request.max_new_tokens == 9
    assert problem(both_names, 400)["param"] == "max_tokens"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_than_the_server_gives_is_refused_by_the_name_it_was_asked_by(
    field: str,
) -> None:
    async with api(max_new_tokens=100) as here:
        error = problem(await here.ask(CHAT, **{field: 101}), 400)
    assert error["param"] == field
    assert "100" in error["message"]


# -- prompts -----------------------------------------------------------------------------------


async def test_messages_go_through_the_models_template() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with api() as here:
        await here.ask(CHAT, messages=messages)
    assert bytes(here.request.prompt_tokens) == b"system: Be brief.\nuser: ab\nassistant:"


async def test_a_model_without_a_template_says_what_to_do() -> None:
    service = FakeService(ANSWER)
    service.loaded.chat_template = None
    async with api(service) as here:
        error = problem(await here.ask(CHAT), 400)
    assert (error["code"], error["param"]) == ("no_chat_template", "messages")


async def test_prompts_may_be_several_and_tokens() -> None:
    async with api() as here:
        for prompt in ("a", [97], ["a", "bc"], [[97], [98, 99]]):
            response = await here.ask(COMPLETIONS, prompt=prompt)
            count = 2 if isinstance(prompt, list) and prompt != [97] else 1
            choices = response.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(count))
    asked = [bytes(request.prompt_tokens) for request in here.service.requests]
    assert asked == [b"a", b"a", b"a", b"bc", b"a", b"bc"]


async def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    async with api() as here:
        error = problem(await here.ask(COMPLETIONS, prompt=[1, INFO.vocab_size]), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_prompt(stream: bool) -> None:
    async with api() as here:
        response = await here.ask(COMPLETIONS, prompt=["a", "b"], echo=True, stream=stream)
    if stream:
        told: dict[int, str] = {}
        for chunk in chunks(response):
            for choice in chunk["choices"]:
                told[choice["index"]] = told.get(choice["index"], "") + choice["text"]
        assert told == {0: "aHello world", 1: "bHello world"}
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == [
            "aHello world",
            "bHello world",
        ]


@both
async def test_long_prompts_are_encoded_whole(path: str) -> None:
    async with api() as here:
        text = "x" * 100_000
        changed = {"prompt": text} if path == COMPLETIONS else {}
        if path == CHAT:
            changed = {"messages": [{"role": "user", "content": text}]}  # type: ignore[dict-item]
        await here.ask(path, **changed)
    assert bytes(here.request.prompt_tokens).count(b"x") == 100_000


async def test_a_prompt_too_long_for_the_context_names_the_field() -> None:
    service = FakeService()
    service.refusal = PromptTooLong(123, 64)
    async with api(service) as here:
        completion, chat = await here.ask(COMPLETIONS), await here.ask(CHAT)
    for response, field in ((completion, "prompt"), (chat, "messages")):
        error = problem(response, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)


# -- several choices ---------------------------------------------------------------------------


@both
async def test_n_asks_for_as_many_answers_with_seeds_of_their_own(path: str) -> None:
    async with api() as here:
        body = (await here.ask(path, n=3, seed=5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in body["choices"]] == ["Hello world"] * 3
    assert [request.sampling.seed for request in here.service.requests] == [5, 6, 7]
    prompt = len(here.service.requests[0].prompt_tokens)
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 15
    assert body["timings"]["predicted_n"] == 15


async def test_more_choices_than_places_are_refused() -> None:
    async with api(queue_size=3) as here:
        assert (await here.ask(COMPLETIONS, prompt=["a"] * 5)).status_code == 200
        error = problem(await here.ask(COMPLETIONS, prompt=["a", "b"], n=3), 400)
    assert error["param"] == "n"


@both
async def test_choices_of_a_stream_come_as_they_come(path: str) -> None:
    async with api(FakeService()) as here:
        asking = asyncio.create_task(here.ask(path, n=2, stream=True))
        ticket = await here.service.submitted.get()
        ticket.push(output("a"), to=1)
        ticket.push(output("b"), to=0)
        ticket.push(output("c", finish=FinishReason.LENGTH), to=1)
        ticket.push(output("d", finish=FinishReason.STOP), to=0)
        events = chunks(await asking)
    told = [
        (choice["index"], choice["text"] if "text" in choice else choice["delta"].get("content"))
        for event in events
        for choice in event["choices"]
    ]
    assert [item for item in told if item[1]] == [(1, "a"), (0, "b"), (1, "c"), (0, "d")]
    reasons = {
        choice["index"]: choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"]
    }
    assert reasons == {0: "stop", 1: "length"}
    assert [bool(event.get("timings")) for event in events] == [False] * (len(events) - 1) + [True]


@both
async def test_one_choice_that_fails_ends_the_others(path: str) -> None:
    async with api(FakeService()) as here:
        asking = asyncio.create_task(here.ask(path, n=2))
        ticket = await here.service.submitted.get()
        ticket.push(output("a", finish=FinishReason.TIMEOUT), to=1)
        assert problem(await asking, 504)["code"] == "timeout"
        assert ticket.cancelled.is_set()


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


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate"])
async def test_who_waits_long_gets_signs_of_life(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specops.routes.job._PAUSE_SECONDS", 0.01)
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
        ticket = await here.service.submitted.get()
        await asyncio.wait_for(seen.wait(), 5)
        ticket.push(output("late", finish=FinishReason.STOP))
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
    service.place = Place(3, 1.25)
    async with api(service) as here:
        body = BODIES.get(path, {"prompt": "abc"}) | {"stream": stream}
        response = await here.client.post(path, json=body)
    assert response.headers["x-queue-position"] == "3"
    assert response.headers["x-estimated-wait"] == "1.25"


# -- models ------------------------------------------------------------------------------------


async def test_the_loaded_model_is_listed() -> None:
    async with api() as here:
        listed = (await here.client.get("/v1/models")).json()
        alone = (await here.client.get("/v1/models/fake")).json()
        other = await here.client.get("/v1/models/org/other")
    assert listed["object"] == "list"
    assert listed["data"] == [alone]
    assert alone.pop("created") > 0
    assert alone == {
        "id": "fake",
        "object": "model",
        "owned_by": "specops",
        "context_length": 64,
        "quantization": "int8-128",
        "drafters": ["draft", "ngram", "none"],
    }
    assert problem(other, 404)["code"] == "model_not_found"


async def test_models_before_one_is_loaded_are_503_and_no_refusal_is_counted() -> None:
    service = FakeService()
    service.info = None
    async with api(service) as here:
        problem(await here.client.get("/v1/models"), 503)
        problem(await here.ask(CHAT), 503)
    rejected = here.metrics.registry.get_sample_value(
        "specops_requests_rejected_total", {"reason": "not_ready"}
    )
    assert rejected == 1


async def test_the_description_knows_our_errors_alone() -> None:
    async with api() as here:
        text = (await here.client.get("/openapi.json")).text
    assert "HTTPValidationError" not in text
    paths = json.loads(text)["paths"]
    assert set(paths[CHAT]["post"]["responses"]) == {
        *("200", "400", "401", "404", "413", "415", "429", "500", "503", "504")
    }
    assert "422" in paths["/generate"]["post"]["responses"]


# -- keys --------------------------------------------------------------------------------------

KEYS = "first-key,second-key"


@pytest.mark.parametrize("key", ["first-key", "second-key"])
async def test_any_of_the_keys_opens(key: str) -> None:
    async with api(api_keys=KEYS) as here:
        here.client.headers["authorization"] = f"Bearer {key}"
        assert (await here.ask(CHAT)).status_code == 200
        assert (await here.client.get("/v1/models")).status_code == 200
        assert (await here.client.post("/generate", json={"prompt": ""})).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_a_key_is_a_client_and_the_engine_is_not_told_which_key(path: str) -> None:
    async with api(api_keys=KEYS) as here:
        for key in ("first-key", "second-key", "first-key"):
            here.client.headers["authorization"] = f"Bearer {key}"
            if path == CHAT:
                await here.ask(CHAT)
            else:
                await here.client.post(path, json={"prompt": "abc"})
    first, second, again = (request.client for request in here.service.requests)
    assert first == again != second
    assert not {first, second} & {"", *KEYS.split(",")}
    async with api() as here:
        await here.ask(CHAT)
    assert here.service.requests[0].client == ""


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Bearer first", "Basic first-key", "first-key", "Bearer é"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate", "/v1/models", "/v1/other"])
async def test_without_a_key_it_is_401(value: str | None, path: str) -> None:
    async with api(api_keys=KEYS) as here:
        headers = {} if value is None else {"authorization": value.encode()}
        response = await here.client.request("POST", path, headers=headers, content=b"{}")
        error = problem(response, 401)
        rejected = here.metrics.registry.get_sample_value(
            "specops_requests_rejected_total", {"reason": "unauthorized"}
        )
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert rejected == 1
    assert not here.service.requests


@pytest.mark.parametrize(
    "path", ["/", "/health", "/health/live", "/metrics", "/docs", "/openapi.json"]
)
async def test_what_machines_ask_needs_no_key(path: str) -> None:
    async with api(api_keys=KEYS) as here:
        assert (await here.client.get(path)).status_code == 200


# -- the log -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_for", [False, True])
async def test_the_log_has_figures_and_no_text_unless_asked(
    asked_for: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specops")
    async with api(log_prompts=asked_for) as here:
        await here.ask(CHAT, n=2)
        await here.ask(COMPLETIONS, stream=True)
        await here.client.post("/generate", json={"prompt": "abc"})
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line["finish"] for line in lines] == [["stop"] * 2, ["stop"], ["stop"]]
    assert [line["generated_tokens"] for line in lines] == [10, 5, 5]
    assert all(line["queue_seconds"] == 0.25 for line in lines)
    if asked_for:
        assert [line["prompt"] for line in lines] == [
            [{"role": "user", "content": "abc"}],
            "abc",
            "abc",
        ]
        assert [line["answers"] for line in lines] == [["Hello world"] * 2] + [["Hello world"]] * 2
    else:
        assert "abc" not in str(lines)
        assert "Hello" not in str(lines)
