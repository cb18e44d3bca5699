"""The console in a real browser, on the real demo pair: it types, streams, colours and draws.

Needs playwright and a Chromium (Debian: `apt-get install chromium`); skipped, saying so, without.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stack.support import ROOT, tool
from tests.stack.test_native_stack import free_port

pytestmark = pytest.mark.e2e
MISSING = "THE CONSOLE WAS NOT TESTED IN A BROWSER: "
# Repeats itself, so that there is something to guess.
PROMPT = "def __enter__(self):\n    return self\n\ndef __exit__(self, *args):\n    self.close()\n\n"
START_SECONDS = 120.0
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A running API on the demo pair."""
    port = str(free_port())
    process = subprocess.Popen(
        [sys.executable, "-m", "specops", "serve"],
        cwd=ROOT,
        env={**os.environ, "SPECOPS_PORT": port, "SPECOPS_MODEL": "demo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _ready(address):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason=f"{MISSING}no playwright")
    binary = tool("chromium") or tool("chromium-browser") or tool("google-chrome")
    if binary is None:
        pytest.skip(f"{MISSING}no Chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The console, connected; an error in its script fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on(
        "console", lambda said: errors.append(said.text) if "Content Security" in said.text else 0
    )
    opened.goto(url)
    opened.wait_for_selector("#state.ready")
    yield opened
    context.close()
    assert errors == []


def until(page: Any, condition: str) -> None:
    """Wait until an expression holds. The page's policy forbids playwright's own way, `eval`."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def ask(page: Any, tokens: int, prompt: str = PROMPT) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_text("Options").click()
    page.get_by_label("Longest answer").fill(str(tokens))
    page.get_by_role("button", name="Generate").click()


def finish(page: Any) -> None:
    until(page, "document.getElementById('progress').textContent.startsWith('Done')")


def test_an_answer_streams_and_guesses_are_coloured(page: Any) -> None:
    ask(page, 200)
    until(page, "document.querySelectorAll('#answer span').length > 8")
    assert page.locator("#progress").inner_text() == "Generating."
    page.wait_for_selector("#answer [class^=guess-]")
    finish(page)
    colours = page.evaluate(
        """() => ['#answer span:not([class])', '#answer [class^=guess-]'].map((selector) =>
            getComputedStyle(document.querySelector(selector)).color)"""
    )
    assert colours[0] != colours[1]
    legend = dict(re.findall(r"^(.*): (\d+)$", page.locator("#legend").inner_text(), re.MULTILINE))
    assert sum(map(int, legend.values())) == page.locator("#answer span").count()


def test_the_figures_are_those_of_the_answer(page: Any, url: str) -> None:
    ask(page, 40)
    finish(page)
    body = {"prompt": PROMPT, "max_new_tokens": 40, "details": True}
    plain = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    assert page.locator("#answer").text_content() == plain["generated_text"]
    assert float(page.locator("#f-speed").inner_text()) > 0
    assert float(page.locator("#f-jump").inner_text()) >= 1
    assert re.fullmatch(r"\d+ of \d+", page.locator("#f-accepted").inner_text())


def test_charts_move(page: Any) -> None:
    path = "document.querySelector('#chart-speed path').getAttribute('d')"
    until(page, f"{path} !== null")
    before = page.evaluate(path)
    ask(page, 150)
    until(page, f"{path}.length > {len(before)}")
    until(page, "Number(document.getElementById('now-speed').textContent) > 0")
    until(page, "Number(document.getElementById('now-jump').textContent) >= 1")
    assert re.fullmatch(r"\d+ of \d+", page.locator("#now-memory").inner_text())
    assert "Tokens per jump" in page.locator("#chart-jump").get_attribute("aria-label")


def test_an_error_shows_as_an_error(page: Any) -> None:
    ask(page, 10_000_000)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "422" in alert.inner_text()
    assert "max_new_tokens" in alert.inner_text()
    page.get_by_label("Longest answer").fill("4")
    page.get_by_role("button", name="Generate").click()
    finish(page)
    assert not alert.is_visible()


def test_an_answer_can_be_stopped(page: Any) -> None:
    ask(page, 900)
    page.wait_for_selector("#answer span")
    page.keyboard.press("Escape")
    until(page, "document.getElementById('progress').textContent === 'Stopped.'")
    assert page.get_by_role("button", name="Generate").is_enabled()


def test_the_keyboard_is_enough(page: Any) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the prompt
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+A")
    page.keyboard.type("import os")
    page.keyboard.press("Control+Enter")
    finish(page)
    assert page.locator("#answer span").count() > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"


def test_a_screen_reader_finds_names_for_everything(page: Any) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button, a, svg')]
            .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel
                || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for role, name in (("region", "Answer"), ("textbox", "Prompt"), ("heading", "Ask")):
        assert page.get_by_role(role, name=name).count() == 1
    assert page.locator("#progress[role=status]").count() == 1


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_phone(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    ask(page, 60)
    finish(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.get_by_role("button", name="Generate").bounding_box()
    assert box["height"] >= 44  # a finger's width


def contrast(page: Any, selector: str) -> float:
    """WCAG's contrast ratio of an element's text on the background behind the answer."""
    rgb = page.evaluate(
        """(selector) => {
            const numbers = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const own = getComputedStyle(document.querySelector(selector)).color;
            const below = getComputedStyle(document.getElementById('answer')).backgroundColor;
            return [numbers(own), numbers(below)];
        }""",
        selector,
    )

    def luminance(colour: list[float]) -> float:
        parts = [c / 255 for c in colour]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted(map(luminance, rgb))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    ask(page, 80)
    finish(page)
    before = contrast(page, "#answer")
    assert min(before, contrast(page, "#answer [class^=guess-]"), contrast(page, "h3")) >= 4.5
    colour = "getComputedStyle(document.body).backgroundColor"
    was = page.evaluate(colour)
    page.locator("#theme").click()
    assert page.evaluate(colour) != was
