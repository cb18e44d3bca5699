"""What other load generators send: bodies as `vllm bench serve` and guidellm build them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.openai_api import api

pytestmark = pytest.mark.anyio

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CONTENT = [{"type": "text", "text": "a"}]
# vllm/benchmarks/lib/endpoint_request_func.py (openai-chat, openai), with --ignore-eos and the
# sampling options; guidellm/backends/openai.
VLLM_CHAT = {
    **{"messages": [{"role": "user", "content": CONTENT}], "max_completion_tokens": 8},
    **{"ignore_eos": True, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
}
VLLM_TEXT = {"prompt": "a", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
GUIDELLM_CHAT = {
    **{"messages": [{"role": "user", "content": CONTENT}], "max_completion_tokens": 8},
    **{"stop": None, "ignore_eos": True},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", VLLM_CHAT),
        ("/v1/completions", VLLM_TEXT | {"ignore_eos": True}),
        ("/v1/chat/completions", GUIDELLM_CHAT),
    ],
    ids=["vllm, chat", "vllm, text", "guidellm, chat"],
)
async def test_their_requests_are_answered_with_the_usage_that_they_read(
    path: str, body: dict[str, Any]
) -> None:
    async with api() as here:
        answer = await here.ask(path, **body, **STREAM)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    first, last = events[0], events[-1]
    assert first["choices"][0].get("delta") or first["choices"][0]["text"]
    assert not last["choices"]
    assert {"prompt_tokens", "completion_tokens"} <= set(last["usage"])
