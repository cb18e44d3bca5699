"""What OpenAI's endpoints refuse: each time the field is named, and nothing is computed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.http.openai_api import BODIES, CHAT, COMPLETIONS, GENERATE, api, problem

pytestmark = pytest.mark.anyio


# -- refusals ----------------------------------------------------------------------------------

WRONG: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "max_tokens", 0, "invalid_value"),
    (COMPLETIONS, "temperature", 2.5, "invalid_value"),
    (COMPLETIONS, "temperature", "1", "invalid_value"),
    (COMPLETIONS, "top_p", 0, "invalid_value"),
    (COMPLETIONS, "n", 0, "invalid_value"),
    (COMPLETIONS, "n", 129, "invalid_value"),
    (COMPLETIONS, "stop", ["a"] * 5, "invalid_value"),
    (COMPLETIONS, "stop", "", "invalid_value"),
    (COMPLETIONS, "logprobs", 6, "invalid_value"),
    (COMPLETIONS, "logprobs", True, "invalid_value"),
    (COMPLETIONS, "prompt", [], "invalid_value"),
    (COMPLETIONS, "prompt", None, "invalid_value"),
    (COMPLETIONS, "prompt", [-1], "invalid_value"),
    (COMPLETIONS, "suffix", "x", "unsupported_parameter"),
    (COMPLETIONS, "best_of", 0, "invalid_value"),
    (COMPLETIONS, "best_of", 129, "invalid_value"),
    (COMPLETIONS, "logit_bias", {"256": 1}, "invalid_value"),
    (COMPLETIONS, "logit_bias", {"several": 1}, "invalid_value"),
    (COMPLETIONS, "logit_bias", {"5": 101}, "invalid_value"),
    (COMPLETIONS, "frequency_penalty", 2.5, "invalid_value"),
    (COMPLETIONS, "presence_penalty", False, "invalid_value"),
    (COMPLETIONS, "stop_token_ids", [256], "invalid_value"),
    (COMPLETIONS, "min_p", 1.5, "invalid_value"),
    (CHAT, "messages", [], "invalid_value"),
    (CHAT, "messages", [{"role": "king", "content": "a"}], "invalid_value"),
    (CHAT, "messages", [{"role": "user"}], "missing_parameter"),
    *(
        (CHAT, "messages", [{"role": "user", "content": [{"type": kind}]}], "unsupported_parameter")
        for kind in ("image_url", "input_audio", "file")
    ),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text"}]}], "invalid_value"),
    (CHAT, "messages", [{"role": "tool", "content": "a"}], "missing_parameter"),
    (CHAT, "top_logprobs", 21, "invalid_value"),
    (CHAT, "response_format", {"type": "xml"}, "invalid_value"),
    (CHAT, "response_format", {"type": "json_schema"}, "missing_parameter"),
    (COMPLETIONS, "guided_choice", [], "invalid_value"),
    (CHAT, "tools", [{"type": "function", "function": {"name": "two words"}}], "invalid_value"),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}] * 2, "invalid_value"),
    (CHAT, "tools", [{"type": "function"}], "missing_parameter"),
    (CHAT, "tool_choice", "required", "invalid_value"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}, "invalid_value"),
    (CHAT, "functions", [{"name": "f"}], "unsupported_parameter"),
]
UNKNOWN: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "max_token", 5, "max_token"),
    (CHAT, "prompt", "a", "prompt"),
    (CHAT, "messages", [{"role": "user", "content": "a", "cache": 1}] * 2, "messages.cache"),
    (CHAT, "chat_id", {"\n": 1}, "chat_id"),
    (GENERATE, "bad\nname,", 1, "bad?name?"),
]


@pytest.mark.parametrize(("path", "field", "value", "name"), UNKNOWN, ids=str)
async def test_unknown_fields_are_ignored_and_named(
    path: str, field: str, value: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specops")
    async with api() as here:
        plain = await here.ask(path, **{field: value})
        streamed = await here.ask(path, **{field: value, "stream": True})
        usual = await here.ask(path)
    assert plain.headers["x-ignored-fields"] == streamed.headers["x-ignored-fields"] == name
    assert "x-ignored-fields" not in usual.headers
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line.get("ignored_fields") for line in lines] == [name, name, None]


@pytest.mark.parametrize(("path", "field", "value", "name"), UNKNOWN, ids=str)
async def test_a_setting_has_them_refused(path: str, field: str, value: Any, name: str) -> None:
    async with api(unknown_fields="refuse") as here:
        error = problem(await here.ask(path, **{field: value}), 422 if path == GENERATE else 400)
        assert (await here.ask(CHAT, user="me", store=True)).status_code == 200
    assert (error["param"], error["code"]) == (field, "unknown_parameter")


async def test_a_header_names_so_many_and_no_more() -> None:
    async with api() as here:
        body = BODIES[CHAT] | {f"field-{number}": 1 for number in range(2000)}
        response = await here.client.post(CHAT, json=body)
    assert response.status_code == 200
    assert len(response.headers["x-ignored-fields"].split(", ")) == 32


@pytest.mark.parametrize(("path", "field", "value", "code"), WRONG, ids=str)
async def test_wrong_field_is_400_and_named(path: str, field: str, value: Any, code: str) -> None:
    async with api() as here:
        error = problem(await here.ask(path, **{field: value}), 400)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert re.match(rf"{field}[.:]", error["message"])


async def test_what_is_wrong_within_a_field_is_found_by_its_place() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": 5}]}]
    async with api() as here:
        error = problem(await here.ask(CHAT, messages=messages), 400)
    assert error["param"] == "messages"
    assert "messages.1.content.0.type: Input should be a valid string" in error["message"]


NEUTRAL = {
    "logit_bias": {},
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "metadata": {"a": "b"},
    "store": True,
    "prediction": {"type": "content", "content": "a"},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
}


async def test_what_asks_for_nothing_is_taken() -> None:
    async with api() as here:
        assert (await here.ask(CHAT, **NEUTRAL)).status_code == 200


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_missing_field_is_named(missing: str) -> None:
    async with api() as here:
        body = {name: value for name, value in BODIES[CHAT].items() if name != missing}
        error = problem(await here.client.post(CHAT, json=body), 400)
    assert (error["param"], error["code"]) == (missing, "missing_parameter")


async def test_top_logprobs_need_logprobs() -> None:
    async with api() as here:
        assert problem(await here.ask(CHAT, top_logprobs=2), 400)["param"] == "top_logprobs"


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "b", "echo": True}, "suffix"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), TOGETHER)
async def test_fields_of_completions_that_do_not_go_together(
    fields: dict[str, Any], param: str
) -> None:
    async with api() as here:
        assert problem(await here.ask(COMPLETIONS, **fields), 400)["param"] == param
        assert not here.service.requests
