"""Clients take turns at encoding and templates, and what those have sent who left is dropped."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import specops.text.tokenizer
from specops.config import Settings
from specops.http.answering import submit
from specops.text.chat_template import ChatTemplate
from tests.asgi import AsgiClient
from tests.fakes import FakeService, FakeTokenizer
from tests.http.openai_api import (
    CHAT,
    COMPLETION,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Api,
    api,
)
from tests.http.real_engine import in_process
from tests.http.test_costly_bodies import EMBEDDED
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

COUNT = "/v1/messages/count_tokens"
LONG, LONGER = "b" * 5_000, "c " * 50_000  # they have threads of their own
# A body of each endpoint with a text; the text is what is encoded.
WITH_TEXT: dict[str, Any] = {
    COMPLETIONS: lambda text: {"model": "fake", "prompt": text},
    GENERATE: lambda text: {"prompt": text},
    COMPLETION: lambda text: {"prompt": text},
    EMBEDDINGS: lambda text: {"model": "fake", "input": [text, "a"]},
    "/api/embed": lambda text: {"model": "fake", "input": [text, "a"]},
    "/api/generate": lambda text: {"model": "fake", "prompt": text, "raw": True},
    "/tokenize": lambda text: {"content": text},
}
WITH_MESSAGES: dict[str, Any] = {
    CHAT: lambda text: {"model": "fake", "messages": [{"role": "user", "content": text}]},
    MESSAGES: lambda text: WITH_MESSAGES[CHAT](text) | {"max_tokens": 9},
    COUNT: lambda text: {"model": "fake", "messages": [{"role": "user", "content": text}]},
    RESPONSES: lambda text: {"model": "fake", "input": text},
    "/api/chat": lambda text: {"model": "fake", "messages": [{"role": "user", "content": text}]},
    "/apply-template": lambda text: {"messages": [{"role": "user", "content": text}]},
}


class Held(FakeTokenizer):
    """A tokenizer whose thread stands at each text with a `!` until the test lets it go on.

    Attributes:
        done: the first letters of the texts that were encoded or rendered, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.begun, self.may = threading.Event(), threading.Event()

    def note(self, text: str) -> None:
        self.done.append(text[:8])
        if "!" in text:
            self.begun.set()
            assert self.may.wait(PATIENCE)

    def parts(self, text: str, *, special_tokens: bool = True) -> Iterator[list[int]]:
        self.note(text)
        return super().parts(text, special_tokens=special_tokens)


@asynccontextmanager
async def held() -> AsyncIterator[tuple[Api, Held]]:
    async with api(FakeService(EMBEDDED)) as here:
        here.service.loaded.tokenizer = tokenizer = Held()
        yield here, tokenizer
        tokenizer.may.set()


def ask(here: Api, path: str, text: str, address: str = "10.0.0.1") -> AsgiClient:
    body = (WITH_TEXT | WITH_MESSAGES)[path](text)
    return AsgiClient(here.app, path, address=address).send_json(body)


async def waiting(here: Api, number: int) -> None:
    threads = here.app.state.specops.executors
    lanes = (threads.rendering, threads.encoding, threads.encoding_long)
    await until(lambda: sum(map(len, lanes)) == number)


@pytest.mark.parametrize("text", [LONG, LONGER], ids=["long", "longer"])
async def test_a_neighbours_text_waits_for_one_of_a_crowds_texts(text: str) -> None:
    async with held() as (here, tokenizer):
        crowd = [ask(here, "/tokenize", f"!{text}")]
        await asyncio.to_thread(tokenizer.begun.wait, PATIENCE)
        for number in range(5):
            crowd.append(ask(here, COMPLETIONS, f"{number} of many{text}"))
            await waiting(here, number + 1)
        neighbour = ask(here, COMPLETIONS, f"neighbour{text}", address="10.0.0.2")
        await waiting(here, 6)
        tokenizer.may.set()
        assert (await neighbour.response())[0] == 200
        for client in crowd:
            assert (await client.next_message())["status"] == 200
    assert tokenizer.done[1] == "neighbou"
    assert len(tokenizer.done) == 7


async def test_a_text_of_kilobytes_does_not_wait_for_one_of_a_megabyte() -> None:
    async with held() as (here, tokenizer):
        long = ask(here, COMPLETIONS, f"!{LONGER}")
        await asyncio.to_thread(tokenizer.begun.wait, PATIENCE)
        for path in (COMPLETIONS, "/tokenize"):  # the same client's, too
            assert (await ask(here, path, LONG).next_message())["status"] == 200
        assert not long.done.done()


@pytest.mark.parametrize("path", [*WITH_TEXT, *WITH_MESSAGES])
@pytest.mark.parametrize("text", ["short", LONG, LONGER], ids=["short", "long", "longer"])
async def test_what_a_client_has_sent_is_dropped_when_it_leaves(
    path: str, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a template or for the encoder is no work any more, and the log says so."""
    if text == "short" and path in WITH_TEXT:
        return  # it does not wait
    caplog.set_level(logging.INFO, "specops")
    async with held() as (here, tokenizer):
        render = ChatTemplate.render

        def noted(self: ChatTemplate, messages: Sequence[Any], *rest: Any, **named: Any) -> str:
            tokenizer.note(str(messages[-1]["content"]))
            return render(self, messages, *rest, **named)

        monkeypatch.setattr(ChatTemplate, "render", noted)
        first = ask(here, path, f"!{text}")
        await asyncio.to_thread(tokenizer.begun.wait, PATIENCE)
        before = len(tokenizer.done)
        left = ask(here, path, f"left{text}")
        await waiting(here, 1)
        left.leave()
        await left.rest()
        await waiting(here, 0)
        first.leave()  # it goes on, but its client need not wait for that
        await first.rest()
        tokenizer.may.set()
        assert (await ask(here, path, f"last{text}").next_message())["status"] == 200
        assert not [text for text in tokenizer.done[before:] if text.startswith("left")]
        assert here.app.state.specops.aside == {}
    ends = [
        record.fields["status"]  # type: ignore[attr-defined]
        for record in caplog.records
        if record.message == "request"
    ]
    assert ends[:2] == [499, 499]


async def test_one_client_leaves_others_room_beside_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "_MAX_ASIDE_EACH", 3 * submit._MIN_ASIDE)
    monkeypatch.setattr(submit, "_MAX_ASIDE", 4 * submit._MIN_ASIDE)
    async with held() as (here, tokenizer):
        crowd = [ask(here, "/tokenize", f"!{LONG}")]
        await asyncio.to_thread(tokenizer.begun.wait, PATIENCE)
        crowd += [ask(here, COUNT, f"{number}{LONG}") for number in range(2)]
        await waiting(here, 2)
        other = ask(here, "/tokenize", LONG, address="10.0.0.2")
        await waiting(here, 3)
        status, body = await ask(here, "/tokenize", LONG).response()
        assert (status, body["error"]["code"]) == (503, "texts")
        full, _ = await ask(here, "/tokenize", LONG, address="10.0.0.3").response()
        assert full == 503
        tokenizer.may.set()
        for client in (*crowd, other):
            assert (await client.next_message())["status"] == 200


async def test_of_what_cannot_fit_only_the_beginning_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty texts of a megabyte had the next client's prompt wait for half a minute."""
    encode, seen = specops.text.tokenizer._encoded, list[int]()

    def watched(fast: Any, text: str, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(fast, text, **options)

    async with in_process(Settings(model="demo", threads=1)) as (_, http):
        monkeypatch.setattr(specops.text.tokenizer, "_encoded", watched)
        for path in (COMPLETIONS, GENERATE, COMPLETION, EMBEDDINGS, "/api/generate"):
            body = WITH_TEXT[path]("1,234 a\n" * 110_000)
            model = {"model": "demo"} if "model" in body else {}
            seen.clear()
            answer = await http.post(path, json=body | model)
            assert answer.status_code == 400, (path, answer.text)
            assert " tokens" in answer.text
            assert len(answer.content) < 1_000
            assert 16_000 < sum(seen) < 40_000
            error = (await http.post(path, json=WITH_TEXT[path]("7" * 1_000_000) | model)).json()
            assert "in a row" in str(error["error"])
        answer = await http.post(GENERATE, json={"prompt": "1,234 a\n" * 110_000})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "the prompt has at least " in error["message"]
    assert "shorten the prompt to at most" in error["message"]
