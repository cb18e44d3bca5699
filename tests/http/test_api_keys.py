"""Keys, the clients that they stand for, and what the log tells of a request."""

from __future__ import annotations

import pytest

from tests.http.openai_api import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    api,
    problem,
)

pytestmark = pytest.mark.anyio


# -- keys --------------------------------------------------------------------------------------

KEYS = "first-key,second-key"
ANTHROPICS = {"x-api-key": "second-key"}
CLOSED = (CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, "/v1/models", "/v1/other", "/tokenize")


@pytest.mark.parametrize(
    "header",
    [{"authorization": "Bearer first-key"}, {"authorization": "Bearer second-key"}, ANTHROPICS],
)
async def test_any_of_the_keys_opens(header: dict[str, str]) -> None:
    async with api(api_keys=KEYS) as here:
        here.client.headers.update(header)
        for path in (CHAT, MESSAGES, RESPONSES, GENERATE):
            assert (await here.ask(path)).status_code == 200
        assert (await here.client.get("/v1/models")).status_code == 200
        assert (await here.client.post("/tokenize", json={"content": "a"})).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_a_key_is_a_client_and_the_engine_is_not_told_which_key(path: str) -> None:
    async with api(api_keys=KEYS) as here:
        for key in ("first-key", "second-key", "first-key"):
            here.client.headers["authorization"] = f"Bearer {key}"
            await here.ask(path)
    first, second, again = (request.client for request in here.service.requests)
    assert first == again != second
    assert not {first, second} & {"", *KEYS.split(",")}
    async with api() as here:
        await here.ask(CHAT)
    assert here.service.requests[0].client == ""


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Bearer first", "Basic first-key", "first-key", "Bearer é"],
)
@pytest.mark.parametrize("path", CLOSED)
async def test_without_a_key_it_is_401(value: str | None, path: str) -> None:
    async with api(api_keys=KEYS) as here:
        headers = {} if value is None else {"authorization": value.encode()}
        response = await here.client.request("POST", path, headers=headers, content=b"{}")
        error = problem(response, 401)
        rejected = here.rejected("unauthorized")
    assert error["type"] == "authentication_error"
    assert error.get("code", "invalid_api_key") == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert rejected == 1
    assert not here.service.requests


@pytest.mark.parametrize(
    "path", ["/", "/health", "/health/live", "/metrics", "/docs", "/openapi.json"]
)
async def test_what_machines_ask_needs_no_key(path: str) -> None:
    async with api(api_keys=KEYS) as here:
        assert (await here.client.get(path)).status_code == 200


# -- the log -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_for", [False, True])
async def test_the_log_has_figures_and_no_text_unless_asked(
    asked_for: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specops")
    async with api(log_level="info+prompts" if asked_for else "info") as here:
        await here.ask(CHAT, n=2)
        await here.ask(COMPLETIONS, stream=True)
        await here.generate()
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line["finish"] for line in lines] == [["stop"] * 2, ["stop"], ["stop"]]
    assert [line["generated_tokens"] for line in lines] == [10, 5, 5]
    assert all(line["queue_seconds"] == 0.25 for line in lines)
    if asked_for:
        assert [line["prompt"] for line in lines] == [
            [{"role": "user", "content": "abc"}],
            "abc",
            "abc",
        ]
        assert [line["answers"] for line in lines] == [["Hello world"] * 2] + [["Hello world"]] * 2
    else:
        assert "abc" not in str(lines)
        assert "Hello" not in str(lines)
