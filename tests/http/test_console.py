"""The console's page and its figures, without a browser: what is sent, and when it ends."""

import asyncio
import base64
import hashlib
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import specops.http.console
from specops.engine.model_info import ModelState
from specops.http.console import FACTS, FIGURES
from tests.asgi import AsgiClient
from tests.fakes import INFO
from tests.http.openai_api import Api, api
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def follow(console: Api) -> AsgiClient:
    """Open the stream of figures."""
    client = AsgiClient(console.app, "/console/figures", method="GET")
    client.send_body(b"")
    return client


@pytest.fixture
async def console() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


def test_the_page_reads_fields_of_the_model_that_there_are() -> None:
    code = (Path(specops.http.console.__file__).parent / "console.js").read_text(encoding="utf-8")
    read = set(re.findall(r"\bmodel\.(\w+)", code))
    assert read == set(FACTS)


async def test_a_browser_gets_a_page_that_takes_nothing_from_anywhere_else(console: Api) -> None:
    page = await console.client.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    text = page.text
    assert "<textarea" in text
    assert re.findall(r"\b(?:src|href|action)=\"(?!/|#|data:,)[^\"]*\"", text) == []
    assert not any(word in text for word in ("@import", "/*style*/", "/*script*/"))
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("accept", ["*/*", "", "text/plain", "application/json, text/plain, */*"])
async def test_ollamas_clients_get_the_words_that_they_look_for(console: Api, accept: str) -> None:
    answer = await console.client.get("/", headers={"accept": accept})
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert answer.headers["content-type"].startswith("text/plain")


async def test_who_wants_json_gets_links(console: Api) -> None:
    answer = await console.client.get("/", headers={"accept": "application/json"})
    assert answer.json()["links"]["generate"] == "/generate"


async def test_figures_are_those_of_the_metrics_again_and_again(console: Api) -> None:
    console.metrics.set_queue_size(7)
    client = follow(console)
    first, second = await client.next_event(), await client.next_event()
    client.leave()
    await client.done
    assert first["state"] == "ready"
    assert first["model"]["drafters"] == list(INFO.drafters)
    memory = {
        name: value for name, value in first["figures"].items() if name.startswith("memory_bytes/")
    }
    measured = console.metrics.read(FIGURES) | memory
    unknown = {name for name, value in measured.items() if math.isnan(value)}
    assert unknown == {"avg_jump", "draft_length", "estimated_speedup"}  # no request decoded
    assert first["figures"] == measured | dict.fromkeys(unknown)
    assert first["figures"]["memory_bytes/anon"] > 0
    assert second["seconds"] > first["seconds"]


async def test_figures_end_with_the_service(console: Api) -> None:
    console.service.state = ModelState.DRAINING
    client = follow(console)
    assert (await client.next_event())["state"] == "draining"
    await asyncio.wait_for(client.done, PATIENCE)


async def test_every_figure_that_the_page_draws_is_sent(console: Api) -> None:
    text = (await console.client.get("/", headers=BROWSER)).text
    sent = set(console.metrics.read(FIGURES))
    named = set(re.findall(r"figures\.([a-z_]+)", text))
    named |= set(re.findall(r"figures\[\"([a-z_/]+)\"\]", text))
    assert named
    assert named <= sent
    assert {f"{kind}_tokens_total/draft" for kind in ("draft", "accepted")} <= sent
