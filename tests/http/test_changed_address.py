"""Who changes the address of a working llama-server, vLLM or OpenAI client finds that it works.

Each request is the smallest that those servers answer and a client of theirs sends.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from specops.config import Settings
from specops.request import FinishReason
from specops.text.chat_template import ChatTemplate
from tests.fakes import BEGIN_TOKEN, FakeService, output
from tests.http.chat_clients import TEMPLATE
from tests.http.openai_api import api
from tests.http.real_engine import in_process

pytestmark = pytest.mark.anyio
PROMPT = {"prompt": "def f(x):", "n_predict": 2, "temperature": 0}


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder: Path = tmp_path_factory.mktemp("cache")
    settings = Settings(model="demo", cache_dir=folder, threads=1, max_batched_tokens=64)
    async with in_process(settings) as (_, client):
        yield client


async def asked(server: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- llama-server's own completion -----------------------------------------------------------------


@pytest.mark.parametrize(
    "biases",
    [
        *([], {}, [[5, -100]], [["Hello world", -5]], [["5", 1.5], [7, False]]),
        *({"5": False}, {"Hello world": -5}, {"5": -100}),
    ],
)
async def test_biases_come_as_an_object_or_as_pairs(server: httpx.AsyncClient, biases: Any) -> None:
    await asked(server, "/completion", PROMPT | {"logit_bias": biases})


@pytest.mark.parametrize("biases", [[[5]], [5], [[5, "a"]], {"5": True}, [[-1, 1]], {"5": 101}])
async def test_biases_of_another_form_are_refused(server: httpx.AsyncClient, biases: Any) -> None:
    answer = await server.post("/completion", json=PROMPT | {"logit_bias": biases})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


async def test_a_token_whose_bias_is_false_never_comes(server: httpx.AsyncClient) -> None:
    asks = PROMPT | {"return_tokens": True}
    (first, *_) = (await asked(server, "/completion", asks))["tokens"]
    banned = await asked(server, "/completion", asks | {"logit_bias": [[first, False]]})
    assert first not in banned["tokens"]
    assert banned["generation_settings"]["logit_bias"] == [{"token": first, "bias": None}]


async def test_ignoring_the_end_forbids_the_end_tokens(server: httpx.AsyncClient) -> None:
    settings = (await asked(server, "/completion", PROMPT | {"ignore_eos": True}))[
        "generation_settings"
    ]
    assert settings["logit_bias"]
    assert all(item["bias"] is None for item in settings["logit_bias"])


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        (["a", "b"], 2),
        ([[1], [2]], 2),
        ([1, 2, "a"], 1),
        (["a", [1, 2, "b"], {"prompt_string": "c"}], 3),
        ({"prompt_string": "c"}, 1),
    ],
)
async def test_prompts_come_in_lists(server: httpx.AsyncClient, prompt: Any, answers: int) -> None:
    got = await asked(server, "/completion", PROMPT | {"prompt": prompt})
    assert (len(got) if isinstance(got, list) else 1) == answers
    got = await asked(server, "/v1/completions", {"prompt": ["a", [1, 2, "b"]], "max_tokens": 2})
    assert len(got["choices"]) == 2


async def test_a_text_among_tokens_is_the_same_prompt(server: httpx.AsyncClient) -> None:
    tokens = (await asked(server, "/tokenize", {"content": "def f(x):", "add_special": True}))[
        "tokens"
    ]
    written = [
        (await asked(server, "/completion", PROMPT | {"prompt": prompt, "return_tokens": True}))
        for prompt in (tokens, ["def f(x):"])
    ]
    assert written[0]["tokens"] == written[1]["tokens"]


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 2.5},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 2},
        {"repeat_penalty": 0},
        {"top_k": -5},
    ],
)
async def test_samplers_take_llama_servers_ranges(
    server: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    await asked(server, "/completion", PROMPT | field)


async def test_samplers_that_are_not_here_are_named_only_where_they_are_on(
    server: httpx.AsyncClient,
) -> None:
    off = {"mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0.0, "dynatemp_range": 0}
    off |= {"typical_p": 1.0, "top_n_sigma": -1}
    answer = await server.post("/completion", json=PROMPT | off)
    assert "x-ignored-fields" not in answer.headers
    answer = await server.post("/completion", json=PROMPT | off | {"mirostat": 2})
    assert answer.headers["x-ignored-fields"] == "mirostat"


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities_of_each_token(server: httpx.AsyncClient, stream: bool) -> None:
    body = PROMPT | {"n_probs": 3, "n_predict": 5, "stream": stream, "ignore_eos": True}
    answer = await server.post("/completion", json=body)
    events = [httpx.Response(200, text=line[6:]).json() for line in answer.text.split("\n\n")[:-1]]
    if stream:
        *tokens, last = events
        assert "completion_probabilities" not in last
        told = [item for event in tokens for item in event["completion_probabilities"]]
        assert [len(event["tokens"]) for event in tokens] == [1] * 5
    else:
        told = answer.json()["completion_probabilities"]
    assert [len(item["top_logprobs"]) for item in told] == [3] * 5
    assert all(item["id"] == item["top_logprobs"][0]["id"] for item in told)


async def test_probabilities_behind_the_samplers(server: httpx.AsyncClient) -> None:
    body = {"prompt": "def", "n_predict": 5, "n_probs": 10, "top_k": 3, "temperature": 1.0}
    told = (await asked(server, "/completion", body | {"post_sampling_probs": True}))[
        "completion_probabilities"
    ]
    for item in told:
        assert set(item) == {"id", "token", "bytes", "prob", "top_probs"}
        assert set(item["top_probs"][0]) == {"id", "token", "bytes", "prob"}
        assert 1 <= len(item["top_probs"]) <= 3
        assert sum(one["prob"] for one in item["top_probs"]) == pytest.approx(1)
        assert item["prob"] in [one["prob"] for one in item["top_probs"]]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
async def test_a_stream_reports_how_far_it_is(server: httpx.AsyncClient, path: str) -> None:
    text = f"# {path}\n" + "def f(x): return x\n" * 40
    asks = {"prompt": text, "messages": [{"role": "user", "content": text}], "ignore_eos": True}
    more = {"stream": True, "timings_per_token": True, "return_progress": True, "max_tokens": 8}
    answer = await server.post(path, json=asks | more)
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    events = [httpx.Response(200, text=line).json() for line in lines]
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    processed = [item["processed"] for item in progress]
    assert len(processed) > 2
    assert processed == sorted(set(processed))
    assert {item["total"] for item in progress} == {processed[-1]}
    counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    assert counts == sorted(counts)
    assert (counts[0] < 8, counts[-1]) == (True, 8)
    assert all("timings" in event for event in events if event.get("content"))


@pytest.mark.parametrize(
    "constraint",
    [
        {"grammar": 'root ::= "[" [0-9] "]"'},
        {"guided_grammar": 'root ::= "[" [0-9] "]"'},
        {"response_format": {"type": "json_schema", "schema": {"enum": [[4], [5]]}}},
        {"json_schema": {"enum": [[4], [5]]}},
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
async def test_constraints_in_llama_servers_form(
    server: httpx.AsyncClient, path: str, constraint: dict[str, Any]
) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]} | constraint
    answer = await asked(server, path, body)
    text = answer["choices"][0]["message"]["content"] if "choices" in answer else answer["content"]
    assert (text[0], text[1].isdecimal(), text[2:]) == ("[", True, "]")


async def test_a_grammar_that_asks_for_nothing_and_one_that_is_wrong(
    server: httpx.AsyncClient,
) -> None:
    await asked(server, "/completion", PROMPT | {"grammar": ""})
    answer = await server.post("/completion", json=PROMPT | {"grammar": 'root ::= "a'})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "grammar",
        "invalid_grammar",
    )


async def test_timings_are_numbers(server: httpx.AsyncClient) -> None:
    answer = await asked(server, "/completion", PROMPT)
    assert all(isinstance(value, int | float) for value in answer["timings"].values())
    assert answer["drafter"] == "cascade"


# -- names, paths, limits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "n_predict": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 100_000, "stop": ["e"]}),
    ],
)
async def test_limits_by_other_names_and_above_the_servers(
    server: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await asked(server, path, body)
    if body.get("max_tokens") != 100_000:
        count = answer.get("tokens_predicted") or answer["usage"]["completion_tokens"]
        assert count == 2


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": "gpt-3.5-turbo"}])
async def test_the_one_model_answers_to_any_name_unless_that_is_refused(
    model: dict[str, Any],
) -> None:
    body = {"prompt": "a"} | model
    async with api(FakeService([output("x", finish=FinishReason.STOP)])) as here:
        answer = await here.client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["x-served-model"]) == (200, "fake")
    async with api(
        FakeService([output("x", finish=FinishReason.STOP)]), unknown_model="refuse"
    ) as here:
        answer = await here.client.post("/v1/completions", json=body)
    assert answer.status_code == (404 if model.get("model") else 200)


async def test_paths_without_v1_are_the_same_endpoints_behind_the_same_key() -> None:
    async with api(
        FakeService([output("x", finish=FinishReason.STOP)]), api_keys="secret-key-of-a-client"
    ) as here:
        open_paths = {
            path: (await here.client.get(path)).status_code
            for path in ("/v1/health", "/models", "/slots")
        }
        assert open_paths == {"/v1/health": 200, "/models": 401, "/slots": 401}
        for path in ("/chat/completions", "/responses", "/embeddings", "/responses/input_tokens"):
            assert (await here.client.post(path, json={})).status_code == 401
    async with api(FakeService([output("x", finish=FinishReason.STOP)])) as here:
        models = (await here.client.get("/models")).json()
        assert models == (await here.client.get("/v1/models")).json()
        assert [slot["is_processing"] for slot in (await here.client.get("/slots")).json()] == [
            False,
            False,
        ]
        assert (await here.client.post("/rerank", json={})).status_code == 501


async def test_a_prompt_that_is_too_long_says_both_numbers(server: httpx.AsyncClient) -> None:
    for path in ("/completion", "/v1/completions"):
        answer = await server.post(path, json={"prompt": [1] * 100_000})
        error = answer.json()["error"]
        assert (error["type"], error["n_prompt_tokens"]) == ("exceed_context_size_error", 100_000)
        assert error["n_ctx"] < 100_000


async def test_the_chosen_token_is_among_the_likeliest(server: httpx.AsyncClient) -> None:
    body = {"prompt": "def", "logprobs": 1, "temperature": 2.0, "seed": 3, "max_tokens": 20}
    (choice,) = (await asked(server, "/v1/completions", body))["choices"]
    told = choice["logprobs"]
    for token, value, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert top[token] >= value


# As the real programs sent them to a recorder, SillyTavern's as its own function makes it; long
# texts are replaced by their length.
RECORDED = [
    json.loads(file.read_text("utf-8"))
    for file in sorted(Path(__file__).with_name("recorded").glob("*.json"))
]


@pytest.mark.parametrize("sent", RECORDED, ids=lambda sent: sent["program"])
async def test_what_programs_sent_is_answered(sent: dict[str, Any]) -> None:
    service = FakeService([output("Hello"), output("", finish=FinishReason.STOP)])
    service.loaded.chat_template = ChatTemplate(TEMPLATE, {})
    async with api(service) as here:
        answer = await here.client.post(sent["path"], json=sent["body"])
    assert answer.status_code == 200, answer.text
    assert "Hello" in answer.text
    assert any(end in answer.text for end in ("[DONE]", "response.completed", '"stop":true'))


# -- embeddings, templates, tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ("", 1),
        ([12, 34, "text", 56], 1),
        (["text", [12, 34]], 2),
        ({"prompt_string": "text"}, 1),
        ({"content": [{"type": "text", "text": "text"}]}, 1),
        (["a", {"prompt_string": "b"}, {"content": [{"type": "text", "text": "c"}]}], 3),
    ],
)
async def test_inputs_of_embeddings(server: httpx.AsyncClient, inputs: Any, count: int) -> None:
    assert len((await asked(server, "/v1/embeddings", {"input": inputs}))["data"]) == count


async def test_llama_servers_own_embeddings_are_a_list(server: httpx.AsyncClient) -> None:
    texts = ["a", [1, 2]]
    (first, second) = await asked(server, "/embedding", {"content": texts})
    known = (await asked(server, "/v1/embeddings", {"input": texts}))["data"]
    assert (first["index"], second["index"]) == (0, 1)
    assert [first["embedding"], second["embedding"]] == [[item["embedding"]] for item in known]


TODAY = "{{ date_string }}|{{ datetime }}|{{ functions }}|{% for m in messages %}{{ m.content }}"
TODAY += "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


async def test_templates_get_todays_date_and_whether_to_begin_the_answer() -> None:
    service = FakeService([output("x", finish=FinishReason.STOP)])
    service.loaded.chat_template = ChatTemplate(TODAY, {})
    turns = [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]
    async with api(service) as here:
        texts = [
            (await asked(here.client, "/apply-template", {"messages": turns} | more))["prompt"]
            for more in ({}, {"add_generation_prompt": False})
        ]
    date, moment, functions, rest = texts[0].split("|")
    assert datetime.strptime(date, "%d %b %Y").replace(tzinfo=UTC) <= datetime.now(UTC)
    assert moment.startswith(datetime.strptime(date, "%d %b %Y").strftime("%b %d %Y"))
    assert (functions, rest) == ("", "a\nbA:")
    assert texts[1].endswith("|a\nb")


async def test_a_conversation_begins_as_the_models_texts_do_and_once() -> None:
    for begin in ("", "{{ bos_token }}"):
        service = FakeService([output("x", finish=FinishReason.STOP)])
        service.loaded.chat_template = ChatTemplate(
            f"{begin}{{{{ messages[0].content }}}}", {"bos_token": "<|begin|>"}
        )
        body = {"messages": [{"role": "user", "content": "ab"}]}
        async with api(service) as here:
            counted = await asked(here.client, "/chat/completions/input_tokens", body)
            await asked(here.client, "/chat/completions", body)
            assert here.request.prompt_tokens == (BEGIN_TOKEN, *b"ab")
        assert counted["input_tokens"] == 3
