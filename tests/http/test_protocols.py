"""The parts that only one chat protocol has: events, finish reasons, errors; and the table of calls
in client_calls.md, row by row."""

import asyncio
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
from anthropic.types.beta import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from specops.http.answering.schema import Body
from specops.http.protocols.anthropic import MessagesRequest
from specops.http.protocols.openai.chat import ChatRequest
from specops.http.protocols.openai.completions import CompletionRequest
from specops.http.protocols.openai.embeddings import EmbeddingRequest
from specops.http.protocols.openai.responses import ResponsesRequest
from specops.request import FinishReason, GenerationRequest, Logprob, Output, TokenOutput
from specops.serving.admission import QueueFull
from tests.asgi import AsgiClient
from tests.fakes import INFO, STATS, FakeHandle, FakeService, output
from tests.http.chat_clients import (
    EVERY_CHAT,
    PROTOCOLS,
    RESPONSES_TOOLS,
    SEARCH,
    TEMPLATE,
    WEATHER,
    Clients,
    clients,
    whole,
)
from tests.http.openai_api import api, problem

pytestmark = pytest.mark.anyio
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ERRORS = (openai.APIStatusError, anthropic.APIStatusError, ollama.ResponseError)
ASK: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    RESPONSES: {"model": "fake", "input": "a"},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_begun_answer_is_continued_where_it_ends(protocol: str) -> None:
    begun = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "The sum is"}]
    field = "input" if protocol == "responses" else "messages"
    async with clients(f"{TEMPLATE}{{% if add_generation_prompt %}}<think>{{% endif %}}") as here:
        here.say(" 4.")
        said = await PROTOCOLS[protocol](here, stream=True, **{field: begun})
        assert here.prompt.endswith("The sum is")
        assert (said.text, said.reasoning) == (" 4.", "")


# -- the table -----------------------------------------------------------------------------------

PAGE = Path(__file__).with_name("client_calls.md").read_text()
ROWS = re.findall(
    r"^\| `((?:openai|anthropic|ollama)\.[\w.]+)` \| `(\{.*\})` \| (\w+) \|$", PAGE, re.M
)
TOP = {  # the field that says how many of the likeliest tokens are reported
    **dict.fromkeys(("openai.chat.completions.create", "ollama.chat"), "top_logprobs"),
    "openai.completions.create": "logprobs",
}
VECTORS = np.array([[0.6, 0.8, 0, 0], [0, 1, 0, 0]], np.float32)
CONVERSATION = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
BASE: dict[str, dict[str, Any]] = {
    "openai.chat.completions.create": CONVERSATION,
    "openai.completions.create": {"model": "fake", "prompt": "a"},
    "openai.responses.create": ASK[RESPONSES],
    "openai.embeddings.create": {"model": "fake", "input": "a"},
    "anthropic.messages.create": ASK[MESSAGES],
    "anthropic.messages.count_tokens": CONVERSATION,
    "ollama.chat": CONVERSATION,
    "ollama.generate": {"model": "fake", "prompt": "a"},
    "ollama.embed": {"model": "fake", "input": ["a", "b"]},
    "ollama.embeddings": {"model": "fake", "prompt": "a"},
    "ollama.show": {"model": "fake"},
}


def test_the_table_has_rows() -> None:
    libraries = ("openai", "anthropic", "ollama")
    assert len(ROWS) == sum(PAGE.count(f"| `{library}.") for library in libraries) > 60


@pytest.mark.parametrize(("call", "fields", "outcome"), ROWS)
async def test_the_documentations_table_is_true(call: str, fields: str, outcome: str) -> None:
    given, answers = json.loads(fields), list[httpx.Response]()

    async def note(response: httpx.Response) -> None:
        await response.aread()
        answers.append(response)

    async with clients() as here:
        logprob = Logprob(-0.625, ((72, -0.625),)) if "logprobs" in given else None
        said = Output("", (TokenOutput(72, "Hello", "target", logprob),), None, None)
        here.script([said, replace(output(finish=FinishReason.STOP), embeddings=VECTORS)])
        here.http.event_hooks = here.ollama._client.event_hooks = {"response": [note]}
        function: Any = here
        for name in call.split("."):
            function = getattr(function, name)
        known, body = BASE.get(call), given
        if known and not call.startswith("ollama."):  # fields that the client has no names for
            body = known | {"extra_body": given}
        elif known:
            body = known | given
        with pytest.raises(ERRORS) if outcome == "refused" else nullcontext():
            assert await function(**body)
        assert outcome != "works" or not logprob or here.request.logprobs == given[TOP[call]]
    (answer,) = answers
    assert ("-0.625" in answer.text) == (outcome == "works" and logprob is not None)
    ignored = answer.headers.get("x-ignored-fields", "")
    if outcome == "refused":
        assert answer.status_code in ((400,) if known else (404,))
        assert not known or next(iter(given)) in answer.text
    else:
        assert answer.status_code == 200
        assert bool(ignored) is {"works": False, "ignored": True}[outcome]
        names = {name.partition(".")[0] for name in ignored.split(", ")}
        assert not ignored or names <= {*given, *given.get("options", ())}


@pytest.mark.parametrize(
    ("body", "parameters"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsNonStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsNonStreaming),
        (ResponsesRequest, response_params.ResponseCreateParamsNonStreaming),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
        (MessagesRequest, message_params.MessageCreateParamsNonStreaming),
    ],
    ids=lambda item: item.__name__,
)
def test_what_the_libraries_know_is_known_here_even_if_it_has_no_effect(
    body: type[Body], parameters: Any
) -> None:
    """Where unknown fields are refused, none of theirs is."""
    known = {field.alias or name for name, field in body.model_fields.items()}
    official = set(get_type_hints(parameters))
    assert len(official) > 3
    assert official <= known | body.ignored_fields


# -- Anthropic's ---------------------------------------------------------------------------------


async def events(here: Clients, path: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and the data of a stream's events."""
    response = await here.http.post(path, json=ASK[path] | {"stream": True})
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


async def test_messages_stream_has_anthropics_events() -> None:
    async with clients() as here:
        steps = [output(text) for text in ("<think>hm", "</think>Hello", " world")]
        first = replace(steps[0], stats=replace(STATS, generated_tokens=0))
        here.script([first, *steps[1:], output(finish=FinishReason.STOP)])
        sent = await events(here, MESSAGES)
        prompt = here.request.prompt_tokens
        assert here.request.step_stats
    names = [name for name, _ in sent]
    start, delta, stop = (f"content_block_{part}" for part in ("start", "delta", "stop"))
    blocks = [start, delta, delta, stop, start, delta, delta, stop]
    assert names == ["message_start", *blocks, "message_delta", "message_stop"]
    first, last = sent[0][1]["message"]["usage"], sent[-2][1]["usage"]
    assert first | {"output_tokens": STATS.generated_tokens} == last
    assert last["input_tokens"] + last["cache_read_input_tokens"] == len(prompt)
    assert last["cache_read_input_tokens"] == STATS.cached_prompt_tokens
    assert sent[0][1]["message"]["stop_reason"] is None
    assert sent[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert [data["index"] for _, data in sent[1:-2]] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_signed_and_taken_back(stream: bool) -> None:
    async with clients() as here:
        here.say("<think>hm</think>Hello")
        answer = await whole(here.anthropic.messages, "message", stream=stream, **ASK[MESSAGES])
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[0].signature
        again = [block.model_dump(exclude_none=True) for block in answer.content]
        turns = [*ASK[MESSAGES]["messages"], {"role": "assistant", "content": again}]
        turns.append({"role": "user", "content": "b"})
        raw = await here.http.post(MESSAGES, json=ASK[MESSAGES] | {"messages": turns})
    assert raw.status_code == 200
    assert "x-ignored-fields" not in raw.headers
    assert "<think>hm</think>Hello" in here.prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_is_reported(stream: bool) -> None:
    async with clients() as here:
        here.script([output("a"), replace(output(finish=FinishReason.STOP), stop="END")])
        body = ASK[MESSAGES] | {"stop_sequences": ["END"]}
        answer = await whole(here.anthropic.messages, "message", stream=stream, **body)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert here.request.stop == ("END",)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("room", "limit", "reason"),
    [(20, 99, "model_context_window_exceeded"), (20, 20, "max_tokens"), (99, 20, "max_tokens")],
)
async def test_an_answer_that_fills_the_context_says_so(
    room: int, limit: int, reason: str, stream: bool
) -> None:
    async with clients() as here:
        submit = here.service.submit

        def submit_cut(request: GenerationRequest) -> FakeHandle:  # as the engine does
            here.service.loaded.info = replace(INFO, context=len(request.prompt_tokens) + room)
            return submit(replace(request, max_new_tokens=min(request.max_new_tokens, room)))

        here.service.submit = submit_cut  # type: ignore[method-assign, assignment]
        here.script([output("a"), output(finish=FinishReason.LENGTH)])
        asked: Any = {"tools": [], "max_tokens": limit}
        said = await PROTOCOLS["messages"](here, stream=stream, **asked)
    assert said.finish == reason


async def test_a_long_wait_has_anthropics_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specops.http.answering.writer.HEARTBEAT_SECONDS", 0.01)
    async with api(FakeService()) as here, asyncio.timeout(60):
        client = AsgiClient(here.app, MESSAGES).send_json(ASK[MESSAGES] | {"stream": True})
        handle = await here.service.submitted.get()
        await client.next_message()  # the status
        assert (await client.next_message())["body"] == b'event: ping\ndata: {"type":"ping"}\n\n'
        handle.push(output("a", finish=FinishReason.STOP))
        await client.done


async def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    async with clients() as here:
        here.say("a")
        body = ASK[MESSAGES] | {"system": "Be brief."}
        await here.anthropic.messages.create(**body)
        del body["max_tokens"]
        counted = await here.anthropic.messages.count_tokens(**body)
    assert counted.input_tokens == len(here.request.prompt_tokens)
    assert len(here.service.requests) == 1


# -- Responses -----------------------------------------------------------------------------------


async def test_responses_stream_has_openais_events() -> None:
    async with clients() as here:
        here.say("Hel", "lo")
        sent = await events(here, RESPONSES)
    assert [data["sequence_number"] for _, data in sent] == list(range(len(sent)))
    assert [name.removeprefix("response.") for name, _ in sent] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert sent[0][1]["response"]["output"] == []
    whole = sent[-1][1]["response"]
    assert whole["output"][0]["content"][0]["text"] == "Hello"
    assert whole["output"][0]["id"] == sent[2][1]["item"]["id"] == sent[4][1]["item_id"]
    assert whole["usage"]["output_tokens"] == STATS.generated_tokens


# What Open Responses' schema wants in each response.
REQUIRED = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)


async def test_every_response_has_the_fields_of_open_responses() -> None:
    tool = {"type": "function", "name": "f"}
    async with clients() as here:
        here.say("Hello")
        body = ASK[RESPONSES] | {"tools": [tool], "presence_penalty": 0.5, "truncation": "auto"}
        whole = (await here.http.post(RESPONSES, json=body)).json()
        streamed = await here.http.post(RESPONSES, json=body | {"stream": True})
    found = [json.loads(line[6:]) for line in streamed.text.split("\n") if line[:5] == "data:"]
    for answer in (whole, *(data["response"] for data in found if "response" in data)):
        assert set(REQUIRED) <= set(answer)
        assert answer["tools"] == [
            {"type": "function", "name": "f", "description": None, "parameters": None}
            | {"strict": False}
        ]
        assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, 0)
        assert answer["truncation"] == "auto"
    assert {item["status"] for item in whole["output"]} == {"completed"}


def in_namespace(name: str, *functions: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", **function} for function in functions]
    return {"type": "namespace", "name": name, "description": "d", "tools": tools}


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_namespaces_are_called(stream: bool) -> None:
    """As Codex sends the tools of servers of the model context protocol."""
    tools = [in_namespace("mcp__a", WEATHER, SEARCH), in_namespace("mcp__b", SEARCH)]
    async with clients() as here:
        here.say(
            '<tool_call>{"name": "get_weather", "arguments": {"city": "a"}}</tool_call>',
            '<tool_call>{"name": "mcp__b__search", "arguments": {}}</tool_call>',
        )
        body = ASK[RESPONSES] | {"tools": tools}
        answer = await whole(here.openai.responses, "response", stream=stream, **body)
        calls = [(item.namespace, item.name) for item in answer.output]
        assert calls == [("mcp__a", "get_weather"), ("mcp__b", "search")]
        assert '"name": "mcp__a__search"' in here.prompt
        assert [tool.type for tool in answer.tools] == ["namespace", "namespace"]
        history = [item.model_dump(exclude_none=True) for item in answer.output]
        choice = {"type": "function", "name": "search", "namespace": "mcp__a"}
        raw = await here.http.post(RESPONSES, json=body | {"input": history, "tool_choice": choice})
        assert raw.status_code == 200, raw.text
        assert '"name": "mcp__b__search", "arguments": {}' in here.prompt
        grammar = here.request.sampling.grammar
        assert "mcp__a__search" in grammar.text
        assert "get_weather" not in grammar.text
    assert "namespace" not in raw.headers.get("x-ignored-fields", "")


@pytest.mark.parametrize(
    ("tools", "mode", "called"),
    [
        ([{"type": "function", "name": "search"}, {"type": "image_generation"}], "auto", True),
        ([{"type": "mcp", "server_label": "s"}], "auto", False),
        ([{"type": "mcp", "server_label": "s"}], "required", None),
    ],
)
async def test_allowed_tools_may_be_openais_own(
    tools: list[Any], mode: str, called: bool | None
) -> None:
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    body = ASK[RESPONSES] | {"tools": RESPONSES_TOOLS, "tool_choice": choice}
    async with clients() as here:
        here.say("a")
        answer = await here.http.post(RESPONSES, json=body)
        assert answer.status_code == (400 if called is None else 200)
        if called is not None:
            assert ("search" in here.prompt) is called
            assert bool(here.request.sampling.grammar) is called


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_the_texts_tokens(stream: bool) -> None:
    include = {"include": ["message.output_text.logprobs", "x.y"], "top_logprobs": 1}
    said = ["<think>", "hm", "</think>", "\n\n", "Hel", "lo", " ", "world", ""]
    pieces = tuple(
        TokenOutput(ord(text[:1] or "x"), text, "target", Logprob(-index, ((72, -0.5),)))
        for index, text in enumerate(said)
    )
    async with clients() as here:
        here.script([Output("", pieces[:6], None, None), Output("", pieces[6:], None, None)])
        here.script([*here.service.answer, output(finish=FinishReason.STOP)])
        body = ASK[RESPONSES] | include | {"stream": stream}
        raw = await here.http.post(RESPONSES, json=body)
    assert here.request.logprobs == 1
    assert "include.x.y" in raw.headers["x-ignored-fields"]
    found = [json.loads(line[6:]) for line in raw.text.split("\n") if line[:5] == "data:"]
    answer = found[-1]["response"] if stream else raw.json()
    (part,) = answer["output"][-1]["content"]
    assert [token["logprob"] for token in part["logprobs"]] == [-4, -5, -6, -7]
    assert answer["top_logprobs"] == 1
    deltas = [data for data in found if data["type"].endswith("output_text.delta")]
    told = [token["logprob"] for data in deltas for token in data["logprobs"]]
    assert told == ([-4, -5, -6, -7] if stream else [])


async def test_truncation_leaves_out_the_oldest_items() -> None:
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "ok"}]
    body = ASK[RESPONSES] | {"input": [*turns, {"role": "user", "content": "b"}]}
    async with clients("{% for m in messages %}{{ m.content }}{% endfor %}") as here:
        here.say("a")
        here.service.info = replace(INFO, context=128)
        for truncation, kept in (("auto", False), ("disabled", True)):
            raw = await here.http.post(RESPONSES, json=body | {"truncation": truncation})
            assert ("x" in here.prompt) is kept
            assert ("messages[0:2]" in raw.headers.get("x-ignored-fields", "")) is not kept


async def test_compacting_is_refused_in_words() -> None:
    async with clients() as here:
        raw = await here.http.post(f"{RESPONSES}/compact", json=ASK[RESPONSES])
    assert (raw.status_code, raw.json()["error"]["code"]) == (501, "not_supported")
    assert "truncation" in raw.json()["error"]["message"]


async def test_a_response_that_fails_halfway_says_so_in_its_last_event() -> None:
    async with clients() as here:
        here.script([output("a"), output(finish=FinishReason.TIMEOUT)])
        *_, (name, last) = await events(here, RESPONSES)
    assert name == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["content"][0]["text"] == "a"


async def test_a_response_may_have_to_follow_a_schema() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {}}}
    async with clients() as here:
        here.say("{}")
        answer = await here.openai.responses.create(**ASK[RESPONSES], text={"format": form})  # type: ignore[arg-type]
        assert "properties" in here.request.sampling.grammar.said.text
        assert answer.text.format.type == "json_schema"
        with pytest.raises(openai.BadRequestError, match="text"):
            await here.openai.responses.create(
                **ASK[RESPONSES],
                text={"format": form | {"schema": {"$ref": "http://other"}}},  # type: ignore[arg-type]
            )


# -- all of them ---------------------------------------------------------------------------------


LIBRARIES = {"chat": openai, "messages": anthropic, "responses": openai}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_errors_are_the_librarys_own(protocol: str) -> None:
    ask, library = PROTOCOLS[protocol], LIBRARIES[protocol]
    async with clients(key="wrong", api_keys="key") as here:
        with pytest.raises(library.AuthenticationError):
            await ask(here, stream=False)
    async with clients(api_keys="key", unknown_model="refuse") as here:
        with pytest.raises(library.BadRequestError, match="temperature"):
            await ask(here, stream=False, temperature=3)
        with pytest.raises(library.NotFoundError, match="does not exist"):
            await ask(here, stream=False, model="other")
        here.service.refusal = QueueFull(7)
        with pytest.raises(library.RateLimitError) as full:
            await ask(here, stream=False)
        assert full.value.response.headers["retry-after"] == "7"
        here.service.refusal = None
        here.script([output("a"), output(finish=FinishReason.ERROR)])
        with pytest.raises(library.InternalServerError):
            await ask(here, stream=False)
        if protocol != "responses":  # whose stream says so in its last event
            with pytest.raises(library.APIError):
                await ask(here, stream=True)


@pytest.mark.parametrize(
    ("protocol", "fields", "thinks", "most"),
    [
        ("chat", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False, None),
        ("chat", {"reasoning_effort": "none"}, False, None),
        ("chat", {"reasoning_effort": "low"}, True, None),
        ("chat", {"extra_body": {"thinking_budget_tokens": 7}}, True, 7),
        ("chat", {"extra_body": {"thinking_token_budget": 0}}, True, 0),
        ("chat", {"extra_body": {"reasoning": {"max_tokens": 7}}}, True, 7),
        ("chat", {"extra_body": {"thinking_budget_tokens": -1}}, True, None),
        ("messages", {"thinking": {"type": "disabled"}}, False, None),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, 1024),
        ("responses", {"reasoning": {"effort": "none"}}, False, None),
        ("responses", {"extra_body": {"reasoning": {"effort": "low", "max_tokens": 7}}}, True, 7),
        ("ollama", {"think": False}, False, None),
    ],
)
async def test_thoughts_can_be_turned_off_and_have_a_budget(
    protocol: str, fields: dict[str, Any], thinks: bool, most: int | None
) -> None:
    async with clients() as here:
        here.say("a")
        await EVERY_CHAT[protocol](here, stream=False, **fields)
    assert here.prompt.endswith("<think></think>") is not thinks
    marks = here.request.reasoning
    assert marks is not None
    assert (marks.opening, marks.closing, marks.most) == ("<think>", "</think>", most)
    assert marks.closing_tokens == tuple(b"</think>")


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_may_stay_in_the_text(stream: bool) -> None:
    apart = {"auto": True, "deepseek": True, "deepseek-legacy": not stream, "none": False}
    async with clients() as here:
        here.say("<think>hm</think>Hello")
        for form, leaves in apart.items():
            body: Any = {"reasoning_format": form}
            said = await PROTOCOLS["chat"](here, stream=stream, extra_body=body)
            assert said.text == ("Hello" if leaves else "<think>hm</think>Hello")
            assert said.reasoning == "hm" * leaves


# -- tokens --------------------------------------------------------------------------------------


async def test_texts_become_tokens_and_back() -> None:
    async with api() as here:
        post = here.client.post
        tokens = (await post("/tokenize", json={"content": "aé"})).json()["tokens"]
        pieces = (await post("/tokenize", json={"content": "a", "with_pieces": True})).json()
        text = (await post("/detokenize", json={"tokens": tokens})).json()["content"]
        wrong = await post("/detokenize", json={"tokens": [999]})
        untyped = await post("/tokenize", json={"content": 5})
        unknown = await post("/tokenize", json={"content": "a", "extra": 1})
    assert tokens == list("aé".encode())
    assert pieces == {"tokens": [{"id": 97, "piece": "a"}]}
    assert text == "aé"
    assert problem(wrong, 400)["param"] == "tokens"
    assert problem(untyped, 400)["param"] == "content"
    assert unknown.headers["x-ignored-fields"] == "extra"
