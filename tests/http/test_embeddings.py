"""/v1/embeddings through OpenAI's own client: against a scripted engine, and a real one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest

from specops.config import Settings
from specops.http.middleware import MOST_BATCHES
from specops.request import FinishReason
from tests.fakes import INFO, begun, output
from tests.http.chat_clients import clients
from tests.http.real_engine import served
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio
VECTORS = np.array([[0.6, 0.8, 0, 0], [0, 1, 0, 0]], np.float32)
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
    ],
)
async def test_every_form_of_input_is_one_request_of_the_engine(
    given: list[str], prompts: list[tuple[int, ...]]
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


async def test_only_so_many_large_batches_are_here_at_a_time() -> None:
    body = {"model": "fake", "input": ["x" * (1 << 20)]}
    async with clients() as here, asyncio.timeout(PATIENCE):
        here.service.loaded.encode = lambda text, **_: (1,)  # type: ignore[method-assign]
        asked = [
            asyncio.ensure_future(here.http.post("/v1/embeddings", json=body))
            for _ in range(MOST_BATCHES)
        ]
        handles = [await here.service.submitted.get() for _ in asked]
        late = await here.http.post("/v1/embeddings", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "large_bodies")
        for handle in handles:
            handle.push(END)
        assert [(await answer).status_code for answer in asked] == [200] * MOST_BATCHES
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
