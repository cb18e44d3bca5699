"""A request's key: the session's, the user's, or what the conversation begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from specops.http.app import _GENERATING
from specops.http.routes import embeddings, ollama
from tests.gateway.running import Row, row
from tests.waiting import wait

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    with row(1, tmp_path_factory.mktemp("key")) as running:
        yield running


def said(*texts: str, system: str = "Be brief.") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns]


def test_a_session_has_one_key_whatever_it_says(one: Row) -> None:
    session = {"X-Session-ID": "7"}
    first = one.key({"prompt": "a"}, headers=session)
    assert first
    assert one.key({"messages": said("b")}, CHAT, session) == first
    assert one.key({"prompt": "a"}, headers={"X-Session-ID": "8"}) != first


def test_a_client_cannot_choose_its_replica_by_the_header(one: Row) -> None:
    assert one.key({"prompt": "a"}, headers={"x-specops-key": "mine"}) == one.key({"prompt": "a"})


def test_sessions_of_two_clients_are_two(one: Row) -> None:
    keys = {
        one.key({"prompt": "a"}, headers={"X-Session-ID": "7", "Authorization": f"Bearer {name}"})
        for name in ("x", "y")
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, {"user": "u"}), ("/v1/messages", {"metadata": {"user_id": "u"}})]
)
def test_a_user_has_one_key_whatever_is_said(one: Row, path: str, field: dict[str, object]) -> None:
    keys = {one.key({"messages": said(text), **field}, path) for text in "ab"}
    assert len(keys) == 1
    assert keys != {one.key({"messages": said("a")}, path)}


@pytest.mark.parametrize("system", ["Be brief.", 'Say "{[" \\ often. ' * 90])
def test_every_turn_of_a_conversation_has_its_key(one: Row, system: str) -> None:
    turns = [said("Why?", system=system), said("Why?", "So.", 'And "then"?', system=system)]
    keys = {one.key({"messages": turn, "model": "m"}, CHAT) for turn in turns}
    assert len(keys) == 1
    assert keys != {one.key({"messages": said("How?", system=system)}, CHAT)}
    assert keys != {one.key({"messages": said("Why?", system="x" + system)}, CHAT)}


def test_the_system_prompt_counts_where_it_is_a_field_of_its_own(one: Row) -> None:
    body = {"messages": [{"role": "user", "content": "Why?"}]}
    keys = {one.key({**body, "system": system}, "/v1/messages") for system in ("a", "b")}
    assert len(keys) == 2
    keys = {one.key({"input": "Why?", "instructions": s}, "/v1/responses") for s in ("a", "b")}
    assert len(keys) == 2


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_prompts_that_begin_alike_have_one_key(one: Row, path: str) -> None:
    beginning = "x" * 600
    keys = {one.key({"prompt": beginning + end}, path) for end in ("a", "b")}
    assert len(keys) == 1
    assert one.key({"prompt": "y" + beginning}, path) not in keys


def test_whatever_generates_has_a_key(one: Row) -> None:
    fields = {"messages": said("a"), "input": "a", "prompt": "a"}
    assert all(one.key(fields, path) for path in _GENERATING - {embeddings.PATH, ollama.EMBED_PATH})


def test_the_other_fields_change_no_key(one: Row) -> None:
    body = {"prompt": "a", "max_new_tokens": 3, "stop": ["}", '"prompt"'], "seed": None}
    assert one.key(body) == one.key(dict(reversed(body.items()))) == one.key({"prompt": "a"})


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
def test_a_body_that_is_wrong_is_the_replicas_to_refuse(one: Row, body: bytes) -> None:
    sent = len(one.fakes[0].asked)
    assert one.client.post("/generate", content=body).status_code == 200
    assert len(one.fakes[0].asked) == sent + 1


def test_the_log_has_the_requests_id_and_key_and_no_text(one: Row) -> None:
    key = one.key({"prompt": "a secret"}, headers={"X-Request-ID": "mine-1"})
    found = _logged(one, "mine-1")
    assert found["key"] == key
    assert found["status"] == 200
    assert found["replica"].endswith(f":{one.fakes[0].port}")
    assert "secret" not in one.gateway.output.read_text()


def _logged(one: Row, request_id: str) -> dict[str, object]:
    def lines() -> list[dict[str, object]]:
        return [line for line in one.gateway.log() if line["request_id"] == request_id]

    wait("it is logged", lambda: bool(lines()))
    return lines()[0]
