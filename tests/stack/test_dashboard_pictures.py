"""The script that photographs dashboards, on a stand-in for Grafana that draws as late as one."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from scripts.browser import BrowserError, launched
from tests.loopback import Handler, listening
from tests.stack import queries
from tests.stack.support import Finished, run

pytestmark = pytest.mark.e2e
ODD = "Latency, p95"  # the panel of "Is it healthy?" that differs
# Adds each panel as Grafana does: first its frame and a loading bar, later what it shows. Where
# one is never drawn, the others are at once, so that a slow machine makes no difference.
SCRIPT = """
for (const [title, ends] of Object.entries(PANELS)) {
  if (ends === 'missing') continue;
  const panel = document.createElement('section');
  panel.dataset.testid = `data-testid Panel header ${title}`;
  panel.innerHTML = `<div aria-label="Panel loading bar"></div><h6></h6>
    <div data-testid="data-testid panel content"></div>`;
  panel.querySelector('h6').textContent = title;
  document.body.append(panel);
  if (ends === 'loading') continue;
  const show = () => {
    panel.firstChild.remove();
    const content = panel.querySelector('[data-testid="data-testid panel content"]');
    if (ends === 'drawn') content.append(document.createElement('canvas'));
    if (ends === 'text') content.textContent = '42';
    if (ends === 'no data')
      content.innerHTML = '<i data-testid="data-testid Panel data error message">No data</i>';
    if (ends === 'error') {
      content.append(document.createElement('canvas'));
      panel.insertAdjacentHTML('beforeend',
        '<button data-testid="data-testid Panel status error"></button>');
    }
  };
  if (LATE) setTimeout(show, 300 * Math.random());
  else show();
}
"""


class Grafana(Handler):
    """Answers for each dashboard; its panel `ODD` ends as `odd` says, all others are drawn."""

    odd = "drawn"
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        found = [
            board
            for board in queries.boards().values()
            if self.path.startswith(f"/d/{board['uid']}?")
        ]
        if not found or self.odd == "not found":
            self.reply(404, b"")
            return
        panels = {
            panel["title"]: "text" if panel["type"] == "stat" else "drawn"
            for panel in found[0]["panels"]
            if panel["type"] != "row"
        }
        if found[0]["uid"] == "specops-healthy":
            panels[ODD] = self.odd
        given = f"const PANELS = {json.dumps(panels)}, LATE = {json.dumps(self.odd == 'drawn')};"
        body = f"<body><script>{given}{SCRIPT}</script>".encode()
        self.reply(200, body, {"Content-Type": "text/html; charset=utf-8"})


@pytest.fixture(scope="module", autouse=True)
def needs_a_browser() -> None:
    try:
        with launched():
            pass
    except BrowserError as missing:
        pytest.skip(f"NO DASHBOARD WAS PHOTOGRAPHED: {missing}")


@pytest.fixture
def grafana(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """Where the stand-in listens, and what it has been asked for."""
    asked: list[str] = []
    handler = type("Handler", (Grafana,), {"odd": request.param, "asked": asked})
    with listening(handler) as port:
        yield f"http://127.0.0.1:{port}", asked


def photograph(url: str, folder: Path, patience: float) -> Finished:
    options = ("--output", folder, "--patience", patience, "--minutes", 5)
    return run(sys.executable, "scripts/dashboard_pictures.py", url, *options)


@pytest.mark.parametrize("grafana", ["drawn"], indirect=True)
def test_every_dashboard_has_its_picture_of_all_its_rows(
    grafana: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, asked = grafana
    done = photograph(url, tmp_path / "new", 30)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for name, board in queries.boards().items():
        picture = (tmp_path / "new" / f"{name}.png").read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", picture[16:24])
        bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
        assert width == 1600
        assert height > 38 * bottom
        assert any(path.startswith(f"/d/{board['uid']}?kiosk&from=now-5m") for path in asked)


@pytest.mark.parametrize(
    ("grafana", "words"),
    [
        ("error", "shows an error"),
        ("no data", "shows no data: No data"),
        ("missing", "is not there"),
        ("loading", "is loading"),
        ("nothing", "is empty"),
    ],
    indirect=["grafana"],
)
def test_a_panel_that_is_not_drawn_is_named(
    grafana: tuple[str, list[str]], words: str, tmp_path: Path
) -> None:
    done = photograph(grafana[0], tmp_path, 2)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"Is it healthy? / {ODD} {words}"]
    assert len(list(tmp_path.glob("*.png"))) == len(queries.boards())


@pytest.mark.parametrize("grafana", ["not found"], indirect=True)
def test_a_dashboard_that_is_not_there_is_said(
    grafana: tuple[str, list[str]], tmp_path: Path
) -> None:
    done = photograph(grafana[0], tmp_path, 2)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == len(queries.boards())
    assert "answers 404" in done.stderr
