"""The pages in a real browser whose network is cut: they ask their own server and nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from specops.config import Settings
from specops.http.app import create_app
from specops.http.server import make_server
from tests.fakes import FakeService
from tests.http.openai_api import ANSWER
from tests.waiting import PATIENCE, wait

pytestmark = pytest.mark.e2e


@contextmanager
def running(**changed: Any) -> Iterator[str]:
    """A service on a fake engine, on a thread of its own; its address."""
    settings = Settings(**changed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        started: list[Any] = []

        async def serve() -> None:
            app = create_app(settings, FakeService(ANSWER))  # type: ignore[arg-type]
            server = make_server(app, settings)
            started.append(server)
            await server.serve([listener])

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            wait("it serves", lambda: bool(started and started[0].started))
            yield f"http://127.0.0.1:{port}"
        finally:
            started[0].should_exit = True
            thread.join(PATIENCE)


@contextmanager
def opened(browser: Any, url: str) -> Iterator[tuple[Any, list[tuple[str, int]], list[str]]]:
    """A page, the paths that it asked with their statuses, and what went wrong in it."""
    origin = urlsplit(url)
    asked: list[tuple[str, int]] = []
    wrong: list[str] = []
    context = browser.new_context()
    page = context.new_page()

    def cut(route: Any) -> None:
        there = urlsplit(route.request.url)
        if (there.scheme, there.netloc) == (origin.scheme, origin.netloc):
            route.continue_()
        else:
            wrong.append(f"asked {route.request.url}")
            route.abort("internetdisconnected")

    context.route("**/*", cut)
    page.on("response", lambda answer: asked.append((urlsplit(answer.url).path, answer.status)))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.clock.install()  # a test may let time pass
    page.goto(url)
    yield page, asked, wrong
    context.close()


def until(page: Any, condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE * 50)):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError(page.content()[:2000])


@pytest.mark.parametrize("keys", ["", "secret"])
def test_the_description_is_shown_without_the_network(browser: Any, keys: str) -> None:
    with running(api_keys=keys) as url, opened(browser, f"{url}/docs") as (page, asked, wrong):
        page.wait_for_selector("#operations-tag-chat, .opblock")
        text = page.locator("#swagger-ui").inner_text()
        for path in ("/generate", "/v1/chat/completions", "/api/chat", "/health"):
            assert path in text
        # An endpoint opens, and its example can be sent.
        page.locator(".opblock", has_text="/health/live").first.locator("button").first.click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        until(page, lambda: ("/health/live", 200) in asked)
        page.wait_for_selector(".responses-wrapper .live-responses-table")
    assert wrong == []
    assert {path for path, _ in asked} == {
        *("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"),
        "/health/live",
    }


def test_an_example_is_sent_with_the_key(browser: Any) -> None:
    with running(api_keys="secret") as url, opened(browser, f"{url}/docs") as (page, asked, _):
        page.get_by_role("button", name="Authorize").first.click()
        page.locator(".auth-container input").fill("secret")
        page.locator(".auth-btn-wrapper").get_by_role("button", name="Apply").click()
        page.get_by_role("button", name="Close").click()
        page.locator("#operations-openai-models_v1_models_get button").first.click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        until(page, lambda: ("/v1/models", 200) in asked)


def test_the_console_asks_nobody_else(browser: Any) -> None:
    with running() as url, opened(browser, f"{url}/") as (page, asked, wrong):
        page.wait_for_selector("#state.ready")
    assert wrong == []
    assert {path for path, _ in asked} == {"/", "/console/figures"}


def test_a_console_without_its_key_asks_once_and_goes_on_when_it_has_one(browser: Any) -> None:
    with running(api_keys="secret") as url, opened(browser, f"{url}/") as (page, asked, _):

        def refused() -> int:
            return asked.count(("/console/figures", 401))

        page.wait_for_selector("#state.failed")
        assert "needs a key" in page.locator("#state").inner_text()
        page.clock.run_for(600_000)
        assert refused() == 1
        page.get_by_text("Options").click()
        page.get_by_label("API key").fill("wrong")
        page.get_by_label("API key").blur()
        until(page, lambda: refused() == 2)
        page.clock.run_for(600_000)
        until(page, lambda: "does not know this key" in page.locator("#state").inner_text())
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").blur()
        page.wait_for_selector("#state.ready")
        assert refused() == 2
