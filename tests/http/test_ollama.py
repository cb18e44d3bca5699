"""Ollama's own client, and bodies that Go would read (the table of its calls: test_protocols)."""

import json
import re
from dataclasses import replace
from datetime import timedelta, timezone
from typing import Any

import numpy as np
import ollama
import pytest

from specops.request import FinishReason, Logprob, TokenOutput
from specops.sampling_defaults import SamplingDefaults
from specops.serving.admission import QueueFull
from specops.text.chat_template import ChatTemplate
from tests.fakes import BEGIN_TOKEN, INFO, STATS, output
from tests.http.chat_clients import ASK, CHAT_TOOLS, TEMPLATE, Clients, clients

pytestmark = pytest.mark.anyio
both_ways = pytest.mark.parametrize("stream", [False, True])
ASKED = [{"role": "user", "content": ASK}]
CHAT: dict[str, Any] = {"model": "fake", "messages": ASKED, "stream": False}
PROMPT: dict[str, Any] = {"model": "fake", "prompt": ASK, "stream": False}
BOTH = {"/api/chat": CHAT, "/api/generate": PROMPT}
both = pytest.mark.parametrize("path", BOTH)
VECTORS = np.array([[0.6, 0.8, 0, 0], [0, 1, 0, 0]], np.float32)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def lines(here: Clients, path: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's lines, as they are."""
    answer = await here.http.post(path, json={"model": "fake", **body})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@both_ways
async def test_a_chat_is_text_thoughts_and_calls(stream: bool) -> None:
    async with clients() as here:
        here.say("<think>hm", "</think>Hello", " world", CALL)
        answer: Any = await here.ollama.chat(
            "fake:latest", ASKED, tools=CHAT_TOOLS, stream=stream, think=True
        )
        parts = [part async for part in answer] if stream else [answer]
        (request,) = here.service.requests
    assert "".join(part.message.content for part in parts) == "Hello world"
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Zürich"})
    ]
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    last = parts[-1]
    assert (last.done_reason, last.model) == ("stop", "fake:latest")
    assert last.eval_count == STATS.generated_tokens
    assert last.eval_duration == round(STATS.decode_seconds * 1e9)
    assert last.prompt_eval_duration == round(STATS.prefill_seconds * 1e9)
    assert last.prompt_eval_count == len(request.prompt_tokens)
    assert request.sampling.temperature == 0.8
    assert (request.sampling.top_k, request.sampling.top_p) == (40, 0.9)


async def test_half_a_surrogate_pair_is_read_as_go_does() -> None:
    """A tool's result may be cut within an emoji."""
    body = rb'{"model": "fake", "%s": %s, "stream": false}'
    turns = rb'[{"role": "user", "content": "cut \ud83d here \ud83d\ude00"}]'
    async with clients() as here:
        here.say("a")
        for path, field, value in (
            ("/api/chat", b"messages", turns),
            ("/api/generate", b"prompt", rb'"cut \ud83d here \ud83d\ude00"'),
        ):
            answer = await here.http.post(path, content=body % (field, value))
            assert answer.status_code == 200, answer.text
            assert "cut \ufffd here \U0001f600" in here.prompt


async def test_the_version_is_one_that_has_responses() -> None:
    """`codex --oss` refuses older ones."""
    async with clients() as here:
        answer = await here.http.get("/api/version")
    assert tuple(map(int, answer.json()["version"].split("."))) >= (0, 13, 4)


async def test_the_models_defaults_are_shown() -> None:
    async with clients() as here:
        here.service.info = replace(INFO, sampling=SamplingDefaults(temperature=0.2, min_p=0.1))
        shown = await here.ollama.show("fake")
    sent = [line.split() for line in (shown.parameters or "").splitlines()]
    assert sent == [["temperature", "0.2"], ["min_p", "0.1"]]


async def test_results_follow_their_calls() -> None:
    called = [
        {"function": {"name": name, "arguments": {"city": city}}}
        for name, city in (("get_weather", "Bern"), ("search", "Genf"), ("get_weather", "Chur"))
    ]
    results = [
        {"role": "tool", "tool_name": name, "content": text}
        for name, text in (("search", "lake"), ("get_weather", "rain"), ("get_weather", "sun"))
    ]
    template = f"{TEMPLATE}{{% for m in messages %}}{{{{ m.tool_call_id }}}};{{% endfor %}}"
    turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": called}, *results]
    async with clients(template) as here:
        here.say("ok")
        here.service.info = replace(INFO, context=4096)
        await here.ollama.chat("fake", turns)
        assert here.prompt.endswith(";;000000001;000000002;000000003;")
        assert re.search(r"tool\nrain.*tool\nlake.*tool\nsun", here.prompt, re.DOTALL)
        # One result more than there were calls, and those whose calls were left out.
        await here.ollama.chat("fake", [*turns, results[0]])
        assert here.prompt.endswith(";000000003;000000004;")
        await here.ollama.chat("fake", [*ASKED, *results])
        assert "lake" in here.prompt
        assert here.prompt.endswith("\n;000000001;000000002;000000003;")


@both_ways
async def test_a_prompt_is_answered_or_continued(stream: bool) -> None:
    async with clients() as here:
        here.say("Hel", "lo")
        for chat, fields, expected in (
            (False, {}, "Hi"),
            (True, {"raw": True}, "Hi"),
            (True, {"system": "Be brief."}, "Be brief."),
            (True, {}, "assistant"),
        ):
            here.service.info = replace(INFO, chat=chat)
            answer: Any = await here.ollama.generate("fake", "Hi", stream=stream, **fields)
            parts = [part async for part in answer] if stream else [answer]
            assert "".join(part.response for part in parts) == "Hello"
            assert parts[-1].done_reason == "stop"
            assert expected in here.prompt
            assert (here.prompt == "Hi") is (expected == "Hi")


async def test_an_answer_follows_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with clients("{{ messages[0].content }}") as here:
        here.say('{"a": 1}')
        for form in (schema, "json"):
            await here.ollama.chat("fake", ASKED, format=form)
        by_schema, any_object = (request.sampling.grammar for request in here.service.requests)
        assert by_schema is not None
        assert any_object is not None
        assert json.loads(by_schema.text) == schema
        assert any_object.text == '{"type":"object"}'
        with pytest.raises(ollama.ResponseError, match="cannot be combined"):
            await here.ollama.chat("fake", ASKED, format="json", options={"guided_regex": "a"})


async def test_nothing_asked_is_a_model_that_is_loaded() -> None:
    async with clients() as here:
        chat = await here.ollama.chat("fake")
        prompt = await here.ollama.generate("fake", keep_alive=-1)
        assert (chat.message.content, prompt.response) == ("", "")
        assert (chat.done_reason, prompt.done_reason) == ("load", "load")
        for kept, reason in (
            *((zero, "unload") for zero in (0, 0.0, "0", "0s", "0h0m0s", "0.0m")),
            *((more, "load") for more in (5, "5m", "1h0m", -1, "-1s", "10s", None, 0.5)),
        ):
            for path in ("/api/chat", "/api/generate"):
                sent = await here.http.post(path, json={"model": "fake", "keep_alive": kept})
                assert sent.json()["done_reason"] == reason, (path, kept)
                assert sent.json()["done"] is True
        assert (await here.ollama.embed("fake", "")).embeddings == []
        assert (await here.ollama.embed("fake", [])).embeddings == []
        assert (await here.ollama.embeddings("fake", "")).embedding == []
        assert here.service.requests == []


async def test_the_served_model_is_described() -> None:
    async with clients() as here:
        here.service.info = replace(INFO, chat=True, weight_bytes=5)
        here.service.loaded.chat_template = ChatTemplate(f"{TEMPLATE}<tool_call> </think>", {})
        (listed,) = (await here.ollama.list()).models
        (running,) = (await here.ollama.ps()).models
        shown = await here.ollama.show("fake:latest")
        version = (await here.http.get("/api/version")).json()["version"]
    assert (listed.model, running.name, listed.size) == ("fake:latest", "fake:latest", 5)
    assert running.expires_at is not None
    assert running.expires_at.astimezone(timezone(timedelta(hours=14))).year > 2100
    assert listed.digest == running.digest
    assert len(listed.digest or "") == 64
    assert listed.details is not None
    assert listed.details.parameter_size == "8.0M"
    assert listed.details.quantization_level == "int8-128"
    assert running.context_length == 64
    assert shown.modelinfo["specops.context_length"] == 64
    assert shown.modelinfo["general.architecture"] == "specops"
    assert shown.modelinfo["general.basename"] == "fake"
    assert shown.template == f"{TEMPLATE}<tool_call> </think>"
    assert f'TEMPLATE """{shown.template}"""' in (shown.modelfile or "")
    assert shown.capabilities == ["completion", "tools", "thinking", "embedding"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


async def test_texts_are_embedded_and_cut_to_the_context() -> None:
    async with clients() as here:
        here.script([replace(output(finish=FinishReason.STOP), embeddings=VECTORS)])
        found = await here.ollama.embed("fake", ["ab", "c" * 99])
        old = await here.ollama.embeddings("fake", "ab")
        here.script([replace(output(finish=FinishReason.STOP), embeddings=VECTORS.copy())])
        short = await here.ollama.embed("fake", ["ab", "c"], dimensions=2)
        whole = await here.ollama.embed("fake", ["ab", "c"], dimensions=9)
    assert np.array(found.embeddings, np.float32).tolist() == VECTORS.tolist()
    assert np.array(old.embedding, np.float32).tolist() == VECTORS[0].tolist()
    assert np.allclose(np.array(short.embeddings), VECTORS[:, :2])
    assert np.array(whole.embeddings).shape == (2, 4)
    first = here.service.requests[0]
    assert [len(first.prompt_tokens), *map(len, first.more_prompts)] == [3, 64]
    assert found.prompt_eval_count == 67


@both_ways
async def test_errors_are_the_librarys_own(stream: bool) -> None:
    async def ask(here: Clients, **fields: Any) -> None:
        answer: Any = await here.ollama.chat(
            **{"model": "fake", "messages": ASKED} | fields, stream=stream
        )
        if stream:
            async for _ in answer:
                pass

    async with clients(unknown_model="refuse") as here:
        with pytest.raises(ollama.ResponseError, match=r"not found.*fake:latest") as unknown:
            await ask(here, model="other")
        with pytest.raises(ollama.ResponseError, match="temperature: ") as wrong:
            await ask(here, options={"temperature": "9"})
        here.service.refusal = QueueFull(3)
        with pytest.raises(ollama.ResponseError, match="full") as full:
            await ask(here)
        here.service.refusal = None
        here.script([output("a"), output(finish=FinishReason.TIMEOUT)])
        with pytest.raises(ollama.ResponseError, match=r"not (finished|started) within"):
            await ask(here)
    found = [error.value.status_code for error in (unknown, wrong, full)]
    assert found == [404, 400, 429]


async def test_an_error_in_the_midst_of_a_stream_is_its_last_line() -> None:
    async with clients() as here:
        here.script([output("a"), output(finish=FinishReason.ERROR)])
        sent = await lines(here, "/api/generate", prompt="a", raw=True)
    assert sent[0]["response"] == "a"
    assert list(sent[-1]) == ["error"]


# -- bodies as Go reads them -----------------------------------------------------------------------


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
        with pytest.raises(ollama.ResponseError, match="context: token 264 is not in the vocab"):
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
        TokenOutput(token, text, "target", Logprob(-0.5, ((token, -0.5), (66, -1.5))))
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
