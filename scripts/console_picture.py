"""Takes the picture of the console in docs/, from a running API, in the middle of an answer.

    python scripts/console_picture.py [--url URL] [--output PNG] [--dark]

Needs playwright, a Chromium, and a chat model behind the API.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from scripts.browser import launched

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = """{"type": "object", "properties": {
  "name": {"type": "string"}, "capital": {"type": "string"}, "languages": {"type": "array",
  "items": {"type": "string"}, "maxItems": 2}}, "required": ["name", "capital", "languages"]}"""
QUESTIONS = (
    "Tell me about France: its name, its capital and its language.",
    "Describe the Alps in three paragraphs, with a short heading above each.",
)
SHOWN_CHARACTERS = 200  # the picture shows so many of the last answer


def say(page: Page, text: str) -> None:
    """Send a message."""
    page.locator("#message").fill(text)
    page.get_by_role("button", name="Send").click()


def take(page: Page, output: Path) -> None:
    """Ask for an answer that follows a schema, then for a free one; take the picture meanwhile."""
    page.wait_for_selector("#state.ready")
    page.get_by_role("tab", name="Chat").click()
    page.evaluate("(schema) => { document.getElementById('schema').value = schema; }", SCHEMA)
    say(page, QUESTIONS[0])
    page.wait_for_selector(".send:not([disabled])")
    page.wait_for_timeout(3000)  # so that the charts have something to draw
    page.evaluate("document.getElementById('schema').value = ''")
    say(page, QUESTIONS[1])
    shown = "document.querySelector('#turns > li:last-child').innerText.length"
    complete = "!document.querySelector('.send').disabled"
    # The page's policy forbids playwright's own way to wait for an expression.
    while not page.evaluate(f"{complete} || {shown} > {SHOWN_CHARACTERS}"):
        page.wait_for_timeout(50)
    page.screenshot(path=output)


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "console.png")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with launched() as browser:
        page = browser.new_page(
            viewport={"width": 1280, "height": 930},
            color_scheme="dark" if options.dark else "light",
        )
        page.goto(options.url)
        take(page, options.output)


if __name__ == "__main__":
    main()
