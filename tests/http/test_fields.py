"""Every field, by path: what it becomes in the engine, or the error that names it."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from specops.http.answering.schema import NEVER
from specops.request import FIXED_K_DRAFT, Grammar, GrammarKind, SamplingParams
from specops.sampling_defaults import SamplingDefaults
from tests.fakes import INFO, FakeService, begun, fills_in
from tests.http.openai_api import (
    ANSWER,
    BODIES,
    CHAT,
    COMPLETION,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Api,
    api,
    problem,
    wrapped,
)

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
INFILL = "/infill"
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": BODIES[CHAT] | {"stream": False},
    "/api/generate": BODIES[COMPLETIONS] | {"stream": False},
}
PATHS = ENDPOINTS | OLLAMA | {INFILL: {"input_prefix": "ab", "input_suffix": "cd"}}


def filling_in(path: str) -> FakeService:
    """A service whose model can do what the path is for."""
    service = FakeService(ANSWER)
    if path == INFILL:
        service.loaded.tokenizer = fills_in()
    return service


async def asked(here: Api, path: str, fields: dict[str, Any]) -> Any:
    """Send a body with these fields, without those that are `...`, with NaN as Python writes it."""
    body = {name: value for name, value in (PATHS[path] | fields).items() if value is not ...}
    return await here.client.post(path, content=json.dumps(body), headers=JSON)


# -- what reaches the engine ---------------------------------------------------------------------

TINY = pytest.approx(0, abs=1e-6)
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 5}, {"temperature": 5.0}),
    ({"temperature": -1}, {"temperature": 0.0}),
    ({"top_p": 7.5}, {"top_p": 1.0}),
    ({"min_p": 2}, {"min_p": 1.0}),
    ({"min_p": -1}, {"min_p": 0.0}),
    ({"top_k": 5.0}, {"top_k": 5}),
    ({"top_k": -3}, {"top_k": 0}),
    ({"seed": 42.9}, {"seed": 42}),
    ({"seed": -1.0}, {"seed": None}),
    ({"seed": 1e300}, {"seed": (1 << 63) - 1}),
    ({"repeat_penalty": 0}, {"repetition_penalty": 1.0}),
    ({"repeat_penalty": 25}, {"repetition_penalty": 25.0}),
    ({"presence_penalty": 3, "frequency_penalty": -4.5}, {"presence_penalty": 3.0}),
    ({"temperature": None, "top_k": None, "min_p": None}, {"temperature": 0.8, "top_k": 40}),
]
ENDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop": [""]}, {"stop": ()}),
    *(
        ({"num_predict": limit}, {"max_new_tokens": tokens})
        for limit, tokens in ((5.0, 5), (5.9, 5), *((limit, 500) for limit in (-1, -2, -9, 0, 1e9)))
    ),
]
FINE: list[dict[str, Any]] = [
    {"options": None}, {"options": {}}, {"format": None}, {"format": ""}, {"keep_alive": None},
    {"think": None}, {"think": "max"}, {"images": None}, {"images": []}, {"stream": None},
    {"template": ""}, {"truncate": None}, {"format": {}}, {"shift": False}, {"logprobs": False},
    {"options": {"stop": [f"s{i}" for i in range(20)]}},
    {"options": {"num_ctx": 4096.0, "num_gpu": -1, "use_mmap": None, "repeat_last_n": 64}},
    {"options": {"mirostat": 1, "tfs_z": 1, "unheard_of": {"a": 1}}}, {"unheard_of": 1},
]  # fmt: skip
DRAWN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": None}),
    ({"samplers": ["top_k", "temperature"]}, {"top_k": 40, "top_p": 1.0, "temperature": 0.8}),
    ({"samplers": "kt"}, {"top_k": 40, "top_p": 1.0, "temperature": 0.8}),
    ({"samplers": ["top_p"]}, {"temperature": 1.0, "top_p": 0.95, "top_k": 0, "min_p": 0.0}),
    ({"samplers": ["nonsense", "infill"]}, {"temperature": 0.0}),
    ({"samplers": ["top_p"], "temperature": 0}, {"temperature": 0.0}),
    ({"repetition_penalty": 1.25, "samplers": ["top_p"]}, {"repetition_penalty": 1.0}),
    ({"repeat_penalty": 1.25}, {"repetition_penalty": 1.25}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": -1}, {"seed": None}),
]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}
WRITTEN = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))
OBJECT = Grammar(GrammarKind.JSON_OBJECT, '{"type":"object"}')
GBNF = 'root ::= "a"'
# Ways to choose tokens; of those without a second item the engine gets what the client sent.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 40}, {}),
    ({"min_p": 0.1}, {}),
    ({"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.2}, {}),
    ({"top_p": 0}, {"top_p": TINY}),
    ({"seed": 11}, {}),
    ({"seed": 11.0, "top_k": 5.0, "min_tokens": 2.0}, {"seed": 11, "top_k": 5, "min_tokens": 2}),
    ({"logit_bias": {"5": 1000}}, {"logit_bias": ((5, 100),)}),
    ({"logit_bias": {"5": -100, "a": 1.5}}, {"logit_bias": ((5, -100), (97, 1.5))}),
    ({"bad_words": ["x"]}, {"bad_words": ((120,), (32, 120))}),
    ({"bad_words": ["\n", " x", "\nx"]}, {"bad_words": ((10,), (32, 120), (10, 120))}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}},
        {"grammar": OBJECT}),
    # Properties come in the order in which the schema has them.
    ({"response_format": wrapped(SCHEMA)}, {"grammar": WRITTEN}),
    ({"guided_json": SCHEMA}, {"grammar": WRITTEN}),
    ({"guided_json": WRITTEN.text}, {"grammar": WRITTEN}),
    ({"guided_regex": "[0-9]+"}, {"grammar": Grammar(GrammarKind.REGEX, "[0-9]+")}),
    ({"guided_choice": ["a", "é"]}, {"grammar": Grammar(GrammarKind.CHOICE, '["a","é"]')}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": Grammar(GrammarKind.LARK, 'start: "a"')}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"grammar": WRITTEN}),
    ({"response_format": {"type": "json_object", "schema": {}}}, {"grammar": OBJECT}),
    ({"json_schema": SCHEMA}, {"grammar": WRITTEN}),
    ({"structured_outputs": {"json": SCHEMA}}, {"grammar": WRITTEN}),
    ({"structured_outputs": {"json_object": True}},
        {"grammar": OBJECT}),
    ({"structured_outputs": {"choice": ["a"]}}, {"grammar": Grammar(GrammarKind.CHOICE, '["a"]')}),
]  # fmt: skip
# llama-server's own forms.
LLAMA: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"logit_bias": empty}, {"logit_bias": ()}) for empty in ([], {})),
    *(
        ({"logit_bias": biases}, {"logit_bias": ((5, -100),)})
        for biases in ([[5, -100]], {"5": -100})
    ),
    ({"logit_bias": [["5", 1.5], [7, False]]}, {"logit_bias": ((53, 1.5), (7, NEVER))}),
    ({"logit_bias": {"ab": False}}, {"logit_bias": ((97, NEVER), (98, NEVER))}),
    ({"prompt": [1, 2, "a"]}, {"prompt_tokens": (1, 2, 97)}),
    ({"prompt": [97, 98]}, {"prompt_tokens": (97, 98)}),
    ({"prompt": {"prompt_string": "c"}}, {"prompt_tokens": begun("c")}),
    ({"max_tokens": 2}, {"max_new_tokens": 2}),
    ({"grammar": ""}, {"grammar": None}),
    ({"grammar": GBNF}, {"grammar": Grammar(GrammarKind.LARK, GBNF)}),
]
ENGINE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        GENERATE,
        {},
        {
            "prompt_tokens": begun("abc"), "max_new_tokens": 50, "drafter": "cascade", "k_draft": 6,
            "adaptive": True, "sampling": SamplingParams(), "stop": (), "stream": False,
            "ignore_eos": False,
        },
    ),
    (GENERATE, {"k_draft": 4}, {"k_draft": 4}),
    (GENERATE, {"adaptive": False}, {"k_draft": FIXED_K_DRAFT, "adaptive": False}),
    (GENERATE, {"stop": "one", "drafter": "none"}, {"stop": ("one",), "k_draft": 0}),
    (GENERATE, {"max_new_tokens": 7}, {"max_new_tokens": 7}),
    *((GENERATE, {"max_new_tokens": limit}, {"max_new_tokens": 500}) for limit in (-1, -2)),
    *(
        (path, {"stop": stop}, {"stop": ("END",) if "END" in stop else ()})
        for path in (GENERATE, COMPLETIONS, CHAT)
        for stop in ("", [""], ["", "END"])
    ),
    (GENERATE, {"drafter": "suffix"}, {"drafter": "suffix"}),
    (COMPLETIONS, {}, {"max_new_tokens": 16, "logprobs": None, "stream": False}),
    (COMPLETIONS, {"max_tokens": 7}, {"max_new_tokens": 7}),
    (COMPLETIONS, {"logprobs": 0}, {"logprobs": 0}),
    *((path, {"n_predict": 2}, {"max_new_tokens": 2}) for path in (COMPLETIONS, CHAT)),
    (COMPLETIONS, {"max_tokens": 100_000}, {"max_new_tokens": 500}),
    (CHAT, {"seed": -3, "min_tokens": 3}, {"seed": (1 << 63) - 3, "min_tokens": 3}),
    *(
        (path, fields, expected or fields) for path in BODIES for fields, expected in SAMPLING
    ),
    *(
        (path, {"stop_token_ids": [7], "ignore_eos": True, "stop": ["a", "END"], "stream": True},
            {"stop_token_ids": (7,), "ignore_eos": True, "stop": ("a", "END"), "stream": True})
        for path in BODIES
    ),
    *((COMPLETION, fields, expected) for fields, expected in LLAMA),
    *(
        (path, {"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"grammar": WRITTEN})
        for path in (COMPLETION, CHAT)
    ),
    (CHAT, {}, {"max_new_tokens": 500, "logprobs": None, "stop": ()}),
    (CHAT, {"max_completion_tokens": 9}, {"max_new_tokens": 9}),
    (CHAT, {"max_tokens": 32_000}, {"max_new_tokens": 500}),  # agents send other models' limits
    (MESSAGES, {"max_tokens": 32_000}, {"max_new_tokens": 500}),
    (RESPONSES, {"max_output_tokens": 32_000}, {"max_new_tokens": 500}),
    *(
        (path, {limit: 9.0}, {"max_new_tokens": 9})
        for path, limit in (
            *((GENERATE, "max_new_tokens"), (COMPLETIONS, "max_tokens"), (CHAT, "max_tokens")),
            *((MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")),
            (COMPLETION, "n_predict"),
        )
    ),
    (CHAT, {"logprobs": True}, {"logprobs": 0}),
    (CHAT, {"top_logprobs": 0}, {"logprobs": None}),
    # As with llama-server, -1 is no limit.
    (CHAT, {"max_tokens": -1}, {"max_new_tokens": 500}),
    (CHAT, {"max_completion_tokens": -1}, {"max_new_tokens": 500}),
    (COMPLETIONS, {"max_tokens": -1}, {"max_new_tokens": 500}),
    *((path, {"stop": stop}, {"stop": ()}) for path in BODIES for stop in ("", [], [""])),
    (CHAT, {"stop": ["", "a"]}, {"stop": ("a",)}),
    (MESSAGES, {"stop_sequences": ["", "a", ""]}, {"stop": ("a",)}),
    *(  # Ollama's options, as llama.cpp reads them
        (path, body, expected)
        for path in OLLAMA
        for options, expected in (*OPTIONS, *ENDS)
        for body in ({"options": options}, options)
    ),
    *((path, *row) for path in (COMPLETION, INFILL) for row in OPTIONS),
    *((path, fields, {}) for path in OLLAMA for fields in FINE),
    *((INFILL, fields, expected) for fields, expected in DRAWN),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "expected"), ENGINE, ids=str)
async def test_fields_reach_the_engine(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 500, "max_k_draft": 6, "request_timeout": 7.0}
    async with api(filling_in(path), **settings) as here:
        answer = await asked(here, path, fields)
    assert answer.status_code == 200, answer.text
    request = here.request
    found = {
        name: getattr(request if hasattr(request, name) else request.sampling, name)
        for name in expected
    }
    assert found == expected
    assert request.deadline - request.arrival == pytest.approx(7.0)
    assert path not in OLLAMA or not expected or "x-ignored-fields" not in answer.headers


LLAMAS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
USUAL: dict[str, dict[str, Any]] = {
    GENERATE: {"temperature": 0.0},
    **dict.fromkeys((COMPLETION, INFILL), LLAMAS),
    **dict.fromkeys(OLLAMA, LLAMAS | {"top_p": 0.9, "min_p": 0.0}),
}
"""What is said where neither request nor model says it; else the temperature is 1."""


@pytest.mark.parametrize("path", [path for path in PATHS if path != EMBEDDINGS])
async def test_what_a_request_leaves_open_is_the_models_or_the_protocols(path: str) -> None:
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5}
    advised = SamplingDefaults(temperature=0.2, top_k=20, min_p=0.1, **penalties)
    async with api(filling_in(path)) as here:

        async def drawn(model: SamplingDefaults, **fields: Any) -> dict[str, Any]:
            here.service.info = replace(INFO, sampling=model)
            assert (await asked(here, path, fields)).status_code == 200
            sampling = here.service.requests[-1].sampling
            return {name: getattr(sampling, name) for name in model._fields}

        greedy = path == GENERATE
        nothing = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        nothing |= {"repetition_penalty": 1.0, "presence_penalty": 0.0}
        usual = await drawn(SamplingDefaults())
        assert usual == nothing | USUAL.get(path, {"temperature": 1.0})
        assert await drawn(advised) == (usual if greedy else usual | advised.specified)
        null = {} if greedy else {"temperature": None, "top_k": None}
        assert await drawn(advised, **null) == await drawn(advised)
        assert await drawn(advised, temperature=0) == nothing | {"temperature": 0.0}
        penalty = {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": -1.0}
        assert await drawn(advised, **penalty) == nothing | penalty
        own = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        assert await drawn(advised, **own) == own | penalties
        own |= {"presence_penalty": 0.0}
        assert await drawn(advised, **own) == own | {"repetition_penalty": 1.1}


UNSET = (
    *("max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options"),
    *("user", "logprobs", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop_token_ids"),
    *("min_tokens", "ignore_eos", "k_draft", "drafter", "adaptive", "guided_json"),
    "response_format",
)
NEUTRAL = {
    "logit_bias": {}, "frequency_penalty": 0.0, "presence_penalty": 0, "tools": [],
    "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
    "metadata": {"a": "b"}, "store": True, "prediction": {"type": "content", "content": "a"},
    "service_tier": "auto", "parallel_tool_calls": True, "reasoning_effort": None, "top_k": -1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, dict.fromkeys(UNSET)) for path in (COMPLETIONS, CHAT)),
        (CHAT, NEUTRAL),
        *(
            (path, {"use_beam_search": False, "guided_template": None})
            for path in (COMPLETIONS, CHAT)
        ),
        *(
            (path, dict.fromkeys(("mirostat", "dry_multiplier", "dynatemp_range"), 0))
            for path in (COMPLETION, CHAT)
        ),
        (COMPLETION, {"typical_p": 1.0, "top_n_sigma": -1}),
    ],
    ids=str,
)
async def test_what_asks_for_nothing_changes_nothing(path: str, body: dict[str, Any]) -> None:
    async with api() as here:
        assert (await here.ask(path)).status_code == 200
        assert (await here.ask(path, **body)).status_code == 200
    plain, asked = here.service.requests
    named = {"request_id": "", "arrival": 0, "deadline": 0}
    assert replace(asked, **named) == replace(plain, **named)


# -- what is refused -----------------------------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "f"}}
WRONG: list[tuple[str, str, Any, str]] = [  # path, field, value, code where it is another
    *((GENERATE, "prompt", value, "") for value in (5, None, "\ud800")),
    *((GENERATE, "max_new_tokens", value, "") for value in (0, -3, "5", True)),
    *((GENERATE, "k_draft", value, "") for value in (-1, 9)),
    *((GENERATE, "temperature", value, "") for value in (-0.1, 2.1, float("nan"))),
    *((GENERATE, "top_p", value, "") for value in (-0.1, 1.1)),
    *((GENERATE, "seed", value, "") for value in (-1, 1 << 63)),
    *((GENERATE, "stop", value, "") for value in (["a"] * 65, 3, "ok\udfff")),
    (GENERATE, "drafter", "oracle", ""),
    (GENERATE, "top_k", -2, ""),
    (GENERATE, "stream", 1, ""),
    (COMPLETIONS, "max_tokens", -3, ""),
    *((COMPLETIONS, "temperature", value, "") for value in (2.5, "1")),
    *((COMPLETIONS, "n", value, "") for value in (0, 129)),
    *((COMPLETIONS, "logprobs", value, "") for value in (21, True)),
    *((COMPLETIONS, "prompt", value, "") for value in ([], None, [-1], [1, INFO.vocab_size])),
    (COMPLETIONS, "suffix", "x", "unsupported_parameter"),
    *((COMPLETIONS, "best_of", value, "") for value in (0, 129)),
    *((COMPLETIONS, "logit_bias", {key: 1}, "") for key in (str(INFO.vocab_size), "")),
    *(
        (COMPLETION, "logit_bias", value, "")
        for value in ([[5]], [5], [[5, "a"]], {"5": True}, [[-1, 1]])
    ),
    (COMPLETION, "grammar", 'root ::= "a', "invalid_grammar"),
    (COMPLETIONS, "allowed_token_ids", [10**6], ""),
    (COMPLETIONS, "frequency_penalty", 2.5, ""),
    (COMPLETIONS, "presence_penalty", False, ""),
    (COMPLETIONS, "stop_token_ids", [INFO.vocab_size], ""),
    (COMPLETIONS, "min_p", 1.5, ""),
    (COMPLETIONS, "guided_choice", [], ""),
    (CHAT, "messages", [], ""),
    (CHAT, "messages", [{"role": "user"}], "missing_parameter"),
    *(
        (CHAT, "messages", [{"role": "user", "content": [{"type": kind}]}], "unsupported_parameter")
        for kind in ("image_url", "input_audio", "file")
    ),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text"}]}], ""),
    (CHAT, "messages", [{"role": "tool", "content": "a"}], "missing_parameter"),
    (CHAT, "top_logprobs", 21, ""),
    (CHAT, "top_logprobs", 2, ""),
    (CHAT, "response_format", {"type": "xml"}, ""),
    (CHAT, "response_format", {"type": "json_schema"}, "missing_parameter"),
    (CHAT, "tools", [{"type": "function", "function": {"name": "two words"}}], ""),
    (CHAT, "tools", [FUNCTION] * 2, ""),
    (CHAT, "tools", [{"type": "function"}], "missing_parameter"),
    (CHAT, "tool_choice", "required", ""),
    (CHAT, "tool_choice", FUNCTION, ""),
    (CHAT, "functions", [{"name": "f"}], "unsupported_parameter"),
    *((COMPLETION, name, [{"id": 0}], "unsupported_parameter") for name in ("image_data", "lora")),
    *((EMBEDDINGS, "input", value, "") for value in ([], [[]], [["a"]], [999], [1, None], {})),
    *((EMBEDDINGS, "input", value, "") for value in (["a"] * 2049, {"text": "a"})),
    *((EMBEDDINGS, "dimensions", value, "") for value in (2, 0)),
    (EMBEDDINGS, "encoding_format", "hex", ""),
    # What cannot be compiled.
    (CHAT, "response_format", wrapped({"type": "king"}), "invalid_grammar"),
    (CHAT, "response_format", wrapped({"$ref": "http://example.com/a.json"}), "invalid_grammar"),
    (GENERATE, "guided_json", "{", "invalid_grammar"),
    (COMPLETIONS, "guided_regex", "(?=a)b", "invalid_grammar"),
    (COMPLETIONS, "guided_regex", "a" * 200_000, "invalid_grammar"),
    (COMPLETIONS, "guided_grammar", "start: missing", "invalid_grammar"),
    *((path, name, ..., "missing_parameter")
        for path, name in ((CHAT, "messages"), (GENERATE, "prompt"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "field", "value", "code"), WRONG, ids=lambda value: str(value)[:30]
)
async def test_a_wrong_field_is_named(path: str, field: str, value: Any, code: str) -> None:
    async with api() as here:
        error = problem(await asked(here, path, {field: value}), 422 if path == GENERATE else 400)
    assert (error["param"], error["code"]) == (field, code or "invalid_value")
    assert error["type"] == "invalid_request_error"
    assert re.match(rf"{field}[.:]", error["message"])
    assert not here.service.requests
    assert here.rejected("invalid") == 1


# Path, fields, and how the message begins: with the field that is wrong, alone or beside others. Of
# a field that may have several types, it is about the one that was meant.
SAID: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"suffix": "b", "echo": True}, "suffix"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 3}, "n"),  # more than this server's places
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"max_completion_tokens": 9, "max_tokens": 9}, "max_tokens"),
    *(
        (path, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex")
        for path in (COMPLETIONS, CHAT)
    ),
    # With a grammar, no token might be left.
    (CHAT, {"guided_regex": "a+", "bad_words": ["x"]}, "bad_words"),
    (COMPLETIONS, {"guided_regex": "a+", "min_tokens": 3}, "min_tokens"),
    *(
        (COMPLETIONS, {"allowed_token_ids": [42], **more}, field)
        for field, more in (
            ("bad_words", {"bad_words": ["a"]}), ("min_tokens", {"min_tokens": 1}),
            ("allowed_token_ids", {"guided_regex": "a"}),
        )
    ),
    (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    *(  # without these the answer would be a wrong one
        (path, {name: value}, name)
        for path in (COMPLETIONS, CHAT)
        for name, value in (
            ("guided_template", "a{b}"), ("guided_lark", "start: A"), ("use_beam_search", True),
            ("regex", "a+"), ("chat_template", "{{ messages }}"),
            ("structured_outputs", {"structural_tag": "{}"}),
            ("structured_outputs", {"regex": "a", "disable_everything": True}),
        )
    ),
    (CHAT, {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: {} string or {} list"),
    (CHAT, {"stop": ["a", 5]}, "stop.1: {} string"),
    (CHAT, {"stop": "a" * 257}, "stop: String should have at most 256 characters"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input: List should have at most 2048 items"),
    (COMPLETION, {"prompt": ["a"] * 129}, "prompt: List should have at most 128 items"),
    (COMPLETION, {"prompt": [["a"]]},
        "prompt.0: {} string or an object or {} integer or a list with a token in it"),
    (CHAT, {"max_tokens": 0},
        "max_tokens: must be at least 1, or -1 for as many as the server allows"),
    (CHAT, {"tool_choice": "a"}, "tool_choice: Input should be 'auto', 'none' or 'required'"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    (CHAT, {"response_format": 5}, "response_format: Input should be an object"),
    (CHAT, {"response_format": {"type": "json_schema"}},
        "response_format.json_schema: Field required"),
    (COMPLETIONS, {"prompt": [1, None]}, "prompt.1: {} integer or {} string"),
    (COMPLETIONS, {"prompt": [[1], [None]]}, "prompt.1.0: {} string or {} integer"),
    (MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{}]}]}]},
        "messages.0.content.0.content.0.type: Field required"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input.0.content.0.text: {} string"),
    (EMBEDDINGS, {"input": [[None]]}, "input.0.0: {} string or an object or {} integer"),
    (CHAT, {"stop": 5, "tool_choice": 5},
        "stop: {} string or {} list; tool_choice: Input should be 'auto', 'none' or 'required'"),
    (INFILL, {"n_predict": -3}, "n_predict"),
    (INFILL, {"n_indent": -1}, "n_indent"),
    (INFILL, {"n_cmpl": 0}, "n_cmpl"),
    (INFILL, {"input_prefix": None}, "input_prefix"),
    (INFILL, {"input_extra": [{"filename": "a"}]}, "input_extra"),
    (INFILL, {"prompt": 5}, "prompt"),
    *(
        (path, {"options": {name: value}}, name)
        for path in OLLAMA
        for name, value in (
            ("temperature", "warm"), ("temperature", True), ("num_predict", "5"), ("stop", [1]),
            *((name, float("nan"))
                for name in ("temperature", "top_p", "num_predict", "presence_penalty")),
        )
    ),
    *(
        (path, {name: value}, name)
        for path in OLLAMA
        for name, value in (
            ("options", [1]), ("stream", "true"), ("format", "xml"), ("format", 1),
            ("think", "loudly"), ("top_logprobs", 21), ("model", 1),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "said"), SAID, ids=lambda value: str(value)[:60])
async def test_an_error_is_about_the_field_and_the_type_that_was_meant(
    path: str, fields: dict[str, Any], said: str
) -> None:
    async with api(filling_in(path), queue_size=3) as here:
        answer = await asked(here, path, fields)
    assert not here.service.requests
    if path in OLLAMA:
        assert (answer.status_code, answer.json()["error"][: len(said)]) == (400, said)
        return
    error = problem(answer, 400)
    assert error.get("param", "messages") == re.split("[.:]", said)[0]  # Anthropic's have none
    if ":" in said:
        said = said.replace(": {}", ": Input should be {}").replace("{}", "a valid")
        assert error["message"] == said


# -- what is ignored -----------------------------------------------------------------------------

UNKNOWN: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "max_token", 5, "max_token"),
    (CHAT, "prompt", "a", "prompt"),
    (CHAT, "messages", [{"role": "user", "content": "a", "cache": 1}] * 2, "messages.cache"),
    (CHAT, "chat_id", {"\n": 1}, "chat_id"),
    (GENERATE, "bad\nname,", 1, "bad?name?"),
    (GENERATE, "", 1, "?"),
    (COMPLETION, "mirostat", 2, "mirostat"),
    (COMPLETIONS, "guided_decoding_backend", "xgrammar", "guided_decoding_backend"),
]


@pytest.mark.parametrize(("path", "field", "value", "name"), UNKNOWN, ids=str)
async def test_unknown_fields_are_ignored_and_named_or_refused(
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
    async with api(unknown_fields="refuse") as here:
        error = problem(await here.ask(path, **{field: value}), 422 if path == GENERATE else 400)
        assert (await here.ask(CHAT, user="me", store=True)).status_code == 200
    assert (error["param"], error["code"]) == (field, "unknown_parameter")


async def test_a_header_names_so_many_and_no_more() -> None:
    async with api() as here:
        response = await here.ask(CHAT, **{f"field-{number}": 1 for number in range(2000)})
    assert response.status_code == 200
    assert len(response.headers["x-ignored-fields"].split(", ")) == 32
