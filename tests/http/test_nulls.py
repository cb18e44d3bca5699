"""Which fields of answers are null: those that the official services send as null, and no others.

Clients validate answers. A field that may be missing need not be allowed to be null: the Vercel AI
SDK, for example, throws an answer of `/v1/messages` away whose text has `"citations": null`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from specops.request import FinishReason, Logprob, Output, PromptTooLong, TokenOutput
from tests.fakes import output
from tests.http.chat_clients import CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS, clients
from tests.http.openai_api import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS, MESSAGES, RESPONSES

pytestmark = pytest.mark.anyio
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "a"}}</tool_call>'
ANSWER = ("<think>hm", "</think>Hel", "lo", CALL)
ASKED_OLLAMA = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
USAGE = {"stream_options": {"include_usage": True}}
FORM = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}

# An unfinished answer of /v1/responses; a finished one has a usage and the time of its end.
_BEGUN = {
    *("error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "reasoning.effort", "reasoning.summary"),
    *("safety_identifier", "user", "usage", "completed_at"),
}
_ENDED = _BEGUN - {"usage", "completed_at"}
_FORMED = {"text.format.description", "text.format.strict"}
_VLLM = {"prompt_logprobs", "prompt_token_ids"}  # its clients read them unasked
_MODEL = {"line", "deprecated_at", "retires_at"}


def _within(prefix: str, names: set[str]) -> set[str]:
    return {f"{prefix}.{name}" for name in names}


ASKED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "completion": (COMPLETIONS, {}, {"choices.logprobs", *_within("choices", _VLLM)}),
    "streamed completion": (COMPLETIONS, {"stream": True, **USAGE},
        {"choices.logprobs", "choices.finish_reason", "usage"}),
    "chat": (CHAT, {"tools": CHAT_TOOLS},
        {"choices.message.refusal", "choices.logprobs", "prompt_logprobs"}),
    "streamed chat": (CHAT, {"tools": CHAT_TOOLS, "stream": True},
        {"choices.delta.refusal", "choices.logprobs", "choices.finish_reason"}),
    "streamed chat with its usage": (CHAT, {"stream": True, **USAGE},
        {"choices.delta.refusal", "choices.logprobs", "choices.finish_reason", "usage"}),
    "messages": (MESSAGES, {"tools": MESSAGES_TOOLS}, {"stop_sequence"}),
    "streamed messages": (MESSAGES, {"tools": MESSAGES_TOOLS, "stream": True},
        {"message.stop_reason", "message.stop_sequence", "delta.stop_sequence"}),
    "response": (RESPONSES, {"tools": RESPONSES_TOOLS}, _ENDED | {"tools.description"}),
    "response with a form": (RESPONSES, {"text": {"format": FORM}}, _ENDED | _FORMED),
    "streamed response": (RESPONSES, {"tools": RESPONSES_TOOLS, "stream": True},
        _within("response", _BEGUN | {"tools.description"})),
    "embeddings": (EMBEDDINGS, {}, set()),
    **{
        f"ollama {path} {fields}": (path, fields, set())
        for path, fields in (
            ("/api/chat", ASKED_OLLAMA | {"tools": CHAT_TOOLS}),
            ("/api/chat", ASKED_OLLAMA | {"tools": CHAT_TOOLS, "stream": False}),
            ("/api/chat", {"model": "fake", "messages": []}),
            ("/api/generate", {"model": "fake", "prompt": "a"}),
            ("/api/generate", {"model": "fake", "prompt": "a", "stream": False}),
            ("/api/embed", {"model": "fake", "input": "a"}),
            ("/api/embeddings", {"model": "fake", "prompt": "a"}),
            ("/api/show", {"model": "fake"}),
        )
    },
}  # fmt: skip


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all nulls; the items of a list share one."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from nulls(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from nulls(inner, path)


def sent(answer: httpx.Response) -> list[Any]:
    """The JSON of an answer, or of each event or line of a stream."""
    kind = answer.headers["content-type"]
    if kind.startswith("application/x-ndjson"):
        return [json.loads(line) for line in answer.text.splitlines()]
    if not kind.startswith("text/event-stream"):
        return [answer.json()]
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


def found(answer: httpx.Response) -> set[str]:
    return {path for value in sent(answer) for path in nulls(value)}


@pytest.mark.parametrize("what", ASKED)
async def test_what_is_null_is_null_at_the_official_service(what: str) -> None:
    path, fields, expected = ASKED[what]
    async with clients() as here:
        last = replace(output(finish=FinishReason.STOP), embeddings=np.ones((1, 4), np.float32))
        here.script([*(output(piece) for piece in ANSWER), last])
        answer = await here.http.post(path, json=ENDPOINTS.get(path, {}) | fields)
    assert answer.status_code == 200, answer.text
    assert found(answer) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities_have_no_other_nulls(stream: bool) -> None:
    piece = TokenOutput(97, "a", "target", Logprob(-0.5, ((97, -0.5),)))
    async with clients() as here:
        here.script([Output("", (piece,), None, None), output(finish=FinishReason.STOP)])
        fields = {"logprobs": True, "top_logprobs": 1, "stream": stream}
        answer = await here.http.post(CHAT, json=ENDPOINTS[CHAT] | fields)
    # Chunks without tokens have no probabilities.
    more = {"choices.finish_reason", "choices.logprobs", "choices.delta.refusal"}
    own = {"choices.logprobs.refusal"}
    assert found(answer) == own | (
        more if stream else {"choices.message.refusal", "prompt_logprobs"}
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_fails_says_why_and_has_no_usage(stream: bool) -> None:
    async with clients() as here:
        here.script([output("a"), output(finish=FinishReason.TIMEOUT)])
        answer = await here.http.post(RESPONSES, json=ENDPOINTS[RESPONSES] | {"stream": stream})
    if stream:
        assert set(nulls(sent(answer)[-1])) == _within("response", _BEGUN - {"error"})
    else:
        assert found(answer) == {"error.param"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS])
async def test_errors_have_openais_nulls_and_none_of_anthropics(path: str) -> None:
    async with clients() as here:
        here.service.refusal = PromptTooLong(99, 64)
        long = await here.http.post(path, json=ENDPOINTS[path])
        here.service.refusal = RuntimeError("unforeseen")
        failed = await here.http.post(path, json=ENDPOINTS[path])
    assert (long.status_code, failed.status_code) == (400, 500)
    assert found(long) == set()
    assert found(failed) == (set() if path == MESSAGES else {"error.param"})


async def test_the_model_has_anthropics_nulls() -> None:
    async with clients() as here:
        listed = await here.http.get("/v1/models")
        alone = await here.http.get("/v1/models/fake")
    assert found(alone) == _MODEL
    assert found(listed) == _within("data", _MODEL)


async def test_a_count_of_tokens_has_none() -> None:
    body = {name: value for name, value in ENDPOINTS[MESSAGES].items() if name != "max_tokens"}
    async with clients() as here:
        answer = await here.http.post(f"{MESSAGES}/count_tokens", json=body)
    assert (list(answer.json()), found(answer)) == (["input_tokens"], set())
