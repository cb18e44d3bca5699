"""The answers of /generate, completions and chats: their form, streams, choices, probabilities."""

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

import openai
import pytest

from specops.config import Settings
from specops.request import SUGGESTION, FinishReason, Logprob, Output, TokenOutput
from tests.asgi import AsgiClient
from tests.fakes import (
    BEGIN_TOKEN,
    FILE,
    MIDDLE,
    PREFIX,
    STATS,
    SUFFIX,
    FakeService,
    begun,
    fills_in,
    output,
)
from tests.http.chat_clients import Clients, clients
from tests.http.openai_api import BODIES, CHAT, COMPLETIONS, GENERATE, api, both, chunks
from tests.http.real_engine import served

pytestmark = pytest.mark.anyio
every = pytest.mark.parametrize("path", BODIES)
both_ways = pytest.mark.parametrize("stream", [False, True])
CHANGING = {"latency_ms", "request_id", "id", "created"}
TIMINGS = {
    "cache_n": 1, "prompt_n": 2, "prompt_ms": 500.0, "prompt_per_token_ms": 250.0,
    "prompt_per_second": 4.0, "predicted_n": 5, "predicted_ms": 2000.0,
    "predicted_per_token_ms": 500.0, "predicted_per_second": 2.0, "draft_n": 3,
    "draft_n_accepted": 2, "accepted_found_in": {"table": 2},
    "queue_ms": 250.0, "steps": 2, "tokens_per_step": 2.0, "drafter": "cascade",
}  # fmt: skip
FIGURES = {
    "model": "fake",
    "system_fingerprint": "specops-0.1.0-fake-int8-128-1",
    "timings": TIMINGS,
}
ANSWERS: dict[str, dict[str, Any]] = {
    GENERATE: {
        "generated_text": "Hello world", "tokens_per_second": 2.0, "avg_tokens_per_jump": 2.0,
        "finish_reason": "stop", "prompt_tokens": 3, "generated_tokens": 5,
    },
    COMPLETIONS: FIGURES | {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop",
                     "prompt_logprobs": None, "prompt_token_ids": None}],
        "usage": {
            "prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    },
    CHAT: FIGURES | {
        "object": "chat.completion", "prompt_logprobs": None,
        "choices": [{
            "index": 0, "logprobs": None, "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Hello world", "refusal": None,
                        "annotations": []},
        }],
        "usage": {
            "prompt_tokens": 21, "completion_tokens": 5, "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    },
}  # fmt: skip


@every
async def test_an_answer_has_its_form(path: str) -> None:
    async with api() as here:
        response = await here.ask(path)
    body = response.json()
    assert {name: value for name, value in body.items() if name not in CHANGING} == ANSWERS[path]
    assert body.get("request_id", body.get("id"))
    assert response.headers["x-request-id"] == body.get("request_id", here.request.client_id)


async def test_details_hold_every_figure() -> None:
    async with api() as here:
        body = (await here.generate(details=True, drafter="suffix", k_draft=4)).json()
    expected = json.loads(json.dumps(asdict(STATS))) | {  # tuples become lists
        "draft_tokens": 3, "accepted_tokens": 2, "accepted_per_position": [1, 1, 0],
        "tokens_per_jump": 2.0, "mean_acceptance_length": 3.0,
        "drafter": "suffix", "k_draft": 4, "adaptive": True,
    }  # fmt: skip
    del expected["sources"]["suffix"]["reached_per_position"]  # of `acceptance`
    expected["acceptance"] = {"suffix": [1.0, 1.0, 0.0]}
    assert {name: body["details"][name] for name in expected} == expected


# -- streams -------------------------------------------------------------------------------------


async def test_stream_brings_every_step_then_the_answer_then_done() -> None:
    async with api() as here:
        response = await here.generate(stream=True)
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    *steps, answer = chunks(response)
    assert [step["text"] for step in steps] == ["Hello", " wor", "ld"]
    assert [token for step in steps for token in step["tokens"]] == [
        {"id": ord("H"), "text": "Hel", "origin": "target"},
        {"id": ord("l"), "text": "lo", "origin": "target"},
        {"id": ord(" "), "text": " wor", "origin": "draft"},
        {"id": ord("l"), "text": "ld", "origin": "target"},
    ]
    assert answer["request_id"] == response.headers["x-request-id"]
    plain = {name: value for name, value in answer.items() if name not in CHANGING}
    assert plain == ANSWERS[GENERATE]


async def test_chat_stream_has_openais_form() -> None:
    async with api() as here:
        events = chunks(await here.ask(CHAT, stream=True, return_tokens=True))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {"content": " wor"},
        {"content": "ld"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert "usage" not in events[0]
    assert events[-1]["timings"] == TIMINGS
    sent = [token for choice in choices for token in choice.get("tokens", ())]
    assert [(token["text"], token["origin"]) for token in sent] == [
        *(("Hel", "target"), ("lo", "target"), (" wor", "draft"), ("ld", "target"))
    ]


PARTS = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
EIGHT: dict[str, Any] = {"messages": PARTS, "max_completion_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {}),
        (CHAT, {}),
        # As vllm/benchmarks/lib/endpoint_request_func.py builds them with --ignore-eos and the
        # sampling options, and guidellm/backends/openai.
        (CHAT, EIGHT | {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}),
        (COMPLETIONS, {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True}),
        (CHAT, EIGHT | {"stop": None}),
    ],
    ids=["text", "chat", "vllm, chat", "vllm, text", "guidellm, chat"],
)
async def test_usage_comes_last_where_it_is_asked_for(path: str, body: dict[str, Any]) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    async with api() as here:
        response = await here.ask(path, **body, **usage)
    *events, last = chunks(response)
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert (last["choices"], last["timings"]) == ([], TIMINGS)
    assert last["usage"] == ANSWERS[path]["usage"]


async def test_text_with_line_ends_is_still_one_event() -> None:
    text = "a\n\nb\r\u2028c"
    async with api(FakeService([output(text, finish=FinishReason.STOP)])) as here:
        assert chunks(await here.generate(stream=True))[0]["text"] == text


@every
async def test_a_token_is_sent_at_once_and_signs_of_life_come_between(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specops.http.answering.writer.HEARTBEAT_SECONDS", 0.01)
    async with api(FakeService()) as here, asyncio.timeout(60):
        client = AsgiClient(here.app, path).send_json(BODIES[path] | {"stream": True})
        handle = await here.service.submitted.get()
        sent = b""
        while sent.count(b": waiting\n\n") < 2:
            sent += (await client.next_message()).get("body", b"")
        handle.push(output("first"))
        while b"first" not in sent:
            sent += (await client.next_message()).get("body", b"")
        handle.push(output("last", finish=FinishReason.LENGTH))
        while not sent.endswith(b"data: [DONE]\n\n"):
            sent += (await client.next_message()).get("body", b"")
        await client.done
    assert b"last" in sent


# -- several prompts and choices -----------------------------------------------------------------


@both_ways
async def test_prompts_may_be_several_and_tokens_and_echoed(stream: bool) -> None:
    async with api() as here:
        for prompt in ("a", [97], ["a", "bc"], [[97], [98, 99]]):
            response = await here.ask(COMPLETIONS, prompt=prompt, echo=True, stream=stream)
            sent: dict[int, str] = {}
            for body in chunks(response) if stream else [response.json()]:
                for choice in body["choices"]:
                    sent[choice["index"]] = sent.get(choice["index"], "") + choice["text"]
            texts = ["a", "bc"] if len(prompt) > 1 else ["a"]
            assert sent == {index: f"{text}Hello world" for index, text in enumerate(texts)}
    asked = [request.prompt_tokens for request in here.service.requests]
    texts = [begun("a"), (97,), begun("a"), begun("bc"), (97,), (98, 99)]
    assert asked == texts  # who sends tokens sends those that begin a text


@both
async def test_choices_share_their_prompts_tokens(path: str) -> None:
    async with api() as here:
        body = (await here.ask(path, n=3)).json()
    one = {key: value for key, value in ANSWERS[path]["choices"][0].items() if key != "index"}
    assert body["choices"] == [one | {"index": index} for index in range(3)]
    assert body["usage"]["prompt_tokens"] == ANSWERS[path]["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == body["timings"]["predicted_n"] == 15


@both
async def test_choices_of_a_stream_come_as_they_come(path: str) -> None:
    async with api(FakeService()) as here:
        asking = asyncio.create_task(here.ask(path, n=2, stream=True))
        handle = await here.service.submitted.get()
        for index, text in ((1, "a"), (0, "b")):
            handle.push(output(text), to=index)
        handle.push(output("c", finish=FinishReason.LENGTH), to=1)
        handle.push(output("d", finish=FinishReason.STOP), to=0)
        events = chunks(await asking)
    choices = [choice for event in events for choice in event["choices"]]
    sent = [(item["index"], item.get("text") or item["delta"].get("content")) for item in choices]
    assert [item for item in sent if item[1]] == [(1, "a"), (0, "b"), (1, "c"), (0, "d")]
    reasons = [(item["index"], item["finish_reason"]) for item in choices if item["finish_reason"]]
    assert reasons == [(1, "length"), (0, "stop")]
    assert [bool(event.get("timings")) for event in events] == [False] * (len(events) - 1) + [True]


# -- probabilities -------------------------------------------------------------------------------

PIECES = (
    TokenOutput(97, "a", "target", Logprob(-0.5, ((97, -0.5), (98, -1.5)))),
    # Not among the likeliest:
    TokenOutput(98, "b", "draft", Logprob(-2.0, ((97, -0.25), (99, -1.5)))),
)


@both_ways
async def test_logprobs_have_openais_form(stream: bool) -> None:
    answer = replace(output(finish=FinishReason.STOP), pieces=PIECES)
    async with api(FakeService([answer])) as here:
        chat = await here.ask(CHAT, logprobs=True, top_logprobs=2, stream=stream)
        completion = await here.ask(COMPLETIONS, logprobs=2, stream=stream)
    assert [request.logprobs for request in here.service.requests] == [2, 2]
    sent = (chunks(chat)[1] if stream else chat.json())["choices"][0]["logprobs"]
    assert len(sent["content"]) == 2
    assert sent["content"][1] == {
        "token": "b", "logprob": -2.0, "bytes": [98],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "c", "logprob": -1.5, "bytes": [99]},
        ],
    }  # fmt: skip
    sent = (chunks(completion)[0] if stream else completion.json())["choices"][0]["logprobs"]
    assert sent == {
        "tokens": ["a", "b"], "token_logprobs": [-0.5, -2.0], "text_offset": [0, 1],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -2.0, "a": -0.25, "c": -1.5}],
    }  # fmt: skip


def scored(text: str, *values: float) -> Output:
    """A whole answer whose letters have these log-probabilities."""
    pieces = tuple(
        TokenOutput(ord(letter), letter, "target", Logprob(value, ()))
        for letter, value in zip(text, values, strict=True)
    )
    return Output("", pieces, FinishReason.STOP, STATS)


async def drawn(here: Clients, answers: list[Output], **body: Any) -> Any:
    """Ask for completions, whose choices get these answers."""
    ask = asyncio.create_task(here.openai.completions.create(model="fake", **body))
    handle = await here.service.submitted.get()
    assert len(handle.requests) == len(answers)
    for index, answer in enumerate(answers):
        handle.push(answer, to=index)
    return await ask


async def test_the_best_by_log_probability_per_token_are_returned_first() -> None:
    answers = [
        scored("aaa", -1, -1, -1),
        scored("b", -2),
        scored("cc", -0.5, -0.5),  # the best by tokens
        scored("d", -0.9),
        *(scored("wxyz"[index], -float(4 - index)) for index in range(4)),
    ]
    async with clients() as here:
        found = await drawn(here, answers, prompt=["p", "q"], n=2, best_of=4, seed=7)
        requests = list(here.service.requests)
        best = await drawn(
            here, [scored("a", -2), scored("b", -1)], prompt="p", best_of=2, logprobs=1
        )
        await drawn(here, [scored("a", -1)] * 2, prompt="p", best_of=2, n=2)
        assert here.request.logprobs is None  # none are asked for where nothing is left out
    assert [choice.text for choice in found.choices] == ["cc", "d", "z", "y"]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.logprobs for choice in found.choices} == {None}
    assert [item.sampling.seed for item in requests] == [7, 8, 9, 10] * 2
    assert found.usage.prompt_tokens == len(begun("p")) + len(begun("q"))
    assert found.usage.completion_tokens == 8 * STATS.generated_tokens  # all that were drawn
    assert best.choices[0].logprobs.token_logprobs == [-1]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_a_gap_is_filled_in_where_the_model_can(prompt: Any) -> None:
    async with clients() as here:
        here.service.loaded.tokenizer = fills_in()
        here.say("x")
        found = await here.openai.completions.create(
            model="fake", prompt=prompt, suffix="cd", stop="\n\n"
        )
    assert found.choices[0].text == "x"
    assert here.request.prompt_tokens == (BEGIN_TOKEN, PREFIX, *b"ab", SUFFIX, *b"cd", MIDDLE)
    assert here.request.stop_token_ids == (FILE,)
    assert here.request.stop == ("\n\n", "<file_sep>")
    assert here.request.priority == SUGGESTION


@both_ways
async def test_the_prompts_tokens_come_before_the_answers(stream: bool) -> None:
    sent = (
        None,
        Logprob(-3.0, ((97, -3.0),)),
        Logprob(-0.5, ((98, -0.5),)),
        Logprob(-1.5, ((97, -0.25),)),
    )
    first = Logprob(-2.0, ((120, -0.1),))
    answer = Output("", (TokenOutput(121, "y", "target", first),), None, None, prompt=sent)
    async with clients() as here:
        here.script([answer, output(finish=FinishReason.STOP)])
        found: Any = await here.openai.completions.create(
            model="fake", prompt="abc", echo=True, logprobs=1, stream=stream
        )
        parts = [part async for part in found] if stream else [found]
        assert here.request.prompt_logprobs == 1
        await here.openai.completions.create(model="fake", prompt="abc", logprobs=1)
        assert here.request.prompt_logprobs is None
    choice = next(part.choices[0] for part in parts if part.choices)
    assert choice.text == "abcy"
    assert choice.logprobs.tokens == ["<|begin|>", "a", "b", "c", "y"]
    assert choice.logprobs.token_logprobs == [None, -3.0, -0.5, -1.5, -2.0]
    assert choice.logprobs.top_logprobs == [
        None, {"a": -3.0}, {"b": -0.5}, {"c": -1.5, "a": -0.25}, {"y": -2.0, "x": -0.1},
    ]  # fmt: skip
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]  # the first has no text


async def test_a_text_is_scored_as_it_was_generated(tiny_settings: Settings) -> None:
    """By a real engine: bit for bit, and without a further token where none is asked for."""
    async with served(replace(tiny_settings, draft="none")) as client:
        name = (await client.models.list()).data[0].id
        prompt = "def add(a, b):\n    return"

        async def ask(prompt: str | list[int], **body: Any) -> Any:
            return await client.completions.create(
                model=name, prompt=prompt, logprobs=2, temperature=0, **body
            )

        made = await ask(prompt, max_tokens=30)
        (written,) = made.choices
        tokens = await _tokens(client, prompt)
        whole = [*tokens, *(await _tokens(client, written.text))]
        sent = (await ask(prompt, max_tokens=30, echo=True)).choices[0]
        read = await ask(whole, max_tokens=0, echo=True)
        again = await ask(whole, max_tokens=0, echo=True, n=2)
    count = len(tokens)
    assert sent.text == prompt + written.text
    assert sent.logprobs.token_logprobs[0] is None
    assert sent.logprobs.token_logprobs[count:] == written.logprobs.token_logprobs
    assert sent.logprobs.top_logprobs[count:] == written.logprobs.top_logprobs
    assert "".join(sent.logprobs.tokens[:count]) == prompt
    assert sent.logprobs.text_offset[:count] == [
        len("".join(sent.logprobs.tokens[:index])) for index in range(count)
    ]
    scores = read.choices[0].logprobs
    assert len(scores.tokens) == len(whole)
    assert scores.token_logprobs[:count] == sent.logprobs.token_logprobs[:count]
    assert (read.usage.completion_tokens, read.choices[0].finish_reason) == (0, "length")
    assert [choice.logprobs for choice in again.choices] == [scores] * 2


async def _tokens(client: openai.AsyncOpenAI, text: str) -> list[int]:
    answer: Any = await client.post(
        "http://test/tokenize", body={"content": text, "add_special": True}, cast_to=object
    )
    found: list[int] = answer["tokens"]
    return found
