"""A body that is wrong in a thousand places, or long, costs other requests nothing."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specops.config import Settings
from specops.http.answering import submit
from specops.http.answering.schema import Body
from specops.http.answering.writer import json_of
from specops.http.app import create_app
from specops.request import FinishReason, Logprob, TokenOutput
from specops.text.json_values import MAX_PARTS, MAX_VALUES, TooManyParts, check_parts, loads
from tests.asgi import AsgiClient
from tests.fakes import FakeService, Waiting, fills_in, output
from tests.http.costly import USUAL, LongestCallback, of_fields, of_structure, value
from tests.http.openai_api import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    api,
    problem,
)
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio


def answering() -> FakeService:
    """A service whose answers suit every endpoint, with a model that fills in."""
    service = FakeService(EMBEDDED)
    service.loaded.tokenizer = fills_in()
    return service


MANY = 15_000
AS_JSON = {"content-type": "application/json"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [1] * MANY}
COSTLY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [1] * MANY}),
    (CHAT, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (CHAT, {"stop": [1] * MANY}),
    (MESSAGES, {"messages": [{"role": "user", "content": [RESULT]}]}),
    (MESSAGES, {"stop_sequences": [""] * MANY}),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": [1] * MANY}]}),
    (GENERATE, {"logit_bias": {str(number): "" for number in range(MANY)}}),
    (GENERATE, {"bad_words": [1] * MANY}),
    (GENERATE, {"stop_token_ids": [""] * MANY}),
    (COMPLETIONS, {"prompt": [""] * MANY}),
]


@pytest.mark.parametrize(("path", "fields"), COSTLY)
async def test_a_body_with_thousands_of_mistakes_is_refused_for_the_first(
    path: str, fields: dict[str, Any]
) -> None:
    async with api() as here:
        answer = await here.ask(path, **fields)
    error = problem(answer, 422 if path == GENERATE else 400)
    assert len(error["message"]) < 2_000


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """All lists and objects of any length within a pydantic schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict") and "schema_ref" not in schema:
            yield schema
        for value in schema.values():
            yield from lists(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from lists(value)


def bodies(base: type[Body]) -> Iterator[type[Body]]:
    for body in base.__subclasses__():
        yield body
        yield from bodies(body)


def test_every_list_of_a_body_ends_its_check_at_the_first_mistake_or_is_short() -> None:
    create_app(Settings(), FakeService())  # type: ignore[arg-type] - imports all bodies
    seen = 0
    for body in set(bodies(Body)):
        for schema in lists(body.__pydantic_core_schema__):
            if schema["type"] == "list":
                seen += 1
                bounded = schema.get("max_length", MANY) <= 128
                assert schema.get("fail_fast") or bounded, f"{body.__name__}: {schema}"
    assert seen > 20


async def test_as_many_items_are_taken_as_a_body_has_room_for_messages() -> None:
    most = MAX_PARTS // 3
    item = {"role": "user", "content": "a"}
    async with api() as here:
        assert (await here.ask(RESPONSES, input=[item] * (most - 10))).status_code == 200
        error = problem(await here.ask(RESPONSES, input=[{}] * (most + 1)), 400)
    assert error["param"] == "input"
    assert f"at most {most} items" in error["message"]


@pytest.mark.parametrize("name", ["9" * 5_000, "9" * 11, "x" * 300])
async def test_a_bias_for_what_cannot_be_a_token_is_refused(name: str) -> None:
    async with api() as here:
        error = problem(await here.generate(logit_bias={name: 1}), 422)
    assert error["param"] == "logit_bias"


@pytest.mark.parametrize("path", USUAL)
async def test_numbers_have_so_many_digits_as_are_read_at_once(path: str) -> None:
    async with api(answering()) as here:
        for digits, status in ((640, 200), (641, 400)):
            body = json.dumps(USUAL[path])[:-1] + f', "unknown": {"9" * digits}}}'
            answer = await here.client.post(path, content=body, headers=AS_JSON)
            assert answer.status_code == status, answer.text
            assert len(answer.content) < 2_000
    assert "640" in answer.text


LONG: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"content": "a" * 5_000}),
    ("/detokenize", {"tokens": [1] * 5_000}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": BODIES[CHAT]["messages"]}),
    ("/apply-template", {"messages": BODIES[CHAT]["messages"]}),
]


async def test_long_texts_beside_the_queue_are_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "_MAX_ASIDE_EACH", 8 * submit._MIN_ASIDE)
    async with api() as here:
        here.service.loaded.tokenizer = slow = Waiting()  # type: ignore[assignment]
        (path, body), *_, (short, conversation) = LONG
        asked = [asyncio.create_task(here.client.post(path, json=body)) for _ in range(8)]
        await asyncio.to_thread(slow.begun.wait, 60)
        async with asyncio.timeout(PATIENCE):
            while (await here.client.post(short, json=conversation)).status_code != 503:
                pass  # not all of them have come to where they wait
        for other, fields in LONG:
            refused = await here.client.post(other, json=fields)
            assert refused.status_code == 503, other
            assert refused.headers["retry-after"]
        assert (await here.ask(COMPLETIONS, prompt=[1])).status_code == 200
        slow.may.set()
        assert {(await task).status_code for task in asked} == {200}
        assert (await here.client.post(path, json=body)).status_code == 200


async def test_a_grammar_that_waits_for_others_is_no_mistake_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with api() as here:
        here.service.loaded.grammars = compiler = Waiting()  # type: ignore[assignment]
        asking = [here.ask(COMPLETIONS, guided_regex="a") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(submit, "COMPILE_SECONDS", 0.05)
            answers = await asyncio.gather(*asking)
        for answer in answers:
            assert problem(answer, 503)["code"] == "grammar_pending"
            assert answer.headers["retry-after"]
        compiler.may.set()
        assert (await here.ask(COMPLETIONS, guided_regex="a")).status_code == 200


async def test_pieces_of_a_long_text_are_sent_in_parts_that_hold_nobody_up() -> None:
    body = {"content": "a1" * 100_000, "with_pieces": True}
    async with api() as here:
        _, *parts = await AsgiClient(here.app, "/tokenize").send_json(body).rest()
    sent = [part["body"] for part in parts]
    tokens = json.loads(b"".join(sent))["tokens"]
    assert tokens == [{"id": 97, "piece": "a"}, {"id": 49, "piece": "1"}] * 100_000
    assert max(map(len, sent)) < 1 << 18


# Fields that an endpoint reads; the others are ignored, and named.
READ = {
    CHAT: ("tools", "chat_template_kwargs"),
    MESSAGES: ("tools",),
    RESPONSES: ("tools", "metadata"),
}


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != EMBEDDINGS])
async def test_a_deeply_nested_field_is_refused_or_ignored(path: str) -> None:
    value: Any = 1
    for _ in range(300):
        value = {"a": value}
    async with api() as here:
        for name in ("tools", "metadata", "chat_template_kwargs", "guided_json", "text"):
            answer = await here.ask(path, **{name: value})
            if name == "guided_json" or name in READ.get(path, ()):
                assert answer.status_code == (422 if path == GENERATE else 400)
                assert answer.json()["error"]["message"].startswith(f"{name}: ")
            else:
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-ignored-fields"].startswith(name)
        tool = {"type": "function", "name": "f", "other": value}
        answer = await here.ask(path, tools=[tool], text={"format": {"type": "text", "a": value}})
        assert answer.status_code == (400 if path == CHAT else 200), answer.text  # no `function`


# -- how long the event loop is held ---------------------------------------------------------------

# The longest callback may take so many times as long as it takes to parse the largest list of names
# that is taken. A name that is not bounded took 100 times as long.
_LONGEST = 16.0
EMBEDDED = [replace(output(finish=FinishReason.STOP), embeddings=np.ones((2, 4), np.float32))]
_ONE_IN = 53  # bodies for the fields' values; `python -m tests.stalls --bodies 0` sends all


def parsing() -> float:
    """Seconds to parse as many names as a body may have."""
    text, least = value("names"), 1.0
    for _ in range(5):
        start = time.thread_time()
        json.loads(text)
        least = min(least, time.thread_time() - start)
    return least


@pytest.mark.e2e  # it has a clock
async def test_no_body_of_any_endpoint_holds_the_event_loop() -> None:
    async with api(answering()) as here:
        bodies = [*of_structure(), *itertools.islice(of_fields(here.app), 0, None, _ONE_IN)]
        assert {body.path for body in bodies} == set(USUAL)
        slow, unit = [], parsing()
        for body in bodies:
            for _ in range(3):  # a page fault or a collection is nobody's mistake
                with LongestCallback() as longest:
                    client = AsgiClient(here.app, body.path)
                    client.send_body(body.content)
                    assert (await client.rest())[0]["status"] < 500, body.name
                if longest.seconds < _LONGEST * unit:
                    break
                unit = parsing()  # the processor may have become slower
            else:
                slow.append(f"{body.path} {body.name}: {longest.seconds * 1e3:.0f} ms")
    assert not slow


def test_parts_are_counted_outside_of_strings_only() -> None:
    inside = json.dumps({"prompt": '{"a\\": [1, 2]},' * 50_000}).encode()
    check_parts(inside)
    check_parts(b'["' + rb"\\" * 50_000 + b'", ' + b"{}," * 10_000 + b"1]")
    for text in (b"[" * (MAX_PARTS + 1), b'{"a":' * MAX_PARTS, b"1," * (MAX_VALUES + 1)):
        with pytest.raises(TooManyParts, match="this server accepts at most"):
            check_parts(text)
        with pytest.raises(TooManyParts):
            check_parts(b'"\\"", "' + rb"\\" * 10 + b'"' + text)


async def test_a_calls_arguments_of_too_many_parts_stay_a_text() -> None:
    function = {"name": "f", "arguments": "[" + "[]," * MAX_PARTS + "[]]"}
    call = {"id": "1", "type": "function", "function": function}
    turns = [{"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(TooManyParts):
        loads(function["arguments"])
    async with api() as here:
        assert (await here.ask(CHAT, messages=turns)).status_code == 200


@pytest.mark.parametrize("path", ["/api/embed", EMBEDDINGS])
async def test_others_have_their_turn_between_vectors(path: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((300, 4), np.float32)
    service = FakeService([replace(output(finish=FinishReason.STOP), embeddings=vectors)])
    turns = 0
    async with api(service) as here:
        client = AsgiClient(here.app, path).send_json({"model": "fake", "input": ["a"]})
        await client.next_message()
        while not client.done.done():
            turns += 1
            await asyncio.sleep(0)
        received = json.loads(b"".join([part["body"] for part in await client.rest()]))
    assert turns > 290  # a few pass while the first message is read
    assert received["model"] == "fake"
    if path == EMBEDDINGS:
        assert received["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        found = [item["embedding"] for item in received["data"]]
    else:
        assert received["prompt_eval_count"] == 2
        found = received["embeddings"]
    assert np.array_equal(np.array(found, np.float32), vectors)


async def test_a_long_answer_is_written_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probabilities of 1,024 tokens and of 20 others beside each take 90 ms."""
    threads: set[str] = set()

    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return json_of(*args, **options)

    monkeypatch.setattr("specops.http.answering.writer.json_of", noted)
    sent = Logprob(-0.5, tuple((token, -1.0) for token in range(20)))
    pieces = tuple(TokenOutput(97, "a", "target", sent) for _ in range(200))
    answer = replace(output(finish=FinishReason.STOP), pieces=pieces)
    async with api(FakeService([answer])) as here:
        response = await here.ask(CHAT, logprobs=True, top_logprobs=20, n=2)
    content = response.json()["choices"][1]["logprobs"]["content"]
    assert [len(item["top_logprobs"]) for item in content] == [20] * 200
    assert threads
    assert all(name.startswith("write") for name in threads)
