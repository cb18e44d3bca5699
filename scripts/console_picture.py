"""Takes the picture of the console in docs/, from a running API, in the middle of an answer.

    python scripts/console_picture.py [--url URL] [--output PNG] [--dark]

Needs playwright and a Chromium. A few answers come first, so that the charts have something to
draw.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from scripts.browser import launched

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = 12
TOKENS = 400
SHOWN_TOKENS = 150  # of the last answer, when the picture is taken


def ask(page: Page, drafter: str) -> None:
    """Send the prompt on the page."""
    page.evaluate(
        """([tokens, drafter]) => {
            document.getElementById('max_new_tokens').value = tokens;
            document.getElementById('drafter').value = drafter;
        }""",
        [TOKENS, drafter],
    )
    page.get_by_role("button", name="Generate").click()


def take(page: Page, output: Path) -> None:
    """Some answers to the end, then one more, and the picture while it streams."""
    page.wait_for_selector("#state.ready")
    for number in range(ANSWERS):
        ask(page, ("ngram", "none", "draft")[number * 3 // ANSWERS])
        page.wait_for_selector("#send:not([disabled])")
        page.wait_for_timeout(500)
    ask(page, "cascade")
    page.wait_for_selector(f"#answer span:nth-of-type({SHOWN_TOKENS})", state="attached")
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
            viewport={"width": 1280, "height": 1130},
            color_scheme="dark" if options.dark else "light",
        )
        page.goto(options.url)
        take(page, options.output)


if __name__ == "__main__":
    main()
