"""Who changes the address of a client of vLLM finds that it works: its options do what they say.

With the demo model, which drafts: what is told of tokens is told of accepted draft tokens, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from specops.config import Settings
from specops.http.answering import generate
from specops.request import FinishReason, Logprob
from tests.fakes import FakeService, output
from tests.http.openai_api import CHAT, COMPLETIONS, api, both
from tests.http.real_engine import in_process

pytestmark = pytest.mark.anyio
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder: Path = tmp_path_factory.mktemp("cache")
    async with in_process(Settings(model="demo", cache_dir=folder, threads=1)) as (_, client):
        yield client


async def asked(server: httpx.AsyncClient, **body: Any) -> Any:
    answer = await server.post(COMPLETIONS, json=BODY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(server: httpx.AsyncClient, **body: Any) -> list[Any]:
    answer = await server.post(COMPLETIONS, json=BODY | {"stream": True} | body)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    return [json.loads(event) for event in events if event.startswith("{")]


async def test_a_prompts_probabilities_are_those_of_the_same_tokens_when_generated(
    server: httpx.AsyncClient,
) -> None:
    (made,) = (await asked(server, logprobs=3, return_token_ids=True, drafter="none"))["choices"]
    sent = [*made["prompt_token_ids"], *made["token_ids"]]
    read = await asked(server, prompt=[sent, sent[:5]], prompt_logprobs=3)
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
        (await asked(server, prompt_logprobs=count, max_tokens=1))["choices"] for count in (0, 20)
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
    monkeypatch.setattr(generate, "_MOST_PROMPT_LOGPROBS", 60)
    await asked(server, prompt=[5] * 10, prompt_logprobs=5)
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
    answers = [await asked(server, **told, drafter=name) for name in ("cascade", "none")]
    ids = [answer["choices"][0]["token_ids"] for answer in answers]
    assert set(ids[0]) <= set(few)
    assert len(ids[0]) == BODY["max_tokens"]
    assert ids[0] == ids[1]  # whatever drafts


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("bad_words", {"bad_words": ["a"]}),
        ("min_tokens", {"min_tokens": 1}),
        ("allowed_token_ids", {"guided_regex": "a"}),
        ("allowed_token_ids", {"allowed_token_ids": [10**6]}),
    ],
)
async def test_what_could_forbid_all_allowed_tokens_is_refused(
    field: str, more: dict[str, Any]
) -> None:
    async with api(FakeService()) as here:
        answer = await here.ask(COMPLETIONS, **({"allowed_token_ids": [42]} | more))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_the_asked_tokens_are_reported_with_the_chosen_one(server: httpx.AsyncClient) -> None:
    asks = {"logprobs": 1, "logprob_token_ids": [100, 7], "return_tokens_as_token_ids": True}
    (choice,) = (await asked(server, **asks, return_token_ids=True))["choices"]
    for token, name, top in zip(
        choice["token_ids"],
        choice["logprobs"]["tokens"],
        choice["logprobs"]["top_logprobs"],
        strict=True,
    ):
        assert name == f"token_id:{token}"
        assert top.keys() == {name, "token_id:100", "token_id:7"}
    answer = await server.post(COMPLETIONS, json=BODY | {"logprob_token_ids": [1]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids")


async def test_tokens_come_in_streams_with_the_prompts_first(server: httpx.AsyncClient) -> None:
    whole = await asked(server, return_token_ids=True)
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
        refused = await here.ask(CHAT, prompt_logprobs=1, stream=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
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
    (choice,) = (await asked(server, prompt=sent, echo=True, **more))["choices"]
    assert choice["prompt_token_ids"] == sent[kept]


async def test_the_echo_of_tokens_spells_special_ones_out(server: httpx.AsyncClient) -> None:
    (choice,) = (await asked(server, prompt=[0, 0, 40], echo=True, logprobs=1))["choices"]
    begins = "".join(choice["logprobs"]["tokens"][:3])
    assert choice["text"].startswith(begins)
    assert choice["logprobs"]["text_offset"][2] == 2 * len(choice["logprobs"]["tokens"][0]) > 0


async def test_a_prompt_is_cut_to_leave_its_answer_room(server: httpx.AsyncClient) -> None:
    long = "a b " * 30_000
    answer = await asked(server, prompt=long, truncate_prompt_tokens=-1, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]
    refused = await server.post(COMPLETIONS, json=BODY | {"prompt": long})
    assert refused.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_stays_if_it_is_wanted(
    server: httpx.AsyncClient, stream: bool
) -> None:
    whole = (await asked(server))["choices"][0]["text"]
    stop = whole[4:7]
    for wanted in (False, True):
        body = {"stop": stop, "include_stop_str_in_output": wanted}
        if stream:
            text = "".join(event["choices"][0]["text"] for event in await streamed(server, **body))
        else:
            text = (await asked(server, **body))["choices"][0]["text"]
        assert text == whole[: whole.find(stop)] + stop * wanted


@both
@pytest.mark.parametrize(
    "field",
    [
        {"guided_template": "a{b}"},
        {"guided_lark": "start: A"},
        {"use_beam_search": True},
        {"regex": "a+"},
        {"chat_template": "{{ messages }}"},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"regex": "a", "disable_everything": True}},
    ],
)
async def test_an_unknown_constraint_is_refused_by_name(path: str, field: dict[str, Any]) -> None:
    async with api(FakeService([output("x")])) as here:
        answer = await here.ask(path, **field)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))


@both
async def test_what_asks_for_nothing_or_for_a_form_is_taken(path: str) -> None:
    async with api(FakeService([output("x", finish=FinishReason.STOP)])) as here:
        harmless = {"use_beam_search": False, "guided_template": None}
        answer = await here.ask(path, **harmless, guided_decoding_backend="xgrammar")
        assert answer.status_code == 200
        assert "guided_decoding_backend" in answer.headers["x-ignored-fields"]


async def test_a_role_of_its_own_goes_to_the_template() -> None:
    async with api(FakeService([output("x", finish=FinishReason.STOP)])) as here:
        answer = await here.ask(CHAT, messages=[{"role": "critic", "content": "abc"}])
        assert answer.status_code == 200
        here_tokens = here.service.requests[-1].prompt_tokens
        assert b"critic" in bytes(token for token in here_tokens if token < 256)
