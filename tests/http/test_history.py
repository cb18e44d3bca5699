"""Histories as clients keep them: with parts of other servers, of older forms, and with gaps."""

import threading
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import ContentBlockParam
from openai.types.responses import ResponseInputItemParam

from specops.http.protocols.openai.responses import ResponsesRequest
from specops.http.recent_items import RecentItems
from specops.http.security.request_body import LARGE_BODY_BYTES
from tests.http.chat_clients import RESPONSES_TOOLS, clients, whole
from tests.http.openai_api import CHAT, ENDPOINTS, MESSAGES, RESPONSES

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "Weather?"}
CALLED = {"name": "get_weather", "arguments": '{"city": "a"}'}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "a"}}</tool_call>'
FIELD = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}


async def asked(path: str, history: Any, **fields: Any) -> tuple[str, str]:
    """The prompt that a history becomes, without line ends, and the names of ignored parts."""
    async with clients() as here:
        here.say("ok")
        body = ENDPOINTS[path] | {FIELD[path]: history} | fields
        answer = await here.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return here.prompt.replace("\n", ""), answer.headers.get("x-ignored-fields", "")


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}{text}<|im_end|>"


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def says(role: str, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A turn; without parts its content is null."""
    return {"role": role, "content": list(parts) or None, **fields}


def calls(**call: Any) -> dict[str, Any]:
    """A turn of OpenAI's that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"id": "1", **call}]}


NOT_SHOWN = "not shown, this model reads text only]"
LS = '<tool_call>{"name": "sh", "arguments": {"input": "ls"}}</tool_call>'
THOUGHT = part("summary_text", text="h")
SOURCE = part("text", media_type="text/plain", data="inside")
PICTURE_RESULT = [part("text", text="a"), part("image", source={})]
FOUND = [part("text", text="found")]
# As objects, by the kind of tool.
SERVER_RESULTS = {
    "web_search": part("web_search_tool_result_error", error_code="max_uses_exceeded"),
    "web_fetch": part("web_fetch_result", url="u", content=part("document", source=SOURCE)),
    "code_execution": part("code_execution_result", stdout="1", return_code=0, content=[]),
    "tool_search": part("tool_search_tool_search_result", tool_references=[{"tool_name": "a"}]),
    "newer": [1, "a"],
}
# A history, what the prompt has of it, and the names of what it leaves out.
READ: dict[str, tuple[str, list[dict[str, Any]], str, str]] = {
    "a refusal": (CHAT, [says("assistant", refusal="No.")], turn("assistant", "No."), ""),
    "a refusal as a part": (CHAT, [says("assistant", part("refusal", refusal="No."))],
        turn("assistant", "No."), ""),
    "an empty answer": (CHAT, [says("assistant")], turn("assistant", ""), ""),
    "calls of functions": (
        CHAT,
        [
            says("assistant", function_call=CALLED),
            {"role": "function", "name": "get_weather", "content": "sunny"},
        ],
        turn("assistant", CALL) + turn("tool", "sunny"),
        "",
    ),
    "a call of a custom tool": (CHAT, [calls(type="custom", custom={"name": "sh", "input": "ls"})],
        LS, ""),
    "a name that no tool may have": (
        CHAT, [calls(type="function", function=CALLED | {"name": "two words"})],
        '"name": "two words"', ""),
    "thoughts as parts": (CHAT, [says("assistant", part("thinking"), part("text", text="b"))],
        turn("assistant", "b"), "messages.thinking"),
    "thoughts by their newer name": (
        CHAT, [says("assistant", part("text", text="b"), reasoning="h")],
        turn("assistant", "<think>h</think>b"), ""),
    "an empty result": (CHAT, [says("tool", tool_call_id="1")], turn("tool", ""), ""),
    "a picture as a result": (CHAT, [says("tool", part("image_url"), tool_call_id="1")],
        turn("tool", f"[image_url: {NOT_SHOWN}"), "messages.image_url"),
    "a picture that a tool of Anthropic's took": (
        MESSAGES, [says("user", part("tool_result", tool_use_id="1", content=PICTURE_RESULT))],
        f"[image: {NOT_SHOWN}", "messages.image"),
    "a document of text": (MESSAGES, [says("user", part("document", title="T", source=SOURCE))],
        turn("user", "Tinside"), ""),
    "a document of parts": (
        MESSAGES, [says("user", part("document", source=part("content", content=FOUND)))],
        turn("user", "found"), ""),
    "a search result": (
        MESSAGES,
        [says("user", part("search_result", title="T", source="http://a", content=FOUND))],
        turn("user", "Thttp://afound"),
        "",
    ),
    "a summary": (MESSAGES, [says("assistant", part("compaction", content="before"))],
        turn("assistant", "before"), ""),
    "what Anthropic's servers searched": (
        MESSAGES,
        [
            says(
                "assistant",
                part("server_tool_use", id="1", name="web_search", input={}),
                part("web_search_tool_result", tool_use_id="1", content=[]),
                part("text", text="Sunny."),
            )
        ],
        turn("assistant", "Sunny."),
        "messages.server_tool_use, messages.web_search_tool_result",
    ),
    "what Anthropic's servers ran": (
        MESSAGES,
        [
            says(
                "assistant",
                *(part(f"{kind}_tool_result", tool_use_id="1", content=content)
                  for kind, content in SERVER_RESULTS.items()),
                part("text", text="Sunny."),
            )
        ],
        turn("assistant", "Sunny."),
        ", ".join(f"messages.{kind}_tool_result" for kind in SERVER_RESULTS),
    ),
    "thoughts with their signature": (
        MESSAGES,
        [says("assistant", part("thinking", thinking="h", signature="s"), part("text", text="b"))],
        turn("assistant", "<think>h</think>b"),
        "",
    ),
    "thoughts of several items": (
        RESPONSES,
        [
            part("reasoning", id="1", summary=[THOUGHT]),
            part("reasoning", id="2", summary=[], encrypted_content="x"),
            part("web_search_call", id="3", status="completed"),
            part("message", **says("assistant", part("output_text", text="b"))),
        ],
        turn("assistant", "<think>h</think>b"),
        "input.encrypted_content, input.status, input.web_search_call",
    ),
    "custom tools": (
        RESPONSES,
        [
            part("custom_tool_call", call_id="1", name="sh", input="ls"),
            part(
                "custom_tool_call_output",
                call_id="1",
                output=[part("input_text", text="a.py"), part("input_image")],
            ),
        ],
        turn("assistant", LS) + turn("tool", f"a.py[input_image: {NOT_SHOWN}"),
        "input.input_image",
    ),
    "a local shell": (
        RESPONSES,
        [
            part("local_shell_call", call_id="1", id="x", action={"command": ["ls"]}),
            part("local_shell_call_output", id="1", output="a.py"),
        ],
        '"arguments": {"command": ["ls"]}}</tool_call><|im_end|>' + turn("tool", "a.py"),
        "",
    ),
    "a shell": (
        RESPONSES,
        [
            part("shell_call", call_id="1", action={"commands": ["ls"]}),
            part("shell_call_output", call_id="1", output=[{"stdout": "a.py"}]),
        ],
        turn("tool", '{"stdout":"a.py"}'),
        "",
    ),
    "a server of the model context protocol": (
        RESPONSES, [part("mcp_call", id="1", server_label="s", output="found", **CALLED)],
        turn("assistant", CALL) + turn("tool", "found"), "input.server_label"),
    "a reference to what is not known": (
        RESPONSES, [part("item_reference", id="msg_1"), {"id": "msg_2"}, USER],
        turn("user", "Weather?"), "input.item_reference"),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
async def test_a_history_is_read_as_far_as_it_is_text(what: str) -> None:
    path, history, expected, ignored = READ[what]
    first = [] if path == RESPONSES else [USER]
    prompt, named = await asked(path, [*first, *history, USER])  # an answer at the end goes on
    assert expected in prompt
    assert named == ignored


RESULTS: dict[str, Any] = {
    CHAT: {"role": "tool", "tool_call_id": "gone", "content": "sunny"},
    MESSAGES: {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "gone", "content": "sunny"}],
    },
    RESPONSES: {"type": "function_call_output", "call_id": "gone", "output": "sunny"},
}
CALLS: dict[str, Any] = {
    CHAT: {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": CALLED}],
    },
    MESSAGES: {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "a"}}],
    },
    RESPONSES: {"type": "function_call", "call_id": "1", **CALLED},
}


@pytest.mark.parametrize("path", FIELD)
async def test_a_call_may_have_lost_its_result_and_a_result_its_call(path: str) -> None:
    prompt, _ = await asked(path, [RESULTS[path], CALLS[path], USER])
    assert turn("tool", "sunny") + turn("assistant", CALL) + turn("user", "Weather?") in prompt


@pytest.mark.parametrize("empty", ["", [], [{"type": "web_search_call", "id": "1"}]])
async def test_an_empty_input_is_an_empty_question(empty: Any) -> None:
    prompt, _ = await asked(RESPONSES, empty, instructions="Be brief.")
    assert prompt.startswith(turn("system", "Be brief.") + turn("user", ""))


# -- the kinds that the official packages know ---------------------------------------------------


def kinds(union: Any) -> Iterator[str]:
    """The `type` of each member of a union."""
    for member in get_args(union):
        hint = get_type_hints(member).get("type")
        while hint is not None and get_origin(hint) is not Literal:
            hint = next(iter(get_args(hint)), None)
        yield from get_args(hint)


# What a client runs; the tables above have them with their fields.
_OWN = {"message", "function_call", "mcp_call"}
_OWN |= {f"{kind}_call" for kind in ("custom_tool", "local_shell", "shell", "apply_patch")}
ITEMS = sorted(set(kinds(ResponseInputItemParam)) - _OWN)
BLOCKS = sorted(set(kinds(ContentBlockParam)) - {"text", "tool_use", "tool_result"})


def test_the_packages_know_many_kinds() -> None:
    assert "web_search_call" in ITEMS
    assert "web_search_tool_result" in BLOCKS
    assert len(ITEMS) > 15
    assert len(BLOCKS) > 8


@pytest.mark.parametrize("kind", ITEMS)
async def test_no_item_of_openais_ends_a_conversation(kind: str) -> None:
    prompt, _ = await asked(RESPONSES, [{"type": kind, "id": "1"}, USER])
    assert turn("user", "Weather?") in prompt


@pytest.mark.parametrize("kind", BLOCKS)
async def test_no_block_of_an_answer_of_anthropics_ends_a_conversation(kind: str) -> None:
    blocks = [{"type": kind, "content": []}, {"type": "text", "text": "b"}]
    prompt, _ = await asked(MESSAGES, [USER, {"role": "assistant", "content": blocks}, USER])
    assert "b<|im_end|>" in prompt


# -- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [None, True, False])
async def test_references_to_recent_items_are_understood(store: bool | None, stream: bool) -> None:
    body = {"model": "fake", "input": "a", "tools": RESPONSES_TOOLS, "store": store}
    async with clients() as here:
        here.say("<think>hm</think>", "Let me see.", CALL)
        answer = await whole(here.openai.responses, "response", stream=stream, **body)
        references: Any = [{"type": "item_reference", "id": item.id} for item in answer.output]
        result = {"type": "function_call_output", "output": "sunny"}
        result["call_id"] = answer.output[-1].call_id
        here.say("Sunny.")
        await here.openai.responses.create(model="fake", input=[USER, *references, result])
        prompt = here.prompt.replace("\n", "")
    known = turn("assistant", f"<think>hm</think>Let me see.{CALL}")
    assert (known in prompt) is (store is not False)
    assert turn("tool", "sunny") in prompt


def test_items_are_their_clients_and_the_oldest_leave() -> None:
    items = RecentItems(most_bytes=100)
    items.keep("a", [{"id": "1", "text": "x" * 20}, {"id": "2", "text": "y" * 20}])
    assert items.get("b", ["1"]) == {}
    assert items.get("a", ["1", "0"]) == {"1": b'{"id":"1","text":"xxxxxxxxxxxxxxxxxxxx"}'}
    items.keep("a", [{"id": "1", "text": "z" * 20}])  # in place of the first
    assert list(items.get("a", ["2"])) == ["2"]
    items.keep("b", [{"id": "3", "text": "w" * 20}])
    assert list(items.get("a", ["1", "2"])) == ["2"]  # the other was used least recently
    items.keep("b", [{"id": "4", "text": "w" * 200}])  # too long for all
    assert items.get("b", ["3", "4"]) == {}


async def test_an_item_is_read_once_however_often_a_request_refers_to_it() -> None:
    async with clients() as here:
        here.say("x" * 1000)
        answer = await here.openai.responses.create(model="fake", input="a")
        reference: Any = {"type": "item_reference", "id": answer.output[0].id}
        body = {"model": "fake", "input": [reference] * 5000 + [USER]}
        asked = await here.http.post(RESPONSES, json=body)
    assert asked.status_code == 200
    assert here.prompt.count("x" * 1000) == 1
    assert asked.headers["x-ignored-fields"] == "input.item_reference"


async def test_items_are_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    built = ResponsesRequest.conversation

    def watched(self: ResponsesRequest, recalled: dict[str, bytes]) -> Any:
        threads.append(threading.get_ident())
        return built(self, recalled)

    monkeypatch.setattr(ResponsesRequest, "conversation", watched)
    async with clients() as here:
        for length in (10, LARGE_BODY_BYTES):
            here.say("x " * (length // 2))
            answer = await here.openai.responses.create(model="fake", input="a")
            reference: Any = {"type": "item_reference", "id": answer.output[0].id}
            await here.openai.responses.create(model="fake", input=[reference, USER])  # type: ignore[list-item]
    assert len(threads) == 4
    assert threading.get_ident() not in threads
