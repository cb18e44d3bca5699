"""Ollama's endpoints take what Ollama takes: Go reads its bodies, and llama.cpp its options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import ollama
import pytest

from specops.request import FinishReason, Logprob, Piece
from tests.fakes import BEGIN_TOKEN, INFO, output
from tests.http.chat_clients import ASK, TEMPLATE, Clients, clients

pytestmark = pytest.mark.anyio
ASKED = [{"role": "user", "content": ASK}]
CHAT: dict[str, Any] = {"model": "fake", "messages": ASKED, "stream": False}
PROMPT: dict[str, Any] = {"model": "fake", "prompt": ASK, "stream": False}
BOTH = {"/api/chat": CHAT, "/api/generate": PROMPT}
both = pytest.mark.parametrize("path", BOTH)
both_ways = pytest.mark.parametrize("stream", [False, True])
TINY = pytest.approx(0, abs=1e-6)
VECTORS = np.array([[0.6, 0.8, 0, 0]], np.float32)


@pytest.mark.parametrize("name", ["fake", "fake:latest", "Fake:Latest"])
async def test_every_endpoint_takes_every_name(name: str) -> None:
    async with clients(unknown_model="refuse") as here:
        here.script([replace(output("a", finish=FinishReason.STOP), embeddings=VECTORS)])
        for path, body in {
            **BOTH,
            "/api/show": {},
            "/api/embed": {"input": "a"},
            "/api/embeddings": {"prompt": "a"},
            "/api/pull": {"stream": False},
        }.items():
            given = {key: value for key, value in body.items() if key != "model"}
            for field in ("model", "name", "Model"):
                answer = await here.http.post(path, json=given | {field: name})
                assert answer.status_code == 200, (path, field, answer.text)
                assert answer.json().get("model", name) == name
            none = await here.http.post(path, json=given)
            assert (none.status_code, none.json()["error"]) == (400, "model is required")
            other = await here.http.post(path, json=given | {"model": f"{name}:8b"})
            assert other.status_code == 404
            assert "not found" in other.json()["error"]


async def test_clients_that_only_look_ask_by_head() -> None:
    async with clients() as here:
        for path in ("/", "/api/tags", "/api/version"):
            assert (await here.http.head(path)).status_code == 200


@both_ways
async def test_a_model_that_is_here_is_pulled_at_once(stream: bool) -> None:
    async with clients() as here:
        answer: Any = await here.ollama.pull("fake", stream=stream)
        parts = [part async for part in answer] if stream else [answer]
        assert parts[-1].status == "success"
        with pytest.raises(ollama.ResponseError, match="not found"):
            await here.ollama.pull("another")


async def test_messages_are_as_lenient() -> None:
    turns: list[dict[str, Any]] = [
        {"Role": "System", "Content": "Be kind."},
        {"role": "USER", "content": "one", "images": None, "tool_calls": None},
        {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"index": 0, "name": "a b", "arguments": '{"city": "Bern"}'}},
            {"function": {"name": "f", "arguments": None}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "function", "tool_name": "g", "content": "sun"},
        {"role": "assistant", "content": None},
        {"role": "control", "content": "thinking", "extra": 1},
        {"role": "user", "content": "two"},
    ]  # fmt: skip
    async with clients() as here:
        here.say("a")
        here.service.info = replace(INFO, context=4096)
        answer = await here.http.post("/api/chat", json=CHAT | {"messages": turns})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == "messages.extra"
    turns_of = re.findall(r"<\|im_start\|>(\w+)\s+(\w+)", here.prompt)
    for spoken in (("system", "Be"), ("user", "one"), ("tool", "rain"), ("tool", "sun")):
        assert spoken in turns_of
    assert ("control", "thinking") in turns_of
    assert '"name": "a b", "arguments": {"city": "Bern"}' in here.prompt


async def test_a_tool_needs_no_type() -> None:
    tools: list[dict[str, Any]] = [
        {"function": {"name": "f", "description": None, "parameters": None}},
        {"type": "web_search"},
    ]
    async with clients() as here:
        here.say('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
        answer = await here.http.post("/api/chat", json=CHAT | {"tools": tools})
    (call,) = answer.json()["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}}
    assert call["id"]
    assert answer.headers["x-ignored-fields"] == "tools.web_search"


# -- context -------------------------------------------------------------------------------------


@both_ways
async def test_a_conversation_is_continued_by_its_context(stream: bool) -> None:
    async with clients() as here:
        here.service.info = replace(INFO, chat=True, system="Be kind.", context=4096)
        here.script([output("B"), output("Y"), output("", finish=FinishReason.STOP)])
        first: Any = await here.ollama.generate("fake", "one", system="Be brief.", stream=stream)
        last = [part async for part in first][-1] if stream else first
        begin, *said = last.context
        assert (begin, bytes(said).decode()) == (BEGIN_TOKEN, here.prompt + "BY")
        assert "Be brief." in here.prompt
        await here.ollama.generate("fake", "two", context=last.context, system="Be brief.")
        whole = here.prompt
        turns = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "BY"},
            {"role": "user", "content": "two"},
        ]
        await here.ollama.chat("fake", turns)
        assert whole == here.prompt


async def test_a_text_is_continued_by_its_context_and_raw_has_none() -> None:
    async with clients() as here:
        here.script([output("B"), output(finish=FinishReason.STOP)])
        first = await here.ollama.generate("fake", "A")
        assert first.context == [BEGIN_TOKEN, 65, 66]
        await here.ollama.generate("fake", "C", context=first.context)
        assert here.prompt == "ABC"
        raw = await here.ollama.generate("fake", "A", raw=True)
        assert raw.context is None
        for fields in ({"context": [65]}, {"system": "a"}):
            with pytest.raises(ollama.ResponseError, match="raw: cannot be combined with"):
                await here.ollama.generate("fake", "A", raw=True, **fields)  # type: ignore[call-overload]
        with pytest.raises(ollama.ResponseError, match="context: token 264 is out of vocabulary"):
            await here.ollama.generate("fake", "A", context=[INFO.vocab_size])


async def test_a_template_that_hides_answers_takes_no_context() -> None:
    async with clients("{{ messages[-1].content }}") as here:
        here.say("a")
        here.service.info = replace(INFO, chat=True)
        with pytest.raises(ollama.ResponseError, match="leaves out earlier answers"):
            await here.ollama.generate("fake", "A", context=[65])


# -- too long conversations ----------------------------------------------------------------------

LINES = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


async def kept(here: Clients, *turns: dict[str, Any], **fields: Any) -> list[str]:
    """The messages that the prompt has, by the first letter of their role and their text."""
    here.say("a")
    answer = await here.http.post("/api/chat", json=CHAT | {"messages": turns} | fields)
    assert answer.status_code == 200, answer.text
    count = len(turns) - len(here.prompt.splitlines())
    ignored = answer.headers.get("x-ignored-fields")
    assert ignored == (f"messages[0:{count}]" if count else None)
    return here.prompt.splitlines()


async def test_the_oldest_messages_of_a_long_conversation_are_left_out() -> None:
    chat = [turn("user", "1" * 9), turn("assistant", "2" * 9), turn("user", "3" * 9)]
    chat += [turn("assistant", "4" * 9), turn("user", "5" * 9)]
    system = turn("system", "S" * 9)
    async with clients(LINES) as here:  # 64 tokens, 16 of them for the answer
        here.service.info = replace(INFO, context=64)
        assert await kept(here, *chat[:3]) == ["u111111111", "a222222222", "u333333333"]
        assert await kept(here, *chat) == ["u333333333", "a444444444", "u555555555"]
        sent = await kept(here, system, *chat)
        assert sent == ["sSSSSSSSSS", "u333333333", "a444444444", "u555555555"]
        assert await kept(here, *chat, options={"num_predict": 10}) == sent[1:]
        whole = await kept(here, *chat[:-1], options={"num_predict": 4})
        assert [line[1] for line in whole] == ["1", "2", "3", "4"]
        assert await kept(here, *chat[:4], turn("user", "5" * 50)) == ["u" + "5" * 50]
        here.service.info = replace(INFO, context=64, system="D" * 9)
        assert (await here.http.post("/api/chat", json=CHAT | {"messages": chat})).is_success
        assert here.prompt.splitlines() == ["sDDDDDDDDD", *sent[1:]]


async def test_of_an_agents_steps_the_oldest_are_left_out_and_the_question_stays() -> None:
    steps = [
        message
        for number in "1234"
        for message in (turn("assistant", number * 4), turn("tool", number * 4))
    ]
    chat = [turn("user", "old"), turn("assistant", "old"), turn("user", "Q" * 9), *steps]
    async with clients() as here:
        here.say("a")
        here.service.info = replace(INFO, context=320)
        answer = await here.http.post("/api/chat", json=CHAT | {"messages": chat})
    roles = re.findall(r"start\|>(\w+)", here.prompt)
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert re.findall(r"Q{9}|[1-4]{4}|old", here.prompt) == [
        "Q" * 9,
        *["3333", "3333", "4444", "4444"],
    ]
    assert answer.headers["x-ignored-fields"] == "messages[0:6]"
    assert len(here.request.prompt_tokens) <= 320 - 80


async def test_nothing_is_left_out_unless_the_client_allows_it() -> None:
    chat = [turn("user", "1" * 50), turn("assistant", "2"), turn("user", "3" * 20)]
    async with clients(LINES) as here:
        here.say("a")
        await here.http.post("/api/chat", json=CHAT | {"messages": chat, "truncate": False})
        assert len(here.request.prompt_tokens) == 78  # which the engine refuses


# -- probabilities -------------------------------------------------------------------------------


@both
@both_ways
async def test_probabilities_are_returned(path: str, stream: bool) -> None:
    pieces = tuple(
        Piece(token, text, "target", Logprob(-0.5, ((token, -0.5), (66, -1.5))))
        for token, text in ((65, ""), (66, "AB"))
    )
    async with clients() as here:
        here.script(
            [
                *(replace(output(), pieces=(one,)) for one in pieces),
                output(finish=FinishReason.STOP),
            ]
        )
        fields = {"logprobs": True, "top_logprobs": 2, "stream": stream}
        answer = await here.http.post(path, json=BOTH[path] | fields)
        assert here.request.logprobs == 2
        plain = await here.http.post(path, json=BOTH[path] | {"top_logprobs": 2})
        assert here.request.logprobs is None
    sent = [json.loads(line) for line in answer.text.splitlines()]
    found = [item for line in sent for item in line.get("logprobs", ())]
    first = {"token": "A", "logprob": -0.5, "bytes": [65]}
    second = {"token": "B", "logprob": -1.5, "bytes": [66]}
    assert found[0] == first | {"top_logprobs": [first, second]}
    assert len(found) == 2
    assert plain.status_code == 200


async def test_the_system_message_is_reported() -> None:
    async with clients(TEMPLATE) as here:
        here.service.info = replace(INFO, chat=True, system="Be kind.")
        shown = (await here.http.post("/api/show", json={"model": "fake", "verbose": True})).json()
        here.say("a")
        await here.ollama.chat("fake", ASKED)
        assert "Be kind." in here.prompt
        await here.ollama.generate("fake", "Hi")
        assert "Be kind." in here.prompt
        await here.ollama.generate("fake", "Hi", system="Be brief.")
        assert "Be kind." not in here.prompt
    assert shown["system"] == "Be kind."
    assert 'SYSTEM """Be kind."""' in shown["modelfile"]
