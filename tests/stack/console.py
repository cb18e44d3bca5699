"""What tests of the console in a browser do with it: open, ask, wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Repeats itself, so that there is something to draft.
PROMPT = "def __enter__(self):\n    return self\n\ndef __exit__(self, *args):\n    self.close()\n\n"
PATIENCE_MS = 90_000  # a machine may be busy; nothing waits longer than it has to


@contextmanager
def console(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """The console, connected; an error in its script, or one against its policy, fails the test."""
    within = browser.new_context(**context)
    opened = within.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on(
        "console", lambda said: errors.append(said.text) if "Content Security" in said.text else 0
    )
    opened.goto(url)
    opened.wait_for_selector("#state.ready")
    yield opened
    within.close()
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
