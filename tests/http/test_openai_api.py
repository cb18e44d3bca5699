"""OpenAI's endpoints on a fake service: what reaches the engine, and what is answered."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from specops.request import FinishReason
from tests.fakes import INFO, STATS, FakeService, output
from tests.http.openai_api import (
    ANSWER,
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    api,
    both,
    chunks,
    problem,
    text_of,
)

pytestmark = pytest.mark.anyio


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
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
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
        "cache_n": 1,
        "prompt_n": 2,
        "prompt_ms": 500.0,
        "prompt_per_second": 4.0,
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


@pytest.mark.parametrize("path", BODIES)
async def test_every_field_reaches_the_engine(path: str) -> None:
    body: dict[str, Any] = {"max_new_tokens" if path == GENERATE else "max_tokens": 7}
    body |= {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 11, "stop": ["\n\n", "END"]}
    body |= {"k_draft": 2, "drafter": "suffix", "adaptive": False, "ignore_eos": True}
    async with api() as here:
        await here.ask(path, stream=True, user="me", **body)
    request, sampling = here.request, here.request.sampling
    assert (request.max_new_tokens, request.stop, request.stream) == (7, ("\n\n", "END"), True)
    assert (request.drafter, request.k_draft) == ("suffix", 2)
    assert (request.adaptive, request.ignore_eos) == (False, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert sampling.seed == 11


async def test_openais_seeds_may_be_negative() -> None:
    async with api() as here:
        await here.ask(CHAT, seed=-3)
    assert here.request.sampling.seed == (1 << 63) - 3


async def test_max_completion_tokens_is_the_newer_name() -> None:
    async with api() as here:
        await here.ask(CHAT, max_completion_tokens=9)
        both_names = await here.ask(CHAT, max_completion_tokens=9, max_tokens=9)
    assert here.request.max_new_tokens == 9
    assert problem(both_names, 400)["param"] == "max_tokens"


async def test_more_than_the_server_gives_is_refused() -> None:
    async with api(max_new_tokens=100) as here:
        error = problem(await here.ask(COMPLETIONS, max_tokens=101), 400)
    assert error["param"] == "max_tokens"
    assert "100" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODIES[CHAT] | {"max_tokens": 32_000}),
        (CHAT, BODIES[CHAT] | {"max_completion_tokens": 32_000}),
        ("/v1/messages", BODIES[CHAT] | {"max_tokens": 32_000}),
        ("/v1/responses", {"model": "fake", "input": "a", "max_output_tokens": 32_000}),
    ],
)
async def test_a_chats_limit_above_the_servers_is_the_servers(
    path: str, body: dict[str, Any]
) -> None:
    """Agents send what other models can give, whatever they are going to need."""
    async with api(max_new_tokens=100) as here:
        assert (await here.client.post(path, json=body)).status_code == 200
    assert here.request.max_new_tokens == 100


UNSET = (
    *("max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options"),
    *(
        "user",
        "logprobs",
        "top_k",
        "min_p",
        "typical_p",
        "top_n_sigma",
        "repetition_penalty",
        "presence_penalty",
    ),
    *("frequency_penalty", "logit_bias", "bad_words", "stop_token_ids", "min_tokens"),
    *("ignore_eos", "k_draft", "drafter", "adaptive", "guided_json", "response_format"),
)


@both
@pytest.mark.parametrize("body", [{"top_k": -1}, dict.fromkeys(UNSET)], ids=["-1", "null"])
async def test_what_other_servers_take_for_nothing_asks_for_nothing(
    path: str, body: dict[str, Any]
) -> None:
    async with api() as here:
        assert (await here.ask(path)).status_code == 200
        assert (await here.ask(path, **body)).status_code == 200
    plain, asked = here.service.requests
    named = {"request_id": "", "arrival": 0, "deadline": 0}
    assert replace(asked, **named) == replace(plain, **named)


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


@pytest.mark.parametrize("path", BODIES)
async def test_long_prompts_are_encoded_whole(path: str) -> None:
    text = "x" * 100_000
    messages = {"messages": [{"role": "user", "content": text}]}
    async with api() as here:
        await here.ask(path, **(messages if path == CHAT else {"prompt": text}))
    assert bytes(here.request.prompt_tokens).count(b"x") == 100_000


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
        handle = await here.service.submitted.get()
        handle.push(output("a"), to=1)
        handle.push(output("b"), to=0)
        handle.push(output("c", finish=FinishReason.LENGTH), to=1)
        handle.push(output("d", finish=FinishReason.STOP), to=0)
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


# -- models ------------------------------------------------------------------------------------


async def test_the_loaded_model_is_listed() -> None:
    async with api() as here:
        listed = (await here.client.get("/v1/models")).json()
        alone = (await here.client.get("/v1/models/fake")).json()
        other = await here.client.get("/v1/models/org/other")
    assert listed["object"] == "list"
    assert listed["data"] == [alone]
    assert (listed["first_id"], listed["has_more"]) == ("fake", False)
    created = datetime.fromisoformat(alone.pop("created_at"))
    assert alone.pop("created") == created.timestamp() > 0
    assert alone == {
        "id": "fake",
        "object": "model",
        "type": "model",
        "display_name": "fake",
        "max_model_len": 64,
        "owned_by": "specops",
        "context_length": 64,
        "quantization": "int8-128",
        "drafters": ["draft", "suffix", "none"],
        "chat": False,
        "batch_invariant": True,
        "foreign_products": [],
    }
    assert problem(other, 404)["code"] == "model_not_found"


async def test_models_before_one_is_loaded_are_503_and_no_refusal_is_counted() -> None:
    service = FakeService()
    service.info = None
    async with api(service) as here:
        problem(await here.client.get("/v1/models"), 503)
        problem(await here.ask(CHAT), 503)
    assert here.rejected("not_ready") == 1


async def test_the_description_knows_our_errors_alone() -> None:
    async with api() as here:
        text = (await here.client.get("/openapi.json")).text
    assert "HTTPValidationError" not in text
    paths = json.loads(text)["paths"]
    assert set(paths[CHAT]["post"]["responses"]) == {
        *("200", "400", "401", "404", "408", "413", "415", "429", "500", "503", "504")
    }
    assert "422" in paths["/generate"]["post"]["responses"]


class Waiting:
    """A template that renders when it may."""

    calls = thinking = None

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()

    def render(self, *_: Any) -> str:
        self.begun.set()
        assert self.may.wait(60)
        return "a"

    def begins_thinking(self, *_: Any) -> bool:
        return False


TALKS: dict[str, dict[str, Any]] = {
    CHAT: {},
    GENERATE: {"system": ""},
    "/v1/messages/count_tokens": BODIES[CHAT],
    "/apply-template": BODIES[CHAT],
}


@pytest.mark.parametrize("path", TALKS)
async def test_a_template_that_takes_long_holds_up_no_other_request(path: str) -> None:
    """However short its text is: templates come from strangers."""
    async with api() as here:
        template = Waiting()
        here.service.loaded.chat_template = template  # type: ignore[assignment]
        body = BODIES.get(path, {}) | TALKS[path]
        asked = asyncio.create_task(here.client.post(path, json=body))
        await asyncio.to_thread(template.begun.wait, 60)
        assert (await here.ask(COMPLETIONS)).status_code == 200
        assert not asked.done()
        template.may.set()
        assert (await asked).status_code == 200
