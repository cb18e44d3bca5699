"""A request's key: from its session, its user, or the beginning of its conversation.

The last test asks the same gateway for what it must not show.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.gateway.running import Row, row
from tests.http.openai_api import PROMPTS
from tests.waiting import PATIENCE, wait

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SESSION = {"X-Session-ID": "7"}
LONG_SYSTEM = 'Say "{[" \\ often. ' * 90
BEGINNING = "x" * 600


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    with row(1, tmp_path_factory.mktemp("key")) as running:
        yield running


def said(*texts: str, system: str = "Be brief.") -> dict[str, Any]:
    """The body of a conversation, the user's turn first."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *turns], "model": "m"}


Request = tuple[dict[str, Any], str, dict[str, str]]


def asks(body: dict[str, Any], path: str = "/generate", **headers: str) -> Request:
    return body, path, {name.replace("_", "-"): text for name, text in headers.items()}


def gap(before: str, typed: str, *chunks: dict[str, str]) -> dict[str, Any]:
    """The body of an editor's request."""
    return {
        "input_prefix": before, "input_suffix": "", "input_extra": list(chunks), "prompt": typed,
    }  # fmt: skip


CHUNK = {"text": "import os\n", "filename": "a.py"}
SAME_SESSION = asks({"prompt": "a"}, X_Session_ID="7")
WITHOUT_SESSION = asks({"prompt": "a"})
USER = asks({**said("a"), "user": "u"}, CHAT)
ANTHROPIC_USER = asks({**said("a"), "metadata": {"user_id": "u"}}, MESSAGES)
ALONE = {"messages": [{"role": "user", "content": "Why?"}]}


@pytest.mark.parametrize(
    ("first", "alike", "others"),
    [
        (
            SAME_SESSION,
            [asks(said("b"), CHAT, X_Session_ID="7")],
            [asks({"prompt": "a"}, X_Session_ID="8")],
        ),
        # Sessions of two clients differ, and no client can choose its replica.
        (
            asks({"prompt": "a"}, X_Session_ID="7", Authorization="Bearer x"),
            [],
            [SAME_SESSION, asks({"prompt": "a"}, X_Session_ID="7", Authorization="Bearer y")],
        ),
        (WITHOUT_SESSION, [asks({"prompt": "a"}, x_specops_key="mine")], []),
        (USER, [asks({**said("b"), "user": "u"}, CHAT)], [asks(said("a"), CHAT)]),
        (
            ANTHROPIC_USER,
            [asks({**said("b"), "metadata": {"user_id": "u"}}, MESSAGES)],
            [asks(said("a"), MESSAGES)],
        ),
        *(
            (
                asks(said("Why?", system=system), CHAT),
                [asks(said("Why?", "So.", 'And "then"?', system=system), CHAT)],
                [
                    asks(said("How?", system=system), CHAT),
                    asks(said("Why?", system="x" + system), CHAT),
                ],
            )
            for system in ("Be brief.", LONG_SYSTEM)
        ),
        (asks({**ALONE, "system": "a"}, MESSAGES), [], [asks({**ALONE, "system": "b"}, MESSAGES)]),
        (
            asks({"input": "Why?", "instructions": "a"}, "/v1/responses"),
            [],
            [asks({"input": "Why?", "instructions": "b"}, "/v1/responses")],
        ),
        *(
            (
                asks({"prompt": BEGINNING + "a"}, path),
                [asks({"prompt": BEGINNING + "b"}, path)],
                [asks({"prompt": "y" + BEGINNING}, path)],
            )
            for path in ("/generate", "/v1/completions", "/completion")
        ),
        (
            asks(gap("", "", CHUNK, CHUNK), "/infill"),
            [asks(gap("def f():\n", "    ret", CHUNK), "/infill")],
            [asks(gap("", "", {"text": "z"}), "/infill"), asks(gap("", ""), "/infill")],
        ),
        (
            asks(gap(BEGINNING + "a", "b"), "/infill"),
            [asks(gap(BEGINNING + "c\n", ""), "/infill")],
            [asks(gap("y" + BEGINNING, "b"), "/infill")],
        ),
        (
            WITHOUT_SESSION,
            [
                asks({"prompt": "a", "max_new_tokens": 3, "stop": ["}", '"prompt"'], "seed": None}),
                asks({"seed": None, "stop": ["}", '"prompt"'], "prompt": "a"}),
            ],
            [],
        ),
    ],
    ids=[
        *("session", "client", "header", "user", "Anthropic's user", "conversation"),
        *("long system prompt", "Anthropic's system prompt", "instructions", "prompt"),
        *("OpenAI's prompt", "llama-server's prompt", "chunks", "gap", "other fields"),
    ],
)
def test_requests_have_one_key_if_they_belong_together(
    one: Row, first: Request, alike: list[Request], others: list[Request]
) -> None:
    key = one.key(*first)
    assert key
    assert {one.key(*request) for request in alike} <= {key}
    assert key not in {one.key(*request) for request in others}


def test_every_request_that_generates_has_a_key(one: Row) -> None:
    fields = {**said("a"), "input": "a", "prompt": "a"}
    for path, prompt in PROMPTS.items():
        assert prompt.operation == "embeddings" or one.key(fields, path)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b"{",
        b'{"prompt"',
        b'{"prompt":',
        b'"prompt"',
        b'{"messages": "\\',
        b"[" * 500_000,
        b'{"a": ' + b"[" * 500_000,
        b'{"a": "' + b"\\\\" * 500_000,
        json.dumps({"a": ["x"] * 100_000}).encode(),
        json.dumps({str(number): 0 for number in range(50_000)}).encode(),
    ],
    ids=lambda body: f"{body[:12]!r} {len(body)}",
)
def test_the_gateway_passes_a_wrong_body_on(one: Row, body: bytes) -> None:
    sent = len(one.fakes[0].asked)
    assert one.client.post("/generate", content=body).status_code == 200
    assert len(one.fakes[0].asked) == sent + 1


def test_the_log_has_the_requests_id_and_key_but_no_text(one: Row) -> None:
    key = one.key({"prompt": "a secret"}, headers={"X-Request-ID": "mine-1"})
    for _ in range(2):  # Envoy writes its log every 10 s, or once 64 KiB of it have come together
        one.post(headers={"X-Request-ID": "x" * 40_000})

    def lines() -> list[dict[str, Any]]:
        return [line for line in one.gateway.log() if line["request_id"] == "mine-1"]

    wait("it is logged", lambda: bool(lines()))
    (found,) = lines()
    assert (found["key"], found["status"]) == (key, 200)
    assert found["replica"].endswith(f":{one.fakes[0].port}")
    assert "secret" not in one.gateway.output.read_text()


def test_the_admin_interface_cannot_be_reached_from_outside(one: Row) -> None:
    figures = one.gateway.figures
    assert httpx.get(f"{figures}/stats/prometheus", timeout=PATIENCE).status_code == 200
    for path in ("/", "/config_dump", "/stats/prometheus/../../config_dump", "/server_info"):
        assert httpx.get(f"{figures}{path}", timeout=PATIENCE).status_code == 404
    for path in ("/quitquitquit", "/stats/prometheus"):
        assert httpx.post(f"{figures}{path}", timeout=PATIENCE).status_code == 404
    assert "/config_dump" not in one.client.get("/config_dump").text
    sockets = list(Path("/tmp").glob("specops-gateway-*.sock"))  # noqa: S108
    assert sockets
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in sockets)
