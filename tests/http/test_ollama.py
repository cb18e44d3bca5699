"""Ollama's own client: its answers, streams and errors (the table of its calls: test_protocols)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta, timezone
from typing import Any

import numpy as np
import ollama
import pytest

from specops.request import FinishReason
from specops.sampling_defaults import SamplingDefaults
from specops.serving.admission import QueueFull
from specops.text.chat_template import ChatTemplate
from tests.fakes import INFO, STATS, output
from tests.http.chat_clients import ASK, CHAT_TOOLS, TEMPLATE, Clients, clients

pytestmark = pytest.mark.anyio
both_ways = pytest.mark.parametrize("stream", [False, True])
ASKED = [{"role": "user", "content": ASK}]
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


async def test_options_may_stand_in_options_or_beside_it() -> None:
    options = {"temperature": 0, "num_predict": 3, "stop": ["x"], "seed": 7, "repeat_penalty": 1.2}
    async with clients(max_new_tokens=20) as here:
        here.say("a")
        await here.ollama.chat("fake", ASKED, options=options | {"k_draft": 2})
        await lines(here, "/api/chat", messages=ASKED, **options, k_draft=2)
        first, second = here.service.requests
        await here.ollama.chat("fake", ASKED, options={"num_predict": -1, "seed": -1})
    assert (here.request.max_new_tokens, here.request.sampling.seed) == (20, None)
    assert first.sampling == second.sampling
    assert (first.sampling.temperature, first.sampling.repetition_penalty) == (0, 1.2)
    assert (first.max_new_tokens, first.stop, first.sampling.seed) == (3, ("x",), 7)
    assert (first.k_draft, second.k_draft) == (2, 2)


async def test_the_models_defaults_go_before_ollamas() -> None:
    async with clients() as here:
        here.say("a")
        here.service.info = replace(INFO, sampling=SamplingDefaults(temperature=0.2, min_p=0.1))
        await here.ollama.chat("fake", ASKED)
        drawn = here.request.sampling
        assert (drawn.temperature, drawn.min_p, drawn.top_k, drawn.top_p) == (0.2, 0.1, 40, 0.9)
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
        assert (await here.http.head("/")).status_code == 200
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
