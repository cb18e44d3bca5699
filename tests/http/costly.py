"""Bodies that cost a server as much as their size allows, for every field of every endpoint.

Each is as large as the server takes: a field of thousands of names, texts, numbers or objects,
nested as deeply as it goes, right or wrong. What is costly about an endpoint's own structure, such
as thousands of messages, follows.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import FastAPI

from specops.http.security.request_body import MAX_BODY_BYTES
from specops.text.json_values import MAX_PARTS, MAX_VALUES
from tests.http.openai_api import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS, MESSAGES, RESPONSES

ROOM = MAX_BODY_BYTES - 4096  # beside the field's name and the rest of a body
TURNS = ENDPOINTS[CHAT]["messages"]
USUAL: dict[str, dict[str, Any]] = ENDPOINTS | {
    "/api/chat": {"model": "fake", "messages": TURNS, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "abc", "stream": False},
    "/api/embed": {"model": "fake", "input": "abc"},
    "/api/embeddings": {"model": "fake", "prompt": "abc"},
    "/api/show": {"model": "fake"},
    "/api/pull": {"model": "fake", "stream": False},
    "/infill": {"input_prefix": "abc", "input_suffix": "abc"},
    "/v1/chat/completions/input_tokens": {"model": "fake", "messages": TURNS},
    "/v1/responses/input_tokens": {"model": "fake", "input": "abc"},
    "/embedding": {"content": "abc"},
    "/v1/messages/count_tokens": {"model": "fake", "messages": TURNS},
    "/tokenize": {"content": "abc"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": TURNS},
}
"""By endpoint a body that is answered."""


@dataclass(frozen=True)
class Costly:
    """A body of one endpoint; some thousands of them together would take gigabytes."""

    name: str
    path: str
    make: Callable[[], str | bytes]

    @property
    def content(self) -> bytes:
        """The body."""
        made = self.make()
        return made.encode() if isinstance(made, str) else made


def fitting(item: str, *, names: int = 0) -> int:
    """How many of such items a body may have; `names` are those that each has beside it."""
    parts = sum(map(item.count, "{[:")) + names
    most = ROOM // (len(item) + 1), (MAX_PARTS - 64) // max(1, parts)
    return min(*most, (MAX_VALUES - 64) // (1 + item.count(",")))


def repeated(item: str, before: str = "[", after: str = "]", count: int = 0) -> str:
    """A list of as many items as a body may have, or of `count`."""
    return before + ",".join([item] * (count or fitting(item))) + after


def names(form: str, count: int = 0) -> str:
    """An object of as many names as a body may have, or `count`; `form` has the name's number."""
    count = count or fitting(form % 100_000)
    return "{" + ",".join([form % number for number in range(count)]) + "}"


def nested(before: str, inside: str, after: str, depth: int) -> str:
    return before * depth + inside + after * depth


VALUES: dict[str, Callable[[], str]] = {
    "a long text": lambda: json.dumps("a" * ROOM),
    "a text of escapes": lambda: '"' + r"\u00e9" * (ROOM // 6) + '"',
    "half characters": lambda: '"' + r"\ud800" * (ROOM // 6) + '"',
    "a text in quotes": lambda: '"' + r"\"" * (ROOM // 2) + '"',
    "a long number": lambda: "9" * ROOM,
    "a long fraction": lambda: "0." + "3" * ROOM,
    "numbers": lambda: repeated("1"),
    "too many numbers": lambda: repeated("1", count=ROOM // 2),
    "fractions": lambda: repeated("1e9"),
    "large numbers": lambda: repeated("9" * 640),
    "too large numbers": lambda: repeated("9" * 4000),
    "texts": lambda: repeated('"a"'),
    "empty texts": lambda: repeated('""'),
    "empty lists": lambda: repeated("[]"),
    "lists of a number": lambda: repeated("[1]"),
    "empty objects": lambda: repeated("{}"),
    "nothings": lambda: repeated("null"),
    "objects": lambda: repeated('{"type":"text","text":"a","role":"user","content":"a"}'),
    "objects of unknown names": lambda: repeated('{"type":"text","text":"a","role":"user",'
                                                '"content":"a","x":1}'),
    "names": lambda: names('"%d":0'),
    "too many names": lambda: names('"%d":0', ROOM // 11),
    "names of objects": lambda: names('"%d":{"a":{}}'),
    "one name": lambda: names('"a":%d'),
    "lists within lists": lambda: nested("[", "", "]", MAX_PARTS - 64),
    "lists within lists to a limit": lambda: repeated(nested("[", "", "]", 90)),
    "objects within objects": lambda: nested('{"a":', "1", "}", MAX_PARTS // 2 - 64),
    "objects within objects to a limit": lambda: repeated(nested('{"a":', "1", "}", 90)),
    "schemas": lambda: '{"type":"object","properties":' + names('"%d":{"type":"string"}') + "}",
}  # fmt: skip


def usual_of(path: str, model: str) -> dict[str, Any]:
    """A body that an endpoint of a server with this model answers."""
    return USUAL[path] | ({"model": model} if "model" in USUAL[path] else {})


@cache
def value(kind: str) -> str:
    return VALUES[kind]()


def fields_of(app: FastAPI) -> dict[str, dict[str, Any]]:
    """By endpoint its body's fields: their schemas, by their names."""
    schema = app.openapi()
    found = {}
    for path, operations in schema["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found[path] = schema["components"]["schemas"][name]["properties"]
    return found


def of_fields(app: FastAPI, model: str = "fake") -> Iterator[Costly]:
    """Every field of every endpoint with every value, and a field that no endpoint has."""
    for path, fields in fields_of(app).items():
        for field in (*fields, "unknown"):
            for kind in VALUES:
                make = partial(with_field, usual_of(path, model), field, kind)
                yield Costly(f"{field}: {kind}", path, make)


def with_field(usual: dict[str, Any], field: str, kind: str) -> str:
    """A body with a costly value in one of its fields."""
    head = json.dumps({name: item for name, item in usual.items() if name != field})
    return f"{head[:-1]}{', ' if len(head) > 2 else ''}{json.dumps(field)}: {value(kind)}}}"


WHOLE: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
    "unknown names": lambda usual: beside(usual, names('"x%d":0')),
    "too many unknown names": lambda usual: beside(usual, names('"x%d":0', 87_000)),
    "long unknown names": lambda usual: beside(usual, names(f'"{"x" * 2000}%d":0')),
    "no JSON": lambda _: b"{" * ROOM,
    "no object": lambda _: repeated("1"),
    "many objects": lambda _: repeated("{}", count=ROOM // 3),
    "no name": lambda _: names('"%d":0'),
    "a long name": lambda _: json.dumps({"x" * ROOM: 1}),
    "no UTF-8": lambda _: b'{"model":"' + b"\xff" * ROOM + b'"}',
    "blanks": lambda usual: " " * ROOM + json.dumps(usual),
}
"""Bodies of every endpoint, made from its usual one."""


def beside(usual: dict[str, Any], unknown: str) -> str:
    """A body with more fields, those of an object."""
    return f"{json.dumps(usual)[:-1]},{unknown[1:]}"


def of_structure(model: str = "fake") -> Iterator[Costly]:
    """What is costly about whole bodies, and what the fields of one endpoint allow together."""
    for path in USUAL:
        for name, make in WHOLE.items():
            yield Costly(name, path, partial(make, usual_of(path, model)))
    function = '{"type":"function","function":{"name":"f%d","parameters":{"type":"object"}}}'
    call = '{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}'
    many_calls = repeated(call)
    tools = "[" + ",".join(function % number for number in range(fitting(function))) + "]"
    turn = json.dumps(TURNS[0])
    own: list[tuple[str, str, dict[str, str]]] = [
        ("tools", CHAT, {"messages": f"[{turn}]", "tools": tools}),
        ("calls", CHAT, {"messages": f'[{{"role":"assistant","tool_calls":{many_calls}}}]'}),
        (
            "long arguments",
            CHAT,
            {
                "messages": '[{"role":"assistant","tool_calls":[{"id":"1","function":'
                f'{{"name":"f","arguments":{json.dumps(repeated("[]", count=ROOM // 3))}}}}}]}}]'
            },
        ),
        ("tools", "/api/chat", {"messages": f"[{turn}]", "tools": tools}),
        ("short texts", EMBEDDINGS, {"input": json.dumps(["a" * 500] * 2048)}),
        ("short texts", "/api/embed", {"input": json.dumps(["a" * 500] * 2048)}),
        ("prompts", COMPLETIONS, {"prompt": json.dumps(["a" * 8000] * 128)}),
        ("answers", COMPLETIONS, {"prompt": json.dumps("a" * 8000), "n": "128", "echo": "true"}),
        (
            "blocks",
            MESSAGES,
            {"max_tokens": "9", "messages": f'[{{"role":"user","content":'
             f'{repeated(json.dumps({"type": "text", "text": "a"}))}}}]'},
        ),
        ("items", RESPONSES, {"input": repeated('{"role":"user","content":"a"}')}),
        ("pieces", "/tokenize", {"content": json.dumps("ab" * (ROOM // 2)), "with_pieces": "true"}),
    ]  # fmt: skip
    for name, path, fields in own:
        named = {} if path.startswith("/tok") else {"model": json.dumps(model)}
        inside = ",".join(f'"{field}":{value}' for field, value in (named | fields).items())
        yield Costly(name, path, partial(str, f"{{{inside}}}"))


class LongestCallback:
    """The longest that the event loop was held within the block, in seconds of its own time."""

    seconds = 0.0

    def __enter__(self) -> LongestCallback:
        self._run = run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            run(handle)
            self.seconds = max(self.seconds, time.thread_time() - start)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.events.Handle._run = self._run  # type: ignore[method-assign]
