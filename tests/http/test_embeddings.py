"""/v1/embeddings through OpenAI's own client: against a scripted engine, and a real one."""

import asyncio
import json
import tracemalloc
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from specops.config import Settings
from specops.http.middleware import _BATCH, MAX_LARGE_BODIES
from specops.request import FinishReason
from tests.fakes import INFO, begun, output
from tests.http.chat_clients import clients
from tests.http.real_engine import served
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio
VECTORS = np.array([[0.6, 0.8, 0, 0], [0, 1, 0, 0]], np.float32)
JSON = {"content-type": "application/json"}
END = replace(output(finish=FinishReason.STOP), embeddings=VECTORS)


async def test_vectors_come_in_the_order_of_the_texts_in_both_encodings() -> None:
    async with clients() as here:
        here.script([END])
        ask = here.openai.embeddings.create
        packed = await ask(model="fake", input=["ab", "cde"])  # the client asks for base64
        plain = await ask(model="fake", input=["ab", "cde"], encoding_format="float")
    for answer in (packed, plain):
        assert answer.object == "list"
        assert [item.index for item in answer.data] == [0, 1]
        assert [item.object for item in answer.data] == ["embedding", "embedding"]
        vectors = np.array([item.embedding for item in answer.data], np.float32)
        assert vectors.tolist() == VECTORS.tolist()
        # With the token that begins a text.
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)
        assert answer.model == "fake"


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [begun("ab")]),
        (["ab", "c"], [begun("ab"), begun("c")]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ("", [begun("")]),
        ([1, "b", 2], [(1, 98, 2)]),
        ({"prompt_string": "ab"}, [begun("ab")]),
        (["a", {"content": [{"type": "text", "text": "b"}]}], [begun("a"), begun("b")]),
    ],
)
async def test_every_form_of_input_is_one_request_of_the_engine(
    given: Any, prompts: list[tuple[int, ...]]
) -> None:
    async with clients() as here:
        here.script([END])
        await here.openai.embeddings.create(model="fake", input=given, dimensions=4)
    assert list(here.request.prompts) == prompts
    assert here.request.embed
    assert len(here.service.requests) == 1


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_a_batch_is_as_large_as_openais(path: str) -> None:
    """As LangChain sends one: 1,000 texts of 1,000 characters in a body."""
    texts = [f"{number}: {'The quick brown fox. ' * 50}" for number in range(1000)]
    async with clients() as here:
        here.script([END])
        here.service.info = replace(INFO, context=512)
        here.service.loaded.encode = lambda text, **_: (1,) * 299  # type: ignore[method-assign]
        answer = await here.http.post(path, json={"model": "fake", "input": texts})
        assert len(here.request.prompts) == 1000
        tokens = await here.http.post(path, json={"model": "fake", "input": [*texts, *texts[:9]]})
        larger = await here.http.post(path, json={"model": "fake", "input": ["x" * (1 << 22)]})
        other = await here.http.post("/v1/completions", json={"prompt": "x" * (1 << 20)})
    assert (answer.status_code, tokens.status_code, larger.status_code) == (200, 400, 413)
    assert "300000 tokens" in tokens.text
    assert other.status_code == 413


EMOJI = "\U0001f600"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_the_texts_of_a_large_batch_are_read_one_by_one(path: str) -> None:
    """Together they would take 16 MiB, and the JSON that has them as much."""
    text = EMOJI + "The quick brown fox. " * 95
    texts = [f"{number} {text}" for number in range(2000)]
    content = json.dumps({"model": "fake", "input": texts}, ensure_ascii=False).encode()
    read = []
    async with clients() as here:
        here.script([END])

        def encode(text: str, **_: object) -> tuple[int, ...]:
            read.append(hash(text))
            return (1,)

        here.service.loaded.encode = encode  # type: ignore[method-assign]
        tracemalloc.start()
        answer = await here.http.post(path, content=content, headers=JSON)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert answer.status_code == 200, answer.text
    assert read == [hash(text) for text in texts]
    assert peak < 4 * len(content)


LONG = "x " * (1 << 19)
ODD: list[tuple[str, int, str]] = [  # JSON of an input of more than a mebibyte
    (f'"{LONG}\\ud83d"', 200, LONG + "\ufffd"),
    (f'"{LONG}\\""', 200, LONG + '"'),
    (f'{{"content": [{{"type": "text", "text": "{LONG}"}}]}}', 200, LONG),
    (f'"{LONG}\x01"', 400, "a text cannot be read"),
    (f'"{LONG}', 400, "not valid JSON"),
]


@pytest.mark.parametrize(("given", "status", "expected"), ODD, ids=range(len(ODD)))
async def test_long_texts_are_read_as_short_ones_are(
    given: str, status: int, expected: str
) -> None:
    read = []
    async with clients() as here:
        here.script([END])
        here.service.loaded.encode = lambda text, **_: read.append(text) or (1,)  # type: ignore
        content = f'{{"input": {given}}}'.encode()
        answer = await here.http.post("/v1/embeddings", content=content, headers=JSON)
    assert answer.status_code == status, answer.text
    if status == 200:
        assert read == [expected]
    else:
        assert expected in answer.text


async def test_only_so_many_large_batches_are_here_at_a_time() -> None:
    body = {"model": "fake", "input": ["x" * (1 << 20)]}
    async with clients() as here, asyncio.timeout(PATIENCE):
        here.service.loaded.encode = lambda text, **_: (1,)  # type: ignore[method-assign]
        most = MAX_LARGE_BODIES // _BATCH
        asked = [
            asyncio.ensure_future(here.http.post("/v1/embeddings", json=body)) for _ in range(most)
        ]
        handles = [await here.service.submitted.get() for _ in asked]
        late = await here.http.post("/v1/embeddings", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "large_bodies")
        for handle in handles:
            handle.push(END)
        assert [(await answer).status_code for answer in asked] == [200] * most
        here.script([END])
        assert (await here.http.post("/v1/embeddings", json=body)).status_code == 200


async def test_a_model_without_hidden_states_says_so() -> None:
    async with clients() as here:
        here.service.info = replace(INFO, embedding_size=0)
        with pytest.raises(openai.BadRequestError, match="hidden states") as error:
            await here.openai.embeddings.create(model="fake", input="a")
    assert error.value.code == "no_embeddings"


# -- a real engine -------------------------------------------------------------------------------


async def test_texts_and_their_tokens_have_the_same_vectors_beside_an_answer(
    tiny_settings: Settings,
) -> None:
    async with served(replace(tiny_settings, draft="none")) as client:
        texts = ["def add(a, b):", "The quick brown fox", "x"] * 20
        asked = [
            await client.post(
                "http://test/tokenize", body={"content": text}, cast_to=httpx.Response
            )
            for text in texts[:3]
        ]
        tokens = [item.json()["tokens"] for item in asked]
        name = (await client.models.list()).data[0].id
        answer, vectors = await asyncio.gather(
            client.completions.create(model=name, prompt="def", max_tokens=40, temperature=0),
            client.embeddings.create(model=name, input=texts),
        )
        again = await client.embeddings.create(model=name, input=tokens)
        alone = await client.completions.create(
            model=name, prompt="def", max_tokens=40, temperature=0
        )
        full = await client.embeddings.create(model=name, input=[1] * 128)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens"):
            await client.embeddings.create(model=name, input=[1] * 129)
    assert full.usage.prompt_tokens == 128
    assert [item.embedding for item in vectors.data[:3]] == [item.embedding for item in again.data]
    assert vectors.data[0].embedding == vectors.data[-3].embedding
    assert vectors.usage.prompt_tokens == 20 * again.usage.prompt_tokens
    assert answer.choices[0].text == alone.choices[0].text
