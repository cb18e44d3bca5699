"""Answers of `/v1/responses`, and all events of their streams, are what Open Responses specifies.

The types are the specification's schema as `openresponses-types` on PyPI has it (Apache 2.0). The
requests are of the kinds that the specification's own compliance test sends, but for WebSockets,
compacted histories and images, which are not claimed.
"""

import json

import product
import pytest
import requests
from openresponses_types import types

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
# Of each event its type, from the field `type`.
EVENTS = {
    next(iter(event.model_fields["type"].annotation)).value: event
    for name, event in vars(types).items()
    if name.endswith("StreamingEvent")
}
USER = {"type": "message", "role": "user", "content": "My name is Ada."}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
REQUESTS = {
    "text": {"input": "Say hello."},
    "system": {"input": [{"role": "system", "content": "Be brief."}, USER]},
    "instructions": {"input": [USER], "instructions": "Be brief."},
    "turns": {
        "input": [
            USER,
            {"type": "message", "role": "assistant", "content": "Hello Ada."},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ]
    },
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
    "call": {"input": "What is the weather?", "tools": [TOOL], "tool_choice": "required"},
    "result": {
        "input": [USER, CALL, {"type": "function_call_output", "call_id": "c1", "output": "9 C"}],
        "tools": [TOOL],
    },
    "probabilities": {
        "input": "Hello",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "cut": {"input": "Tell me a story.", "max_output_tokens": 16},
    "object": {"input": "Who are you?", "text": {"format": {"type": "json_object"}}},
    "schema": {
        "input": "Who are you?",
        "text": {
            "format": {
                "type": "json_schema",
                "name": "place",
                "strict": True,
                "schema": TOOL["parameters"],
            }
        },
    },
    "named call": {
        "input": "What is the weather?",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "get_weather"},
    },
    "allowed call": {
        "input": "What is the weather?",
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
        "parallel_tool_calls": False,
    },
    "reasoning": {
        "input": [USER, {"type": "reasoning", "summary": []}, {"role": "user", "content": "Why?"}],
        "reasoning": {"effort": "low", "summary": "auto"},
    },
    "echoed": {
        "input": "Hello",
        "metadata": {"a": "b"},
        "user": "me",
        "truncation": "auto",
        "store": False,
        "max_tool_calls": 1,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "top_p": 0.5,
    },
}


@pytest.fixture(scope="module")
def url():
    port, process = product.start({"SPECOPS_MODEL": "smollm2"})
    yield f"http://127.0.0.1:{port}/v1/responses"
    product.end(process)


def specified(response):
    """Return a response without its schema: the types know only null, OpenAI's repeat it."""
    if "schema" in (form := response["text"]["format"]):
        form["schema"] = None
    return response


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_have_the_specifications_form(url, name):
    body = {"model": "smollm2", "max_output_tokens": 60, "temperature": 0} | REQUESTS[name]
    answer = requests.post(url, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found = types.ResponseResource.model_validate(specified(answer.json()), strict=False)
    assert found.output


@pytest.mark.parametrize("name", REQUESTS)
def test_events_have_the_specifications_form(url, name):
    body = {"model": "smollm2", "max_output_tokens": 60, "temperature": 0} | REQUESTS[name]
    answer = requests.post(url, json=body | {"stream": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        if "response" in event:
            specified(event["response"])
        EVENTS[event["type"]].model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
