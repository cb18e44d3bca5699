"""Open WebUI in a browser: the list of models, a chat, stop, regenerate.

It starts without the network, on an empty folder, and knows this service by one of its two
protocols. Its built-in tools are off: their description has 6,600 tokens, and a model of 135
million parameters can make nothing of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser import launched
from tests.clients import environments
from tests.clients.forms import ANSWER, LONG_ANSWER, QUESTION
from tests.clients.table import OLLAMA, Client
from tests.loopback import HOST, free_port
from tests.waiting import answers, wait

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

START_SECONDS = 180.0
PATIENCE = 60_000  # milliseconds for something to appear
SETTINGS = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "WEBUI_AUTH": "false",
    "RAG_EMBEDDING_ENGINE": "ollama",  # the default would need torch
    "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    "DEFAULT_MODEL_PARAMS": json.dumps({"temperature": 0}),
    # Each of them asks the model once more after an answer.
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
}


def attempt(
    client: Client, address: str, log: Path, figure: Callable[[str], float]
) -> dict[str, str | None]:
    """Try the features of a page; return what is wrong, by the feature."""
    found: dict[str, str | None] = {}
    with running(client, address, log) as port, launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"http://{HOST}:{port}/")
        page.get_by_text("Okay, Let's Go!").click()  # to the news of this version
        for feature, step in (
            ("models", models),
            ("chat", chat),
            ("regenerate", regenerate),
            ("stop", stop),
        ):
            try:
                found[feature] = step(page, client, figure)
            except Exception as error:  # a browser's errors are many; each of them is a red cell
                page.screenshot(path=log.with_suffix(f".{feature}.png"))
                found[feature] = f"{type(error).__name__}: {error}"
    return found


@contextmanager
def running(client: Client, address: str, log: Path) -> Iterator[int]:
    """Run Open WebUI; yield its port once it answers."""
    ollama = client.protocol == OLLAMA
    port = free_port()
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        there = {
            "DATA_DIR": folder,
            "WEBUI_SECRET_KEY": "any",
            "ENABLE_OLLAMA_API": str(ollama),
            "ENABLE_OPENAI_API": str(not ollama),
            "OLLAMA_BASE_URLS": address,
            "RAG_OLLAMA_BASE_URL": address,
            "OPENAI_API_BASE_URLS": f"{address}/v1",
            "OPENAI_API_KEYS": "any",
        }
        program = environments.python("page").with_name("open-webui")
        process = subprocess.Popen(
            [program, "serve", "--host", HOST, "--port", str(port)],
            env=kept | SETTINGS | there,
            stdout=output,
            stderr=output,
        )
        try:
            wait("Open WebUI is ready", lambda: _is_ready(process, port), START_SECONDS)
            yield port
        finally:
            process.kill()
            process.wait()


def _is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"Open WebUI ended with {process.returncode}; see its log")
    return answers(f"http://{HOST}:{port}/health")


def models(page: Page, client: Client, _figure: object) -> str | None:
    """Choose the model from the list."""
    page.locator("#model-selector-model-button").click()
    listed = page.locator("[id^=model-option-]")
    listed.first.wait_for()
    names = [text.split("\n")[0] for text in listed.all_inner_texts()]
    listed.first.click()
    return None if names == [client.model] else f"the list has {names}"


def chat(page: Page, _client: Client, _figure: object) -> str | None:
    """Ask, and read the whole answer."""
    say(page, QUESTION)
    text = whole(page)
    return None if ANSWER in text else repr(text)


def regenerate(page: Page, _client: Client, figure: Callable[[str], float]) -> str | None:
    """Have the answer written once more, beside the first one."""
    before = figure('requests_total{outcome="stop"}')
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_text("Try Again").click()
    page.get_by_text("2/2").wait_for()
    text = whole(page)
    ran = figure('requests_total{outcome="stop"}') - before
    return None if ANSWER in text and ran == 1 else f"{ran:.0f} answers, {text!r}"


def stop(page: Page, _client: Client, figure: Callable[[str], float]) -> str | None:
    """Stop a long answer once it has begun; the service must stop, too."""
    cancelled = 'requests_total{outcome="cancelled"}'
    before = figure(cancelled)
    page.goto(page.url.partition("/c/")[0])  # a new chat
    say(page, LONG_ANSWER)
    wait("the answer begins", lambda: figure("requests_running") > 0)
    page.get_by_role("button", name="Stop").click()
    wait("the server is idle", lambda: figure("requests_running") == 0)
    return None if figure(cancelled) == before + 1 else "the service was not told to stop"


def say(page: Page, text: str) -> None:
    """Send a message."""
    page.locator("#chat-input").click()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def whole(page: Page) -> str:
    """Wait for the end of the last answer; return its text."""
    last: Locator = page.locator(".chat-assistant").last
    page.get_by_role("button", name="Regenerate").last.wait_for()
    return last.inner_text()
