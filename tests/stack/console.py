"""What tests do with the console in a browser: open, ask, wait, script answers, measure."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

# The prompt repeats itself, so that drafters find draft tokens.
PROMPT = "def __enter__(self):\n    return self\n\ndef __exit__(self, *args):\n    self.close()\n\n"
PATIENCE_MS = 90_000  # for a busy machine
CHAT_URL = "**/v1/chat/completions"


@contextmanager
def opened(
    browser: Any, url: str, *, refused: bool = False, **context: Any
) -> Iterator[tuple[Any, list[tuple[str, int]]]]:
    """A page that reaches only its own server, and the paths that it asked, with statuses.

    An error in its script, against its policy or of its network fails the test, as a status of an
    error does; not with `refused`, for tests that cause one. So does one of a page that it opens.
    """
    own, asked, wrong = urlsplit(url).netloc, [], []
    within = browser.new_context(**context)
    within.set_default_timeout(PATIENCE_MS)
    page = within.new_page()

    def cut(route: Any) -> None:
        if urlsplit(route.request.url).netloc == own:
            route.continue_()
        else:
            wrong.append(f"asked {route.request.url}")
            route.abort("internetdisconnected")

    def answered(answer: Any) -> None:
        asked.append((urlsplit(answer.url).path, answer.status))
        if answer.status >= 400 and not refused:
            wrong.append(f"{answer.status}: {answer.url}")

    def said(message: Any) -> None:
        if message.type == "error" and not (refused and "Failed to load" in message.text):
            wrong.append(message.text)

    within.route("**/*", cut)
    within.on("response", answered)
    within.on("console", said)
    within.on("weberror", lambda error: wrong.append(str(error.error)))
    page.goto(url)
    yield page, asked
    within.close()
    assert not wrong, wrong


@contextmanager
def console(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """The connected console, see `opened`."""
    with opened(browser, url, refused=True, **context) as (page, _):
        page.wait_for_selector("#state.ready")
        yield page


def until(page: Any, condition: str | Callable[[], bool]) -> None:
    """Wait until an expression of the page, or a condition here, holds.

    The page's policy forbids playwright's own way, `eval`.
    """
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not (condition() if callable(condition) else page.evaluate(condition)):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def option(page: Any, label: str, text: str) -> None:
    if not page.get_by_label(label).is_visible():
        page.get_by_text("Options").click()
    page.get_by_label(label).fill(text)


def ask(page: Any, tokens: int, prompt: str = PROMPT) -> None:
    """Start a completion of so many tokens."""
    open_completion(page)
    page.get_by_label("Prompt").fill(prompt)
    option(page, "Longest answer", str(tokens))
    page.get_by_role("button", name="Generate").click()


def open_chat(page: Any) -> None:
    page.get_by_role("tab", name="Chat").click()


def open_completion(page: Any) -> None:
    page.get_by_role("tab", name="Completion").click()


def say(page: Any, text: str) -> None:
    """Send a message in the chat."""
    page.locator("#message").fill(text)
    page.get_by_role("button", name="Send").click()


def converse(page: Any, text: str) -> None:
    """Send a message in the chat, and wait for the whole answer."""
    say(page, text)
    finish(page)


def finish(page: Any) -> None:
    until(page, "document.getElementById('progress').textContent.startsWith('Done')")


def slow_network(page: Any) -> None:
    slow = {"offline": False, "latency": 0, "downloadThroughput": 10_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)


# -- scripted answers of the chat --------------------------------------------------------------


def chunk(text: str = "", origin: str = "target", finish: str | None = None, **delta: Any) -> Any:
    """One event of a streamed chat answer."""
    tokens = [{"id": 1, "text": text, "origin": origin}] if text else []
    if text and not delta:
        delta = {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "tokens": tokens, "finish_reason": finish}]}


LAST = chunk(finish="stop") | {
    "timings": {
        "predicted_n": 3,
        "predicted_per_second": 10.0,
        "tokens_per_step": 1.5,
        "draft_n": 2,
        "draft_n_accepted": 1,
    }
}


def script(page: Any, *events: Any, asked: list[Any] | None = None) -> None:
    """Answer the next chat requests with these events; append their bodies to `asked`."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(route: Any) -> None:
        if asked is not None:
            asked.append(route.request.post_data_json)
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body)

    page.unroute(CHAT_URL)
    page.route(CHAT_URL, answer)


# -- contrast ----------------------------------------------------------------------------------


def _luminance(colour: list[float]) -> float:
    """WCAG's relative luminance of red, green and blue out of 255."""
    parts = [c / 255 for c in colour]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrasts(page: Any, selector: str) -> dict[str, float]:
    """WCAG's contrast ratio of each element's text to its background, by the element's HTML."""
    found = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map((element) => {
            const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
            const clear = (colour) => colour.length === 4 && colour[3] === 0;
            let painted = element;
            const behind = () => numbers(getComputedStyle(painted).backgroundColor);
            while (clear(behind())) painted = painted.parentElement;
            return [element.outerHTML, numbers(getComputedStyle(element).color), behind()];
        })""",
        selector,
    )
    ratios = {}
    for html, own, below in found:
        dark, light = sorted(map(_luminance, (own[:3], below[:3])))
        ratios[html] = (light + 0.05) / (dark + 0.05)
    return ratios
