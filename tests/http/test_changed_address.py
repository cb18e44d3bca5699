"""Who changes the address of a working llama-server, vLLM or OpenAI client finds that it works.

Each request is the smallest that those servers answer and a client of theirs sends.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from specops.config import Settings
from specops.http.answering import submit
from specops.request import FinishReason, Logprob
from specops.text.chat_template import ChatTemplate
from tests.fakes import BEGIN_TOKEN, FakeService, output
from tests.http.chat_clients import TEMPLATE
from tests.http.openai_api import CHAT, COMPLETIONS, EMBEDDINGS, api
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


async def test_a_grammar_of_llama_servers_is_followed(server: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "grammar": 'root ::= "[" [0-9] "]"'}
    text = (await asked(server, "/completion", body))["content"]
    assert (text[0], text[1].isdecimal(), text[2:]) == ("[", True, "]")


# -- names, paths, limits --------------------------------------------------------------------------


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
BATCHES = [sent for sent in RECORDED if sent["path"] == EMBEDDINGS]


def program(sent: dict[str, Any]) -> str:
    return str(sent["program"])


@pytest.mark.parametrize("sent", [sent for sent in RECORDED if sent not in BATCHES], ids=program)
async def test_what_programs_sent_is_answered(sent: dict[str, Any]) -> None:
    service = FakeService([output("Hello"), output("", finish=FinishReason.STOP)])
    service.loaded.chat_template = ChatTemplate(TEMPLATE, {})
    async with api(service) as here:
        answer = await here.client.post(sent["path"], json=sent["body"])
    assert answer.status_code == 200, answer.text
    assert "Hello" in answer.text
    ends = ("[DONE]", "response.completed", '"stop":true', "message_stop")
    assert any(end in answer.text for end in ends)
    if "server_tool_use" in str(sent):
        ignored = answer.headers["x-ignored-fields"].split(", ")
        assert {"messages.server_tool_use", "messages.web_search_tool_result"} <= set(ignored)


@pytest.mark.parametrize("sent", BATCHES, ids=program)
async def test_batches_that_programs_sent_are_embedded(
    server: httpx.AsyncClient, sent: dict[str, Any]
) -> None:
    data = (await asked(server, sent["path"], sent["body"]))["data"]
    assert [item["index"] for item in data] == list(range(len(sent["body"]["input"])))
    assert len({item["embedding"] for item in data}) == 1  # the same text, in base64


# -- embeddings, templates, tokens -----------------------------------------------------------------


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


# -- vLLM's ----------------------------------------------------------------------------------------

REPEATED = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
BODY: dict[str, Any] = {"prompt": REPEATED, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


async def completed(server: httpx.AsyncClient, **body: Any) -> Any:
    """An answer of the demo model, which drafts: what is told of tokens is told of these, too."""
    return await asked(server, COMPLETIONS, BODY | body)


async def streamed(server: httpx.AsyncClient, **body: Any) -> list[Any]:
    answer = await server.post(COMPLETIONS, json=BODY | {"stream": True} | body)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    return [json.loads(event) for event in events if event.startswith("{")]


async def test_a_prompts_probabilities_are_those_of_the_same_tokens_when_generated(
    server: httpx.AsyncClient,
) -> None:
    (made,) = (await completed(server, logprobs=3, return_token_ids=True, drafter="none"))[
        "choices"
    ]
    sent = [*made["prompt_token_ids"], *made["token_ids"]]
    read = await completed(server, prompt=[sent, sent[:5]], prompt_logprobs=3)
    whole, beginning = (choice["prompt_logprobs"] for choice in read["choices"])
    assert (len(whole), whole[0]) == (len(sent), None)
    assert beginning == whole[:5]
    for token, place, likeliest, told in zip(
        made["token_ids"],
        whole[len(made["prompt_token_ids"]) :],
        made["logprobs"]["top_logprobs"],
        made["logprobs"]["token_logprobs"],
        strict=True,
    ):
        assert place[str(token)]["logprob"] == told
        assert place[str(token)]["rank"] == 1  # it was the likeliest
        assert [item["rank"] for item in place.values()] == [1, 2, 3]
        by_text = {item["decoded_token"]: item["logprob"] for item in place.values()}
        assert by_text == likeliest


async def test_the_rank_counts_all_tokens_that_are_likelier(server: httpx.AsyncClient) -> None:
    (few,), (many,) = [
        (await completed(server, prompt_logprobs=count, max_tokens=1))["choices"]
        for count in (0, 20)
    ]
    ranks = []
    for one, twenty in zip(few["prompt_logprobs"][1:], many["prompt_logprobs"][1:], strict=True):
        ((token, told),) = one.items()
        assert twenty[token] == told
        likelier = [item for item in twenty.values() if item["logprob"] > told["logprob"]]
        assert len(likelier) == min(20, told["rank"] - 1)
        ranks.append(told["rank"])
    assert max(ranks) > 20


async def test_probabilities_of_prompts_are_bounded(
    server: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_MAX_PROMPT_LOGPROBS", 60)
    await completed(server, prompt=[5] * 10, prompt_logprobs=5)
    for more in (
        {"prompt": [5] * 11},
        {"n": 2},
        {"prompt_logprobs": None, "echo": True, "logprobs": 6},
    ):
        body = BODY | {"prompt": [5] * 10, "prompt_logprobs": 5} | more
        answer = await server.post(COMPLETIONS, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
async def test_an_answer_has_only_allowed_tokens(
    server: httpx.AsyncClient, drawn: dict[str, Any]
) -> None:
    few = [42, 100, 200]
    told: dict[str, Any] = {"allowed_token_ids": few, "return_token_ids": True, **drawn}
    answers = [await completed(server, **told, drafter=name) for name in ("cascade", "none")]
    ids = [answer["choices"][0]["token_ids"] for answer in answers]
    assert set(ids[0]) <= set(few)
    assert len(ids[0]) == BODY["max_tokens"]
    assert ids[0] == ids[1]  # whatever drafts


async def test_the_asked_tokens_are_reported_with_the_chosen_one(server: httpx.AsyncClient) -> None:
    asks = {"logprobs": 1, "logprob_token_ids": [100, 7], "return_tokens_as_token_ids": True}
    (choice,) = (await completed(server, **asks, return_token_ids=True))["choices"]
    for token, name, top in zip(
        choice["token_ids"],
        choice["logprobs"]["tokens"],
        choice["logprobs"]["top_logprobs"],
        strict=True,
    ):
        assert name == f"token_id:{token}"
        assert top.keys() == {name, "token_id:100", "token_id:7"}


async def test_tokens_come_in_streams_with_the_prompts_first(server: httpx.AsyncClient) -> None:
    whole = await completed(server, return_token_ids=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = await streamed(server, return_token_ids=True, stream_options=options)
    choices = [event["choices"][0] for event in events]
    assert ["prompt_token_ids" in choice for choice in choices] == [True] + [False] * (
        len(choices) - 1
    )
    assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    ids = [choice["token_ids"] for choice in choices]
    assert [*chain(*ids)] == whole["choices"][0]["token_ids"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [sum(map(len, ids[: end + 1])) for end in range(len(ids))]
    assert last["usage"]["completion_tokens"] == counts[-1]


async def test_a_chat_has_the_same_options() -> None:
    async with api(
        FakeService([output("Hel", "lo"), output("!", finish=FinishReason.STOP)])
    ) as here:
        answer = (await here.ask(CHAT, return_token_ids=True)).json()
        sent = here.service.requests[-1].prompt_tokens
        assert answer["prompt_token_ids"] == list(sent)
        assert answer["choices"][0]["token_ids"] == [ord(letter) for letter in "Hl!"]
        told = [None, *[Logprob(-2.0, ((65, -0.5),), 7)] * (len(sent) - 1)]
        here.service.answer = (replace(output("x", finish=FinishReason.STOP), prompt=told),)
        answer = (await here.ask(CHAT, prompt_logprobs=1)).json()
        assert here.service.requests[-1].prompt_logprobs == 1
        first, second, *_ = answer["prompt_logprobs"]
        assert (len(answer["prompt_logprobs"]), first) == (len(sent), None)
        assert second == {
            str(sent[1]): {"logprob": -2.0, "rank": 7, "decoded_token": chr(sent[1])},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
        }


@pytest.mark.parametrize(
    ("side", "kept"), [({}, slice(-4, None)), ({"truncation_side": "right"}, slice(4))]
)
async def test_a_prompt_is_cut_where_the_client_wants_it(
    server: httpx.AsyncClient, side: dict[str, str], kept: slice
) -> None:
    sent = list(range(10, 18))
    more = {"truncate_prompt_tokens": 4, "return_token_ids": True, **side}
    (choice,) = (await completed(server, prompt=sent, echo=True, **more))["choices"]
    assert choice["prompt_token_ids"] == sent[kept]


async def test_the_echo_of_tokens_spells_special_ones_out(server: httpx.AsyncClient) -> None:
    (choice,) = (await completed(server, prompt=[0, 0, 40], echo=True, logprobs=1))["choices"]
    begins = "".join(choice["logprobs"]["tokens"][:3])
    assert choice["text"].startswith(begins)
    assert choice["logprobs"]["text_offset"][2] == 2 * len(choice["logprobs"]["tokens"][0]) > 0


async def test_a_prompt_is_cut_to_leave_its_answer_room(server: httpx.AsyncClient) -> None:
    long = "a b " * 30_000
    answer = await completed(server, prompt=long, truncate_prompt_tokens=-1, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]
    refused = await server.post(COMPLETIONS, json=BODY | {"prompt": long})
    assert refused.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_stays_if_it_is_wanted(
    server: httpx.AsyncClient, stream: bool
) -> None:
    whole = (await completed(server))["choices"][0]["text"]
    stop = whole[4:7]
    for wanted in (False, True):
        body = {"stop": stop, "include_stop_str_in_output": wanted}
        if stream:
            text = "".join(event["choices"][0]["text"] for event in await streamed(server, **body))
        else:
            text = (await completed(server, **body))["choices"][0]["text"]
        assert text == whole[: whole.find(stop)] + stop * wanted


async def test_a_role_of_its_own_goes_to_the_template() -> None:
    async with api(FakeService([output("x", finish=FinishReason.STOP)])) as here:
        answer = await here.ask(CHAT, messages=[{"role": "critic", "content": "abc"}])
        assert answer.status_code == 200
        here_tokens = here.service.requests[-1].prompt_tokens
        assert b"critic" in bytes(token for token in here_tokens if token < 256)
