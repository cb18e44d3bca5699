"""Opens the dashboards in a running Grafana and saves a picture of each.

    python scripts/dashboard_pictures.py [URL] [--output FOLDER] [--minutes 15] [--patience 60]

The script takes a picture when every panel is drawn: it exists, it has stopped loading, and it has
content, or its text for the case that nothing was measured. If a panel shows an error, lacks data
for another reason, or is not drawn in time, the script still saves the pictures, names the panels
and exits with 1. Folded rows stay folded. It finds panels by the attributes that Grafana has for
its own tests (`@grafana/e2e-selectors`, unchanged since version 11).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from tests.browser import BrowserError, launched

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = ROOT / "grafana" / "dashboards"
POLL_MS = 100
WIDTH = 1600
# Grafana's grid has 30 pixels per row and 8 between rows. Grafana draws only visible panels, so the
# window is as high as the dashboard.
ROW_PIXELS, FRAME_PIXELS = 38, 160
LOOK = """(panels) => panels.map(({title, nothing}) => {
  const marked = (mark) => `[data-testid="data-testid ${mark}"]`;
  const panel = [...document.querySelectorAll('[data-testid^="data-testid Panel header "]')]
    .find((found) => found.dataset.testid === `data-testid Panel header ${title}`);
  if (!panel) return 'is not there';
  if (panel.querySelector(marked('Panel status error'))) return 'shows an error';
  if (panel.querySelector('[aria-label="Panel loading bar"]')) return 'is loading';
  const empty = panel.querySelector(marked('Panel data error message'));
  if (empty && empty.textContent.trim() !== nothing)
    return `shows no data: ${empty.textContent.trim()}`;
  const content = panel.querySelector(marked('panel content'));
  return content?.querySelector('canvas') || content?.textContent.trim() ? 'drawn' : 'is empty';
})"""


def undrawn(page: Page, nothing: dict[str, str], patience: float) -> dict[str, str]:
    """Wait until all panels are drawn; return those that are not, each with its problem.

    Args:
        page: the browser's page.
        nothing: each panel's text for the case that there is no data, by title.
        patience: maximum seconds to wait.
    """
    deadline = time.monotonic() + patience
    panels = [{"title": title, "nothing": words} for title, words in nothing.items()]
    while True:
        states = dict(zip(nothing, page.evaluate(LOOK, panels), strict=True))
        wrong = {name: state for name, state in states.items() if state != "drawn"}
        if not wrong or time.monotonic() > deadline:
            return wrong
        page.wait_for_timeout(POLL_MS)


def unopened(page: Page, url: str) -> str | None:
    """Open a page; return the problem if that fails."""
    from playwright.sync_api import Error  # noqa: PLC0415 - not every machine has it

    try:
        answer = page.goto(url)
    except Error as failed:
        return f"does not answer: {failed.message.splitlines()[0]}"
    return None if answer is None or answer.ok else f"answers {answer.status}"


def take(page: Page, url: str, board: dict[str, Any], output: Path, patience: float) -> list[str]:
    """Save a picture of one dashboard; return its problems, one line per panel.

    Args:
        page: the browser's page.
        url: address of the dashboard.
        board: its JSON.
        output: file for the picture.
        patience: maximum seconds to wait.
    """
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    page.set_viewport_size({"width": WIDTH, "height": rows * ROW_PIXELS + FRAME_PIXELS})
    if problem := unopened(page, url):
        return [f"{board['title']} {url} {problem}"]
    nothing = {
        panel["title"]: panel["fieldConfig"]["defaults"]["noValue"]
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    wrong = undrawn(page, nothing, patience)
    page.screenshot(path=output)
    return [f"{board['title']} / {title} {state}" for title, state in wrong.items()]


def main() -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:3000")
    parser.add_argument("--output", type=Path, default=Path("pictures"), metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=15, help="time range, up to now")
    parser.add_argument("--patience", type=float, default=60, help="maximum seconds per dashboard")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    wrong = []
    try:
        with launched() as browser:
            page = browser.new_page()
            for path in sorted(DASHBOARDS.glob("*.json")):
                board = json.loads(path.read_text("utf-8"))
                url = f"{options.url}/d/{board['uid']}?kiosk&from=now-{options.minutes:g}m&to=now"
                picture = options.output / f"{path.stem}.png"
                wrong += take(page, url, board, picture, options.patience)
                print(picture, flush=True)
    except BrowserError as missing:
        wrong.append(str(missing))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
