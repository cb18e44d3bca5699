"""Takes the picture of the console for docs/ from a running API, in the middle of an answer.

    python scripts/console_picture.py [URL]

It needs playwright, Chromium, and an API that serves a chat model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from tests.browser import launched
from tests.stack.console import console, finish, open_chat, say, until

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "console.png"
SCHEMA = """{"type": "object", "properties": {
  "name": {"type": "string"}, "capital": {"type": "string"}, "languages": {"type": "array",
  "items": {"type": "string"}, "maxItems": 2}}, "required": ["name", "capital", "languages"]}"""
FILL = "(schema) => { document.getElementById('schema').value = schema; }"
SHOWN_CHARACTERS = 200  # of the last answer, when the picture is taken

if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    viewport = {"width": 1280, "height": 930}
    with launched() as browser, console(browser, url, viewport=viewport) as page:
        open_chat(page)
        page.evaluate(FILL, SCHEMA)
        say(page, "Tell me about France: its name, its capital and its language.")
        finish(page)
        page.wait_for_timeout(3000)  # so that the charts have something to draw
        page.evaluate(FILL, "")
        say(page, "Describe the Alps in three paragraphs, with a short heading above each.")
        shown = "document.querySelector('#turns > li:last-child').innerText.length"
        until(page, f"!document.querySelector('.send').disabled || {shown} > {SHOWN_CHARACTERS}")
        page.screenshot(path=PICTURE)
